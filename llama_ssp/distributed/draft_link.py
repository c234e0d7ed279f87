"""A TCP connection between two ranks, apart from the process groups, that carries whole frames of bytes.

A rank inside a collective, or a receive of gloo or NCCL, cannot look whether something has come, cannot give
up without breaking the group, and ends with the other side. On this connection it looks, waits for a limited
time, and goes on when the other rank is gone. Distributions pass through the host even where models are on
GPUs: a copy of K distributions a round (2 MiB at K = 4 and 128 k entries), small next to a target step.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time

from llama_ssp.errors import DistributedError

HEAD = struct.Struct("<4sQ")  # mark, length
MARK = b"lssp"
MOST = 2**32  # bytes of a frame
LOOPBACK = "127.0.0.1"


class LinkLost(Exception):
    """The connection is gone, or what comes is not what was sent; the text says why."""


class Link:
    """One end of a connection. Frames come in order; none is lost unless the connection is."""

    def __init__(self, connection: socket.socket, patience_s: float) -> None:
        """`patience_s` is how long one frame may take once it has begun to come or go."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(patience_s)
        self._connection, self._patience_s = connection, patience_s
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def send(self, frame: bytes) -> None:
        """Raises LinkLost when the connection is gone."""
        try:
            self._connection.sendall(HEAD.pack(MARK, len(frame)) + frame)
        except (OSError, ValueError) as error:
            raise LinkLost(_reason(error)) from error

    def receive(self, seconds: float) -> bytes | None:
        """The next frame; None if none comes in time. With 0 it only looks. Raises LinkLost."""
        try:
            if not self._poll.poll(max(0.0, 1000 * seconds)):
                return None
            mark, length = HEAD.unpack(self._exactly(HEAD.size))
            if mark != MARK or length > MOST:
                raise LinkLost("what comes is not from a rank of this run")
            return bytes(self._exactly(length))
        except (OSError, ValueError) as error:
            raise LinkLost(_reason(error)) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.close()

    def _exactly(self, length: int) -> bytearray:
        whole = bytearray(length)
        rest = memoryview(whole)
        until = time.monotonic() + self._patience_s
        while rest:
            came = self._connection.recv_into(rest)
            if not came:
                raise LinkLost("the other rank has closed the connection")
            if time.monotonic() > until:
                raise LinkLost("a frame does not end")
            rest = rest[came:]
        return whole


class Listener:
    """The end that accepts the connection; it knows the other end by a secret."""

    def __init__(self) -> None:
        self.host, self.secret = address_towards_leader(), secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            self._socket = socket.create_server((self.host, 0), family=family)
        except OSError as error:
            raise _unreachable(self.host, error) from error
        self.port = int(self._socket.getsockname()[1])

    def accept(self, patience_s: float) -> Link:
        """The connection to the end that knows the secret; others are closed."""
        until = time.monotonic() + patience_s
        with self._socket:
            while True:
                self._socket.settimeout(max(0.01, until - time.monotonic()))
                try:
                    connection, _ = self._socket.accept()
                except OSError as error:
                    raise _unreachable(self.host, error) from error
                link = Link(connection, patience_s)
                with contextlib.suppress(LinkLost):
                    word = link.receive(min(patience_s, 5.0)) or b""
                    if secrets.compare_digest(word, self.secret.encode()):
                        return link
                link.close()


def connect(host: str, port: int, secret: str, patience_s: float) -> Link:
    """The connection to the Listener there."""
    try:
        link = Link(socket.create_connection((host, port), patience_s), patience_s)
        link.send(secret.encode())
    except (OSError, LinkLost) as error:
        raise _unreachable(host, error) from error
    return link


def address_towards_leader() -> str:
    """This rank's address on the route to the rendezvous: the leader is there, and can connect to it."""
    try:
        route = socket.getaddrinfo(os.environ.get("MASTER_ADDR", LOOPBACK), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(route[0], socket.SOCK_DGRAM) as probe:
            probe.connect(route[4])  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK


def _reason(error: Exception) -> str:
    return "it does not answer" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


def _unreachable(host: str, error: Exception) -> DistributedError:
    what, where = "the leader and the draft's first rank cannot connect", f"a connection to {host}"
    fix = "let ranks connect to each other on any port, or use placement=leader"
    return DistributedError(what, where, _reason(error), fix=fix)
