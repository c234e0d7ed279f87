"""A line between two ranks, on which whole frames go: over TCP, beside the groups.

Why not by a group: who waits in a collective, or in a receive of gloo's or NCCL's, cannot look whether
something has come, cannot give up without breaking the group, and ends with the other side. On a line of its
own a rank looks, waits for so long, and goes on when the other is gone. Frames are bytes: distributions go by
way of the host also where models are on GPUs. That costs a copy of K distributions a round (2 MiB at K = 4
and 128 k entries), which is small beside a target step, and nothing that hangs in a stream can hold a frame
up.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import Protocol

from llama_ssp.errors import DistributedError

HEAD = struct.Struct("<4sQ")  # mark, length
MARK = b"lssp"
MOST = 2**32  # bytes of a frame; a longer one is none of ours
HOST_BYTES = 56
SECRET_BYTES = 16
LOOPBACK = "127.0.0.1"


class LinkLost(Exception):
    """The line is gone, or what comes is not what was sent. Why, in a few words."""


class Link(Protocol):
    """One end of a line. Over TCP frames come in order, and none is lost but with the line."""

    def send(self, frame: bytes) -> None:
        """Raises LinkLost when the line is gone."""

    def receive(self, seconds: float) -> bytes | None:
        """The next frame; None if none comes within so many seconds. With 0 it only looks."""

    def close(self) -> None: ...


class TcpLink:
    """A connected socket."""

    def __init__(self, connection: socket.socket, patience_s: float) -> None:
        """`patience_s` is how long one frame may take on its way once it has begun to come or go."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(patience_s)
        self._connection, self._patience_s = connection, patience_s
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def send(self, frame: bytes) -> None:
        try:
            self._connection.sendall(HEAD.pack(MARK, len(frame)) + frame)
        except (OSError, ValueError) as error:
            raise LinkLost(_why(error)) from error

    def receive(self, seconds: float) -> bytes | None:
        try:
            if not self._poll.poll(max(0.0, 1000 * seconds)):
                return None
            mark, length = HEAD.unpack(self._exactly(HEAD.size))
            if mark != MARK or length > MOST:
                raise LinkLost("what comes is not from a rank of this run")
            return bytes(self._exactly(length))
        except (OSError, ValueError) as error:
            raise LinkLost(_why(error)) from error

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
                raise LinkLost("it has closed the line")
            if time.monotonic() > until:
                raise LinkLost("a frame does not end")
            rest = rest[came:]
        return whole


@dataclass(frozen=True)
class Calling:
    """Where one end listens, and the word by which it knows the other."""

    host: str = ""
    port: int = 0
    secret: bytes = bytes(SECRET_BYTES)

    def told(self) -> list[int]:
        """As integers, as many for any host."""
        host = self.host.encode().ljust(HOST_BYTES, b"\0")
        return [self.port, *host, *self.secret]

    @staticmethod
    def heard(values: list[int]) -> Calling:
        host = bytes(values[1 : 1 + HOST_BYTES]).rstrip(b"\0").decode()
        return Calling(host, values[0], bytes(values[1 + HOST_BYTES :]))


class Listener:
    """The end that is called."""

    def __init__(self) -> None:
        host = reached_by_leader()
        try:
            self._socket = socket.create_server((host, 0), family=_family(host))
        except OSError as error:
            raise _unreachable(host, error) from error
        self.calling = Calling(host, self._socket.getsockname()[1], secrets.token_bytes(SECRET_BYTES))

    def accept(self, patience_s: float) -> TcpLink:
        """The line to the one that knows the word; others are hung up on."""
        until = time.monotonic() + patience_s
        with self._socket:
            while True:
                self._socket.settimeout(max(0.01, until - time.monotonic()))
                try:
                    connection, _ = self._socket.accept()
                except OSError as error:
                    raise _unreachable(self.calling.host, error) from error
                link = TcpLink(connection, patience_s)
                with contextlib.suppress(LinkLost):
                    word = link.receive(min(patience_s, 5.0)) or b""
                    if secrets.compare_digest(word, self.calling.secret):
                        return link
                link.close()


def call(calling: Calling, patience_s: float) -> TcpLink:
    """The line to the one that listens."""
    try:
        link = TcpLink(socket.create_connection((calling.host, calling.port), patience_s), patience_s)
        link.send(calling.secret)
    except (OSError, LinkLost) as error:
        raise _unreachable(calling.host, error) from error
    return link


def reached_by_leader() -> str:
    """This rank's address on the way to where ranks meet: the leader is there, and can come back on it."""
    try:
        way = socket.getaddrinfo(os.environ.get("MASTER_ADDR", LOOPBACK), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(way[0], socket.SOCK_DGRAM) as probe:
            probe.connect(way[4])  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _why(error: Exception) -> str:
    return "it does not answer" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


def _unreachable(host: str, error: Exception) -> DistributedError:
    return DistributedError(
        "the leader and the draft's first rank cannot talk", where=f"a line of their own to {host}",
        found=_why(error), fix="let ranks connect to each other on any port, or use placement=leader",
    )  # fmt: skip
