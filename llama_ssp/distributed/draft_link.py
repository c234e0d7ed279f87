"""A TCP connection between two ranks, apart from the process groups, that carries whole frames of bytes.

A rank inside a collective, or a receive of gloo or NCCL, cannot look whether something has come, cannot give
up without breaking the group, and ends with the other side. On this connection it looks, waits for a limited
time, and goes on when the other rank is gone. Distributions pass through the host even where models are on
GPUs: K distributions a round (2 MiB at K = 4 and 128 k entries). They go from the memory where the one side
has them into the memory where the other wants them; nothing is joined, cut or copied in between.
"""

import contextlib
import math
import os
import secrets
import select
import socket
import struct
import time
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from llama_ssp.distributed.interfaces import (
    INTERFACE,
    LOOPBACK,
    address_of,
    address_towards,
    chosen_interface,
)
from llama_ssp.errors import DistributedError, LostPeer

SIZE = struct.Struct("<Q")  # comes before each frame: how many bytes it has
MOST = 1024  # bytes of the first frame, from an end that may be anybody
CLOSED = "the other rank has closed the connection"
PROBES = 3  # of keepalive, without an answer, until a connection is lost


class Link:
    """One end of a connection. Frames come in order; none is lost unless the connection is."""

    def __init__(self, connection: socket.socket, patience_s: float) -> None:
        """`patience_s` is how long one frame may stand still, and how long the other end may be cut off."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(True)
        for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", math.ceil(patience_s), 0))
        _probe(connection, patience_s)
        self._connection = Connection(connection.detach())

    def send(self, head: bytes, payload: Tensor | None = None) -> None:
        """Sends a frame: the head, then the payload's bytes. Raises LostPeer when the connection is gone."""
        try:
            self._write(head, payload)
        except OSError as error:
            raise LostPeer(_reason(error)) from error

    def has_frame(self) -> bool:
        """Returns whether one has begun to come, or the connection is gone; does not wait."""
        return self._connection.poll()

    def receive(self, seconds: float, most: int | None = None, pinned: bool = False) -> Tensor | None:
        """Returns the next frame's bytes; None if none comes in time. With 0 it only looks.

        `most` bounds its bytes; frames of large batches have gigabytes. They are put into pinned memory if
        they are for a GPU. Raises LostPeer.
        """
        try:
            return self._read(most, pinned) if self._connection.poll(seconds) else None
        except EOFError as error:
            raise LostPeer(CLOSED) from error
        except OSError as error:
            raise LostPeer(_reason(error)) from error

    def close(self, last: bytes = b"") -> None:
        """`last` is a short frame, sent where nobody has to wait for the other rank."""
        with contextlib.suppress(OSError):
            room = select.poll()
            room.register(self._connection, select.POLLOUT)
            if last and room.poll(0):
                self._write(last)
        self._connection.close()

    def _write(self, head: bytes, payload: Tensor | None = None) -> None:
        parts = [memoryview(head)]
        if payload is not None:
            parts.append(payload.numpy().data)
        size = sum(map(len, parts))

        left = [memoryview(SIZE.pack(size)), *parts]
        while left:
            count = os.writev(self._connection.fileno(), left)
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]

    def _read(self, most: int | None, pinned: bool) -> Tensor:
        head = bytearray(SIZE.size)
        self._fill(memoryview(head))
        (size,) = SIZE.unpack(head)
        if most is not None and size > most:
            raise OSError(f"a frame of {size} bytes, at most {most} are allowed")

        frame_N = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._fill(frame_N.numpy().data)
        return frame_N

    def _fill(self, room: memoryview) -> None:
        """Waits until the room is full. Raises EOFError when the other end closes."""
        while room:
            count = os.readv(self._connection.fileno(), [room])
            if not count:
                raise EOFError
            room = room[count:]


class Listener:
    """The end that accepts the connection; it knows the other end by a secret."""

    def __init__(self) -> None:
        self.host = own_address()
        self.secret = secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            self._socket = socket.create_server((self.host, 0), family=family)
        except OSError as error:
            raise _unreachable(self.host, error) from error
        self.port = int(self._socket.getsockname()[1])

    def accept(self, patience_s: float) -> Link:
        """Returns the connection to the end that knows the secret; others are closed."""
        until = time.monotonic() + patience_s
        with self._socket:
            while True:
                self._socket.settimeout(max(0.01, until - time.monotonic()))
                try:
                    connection, _ = self._socket.accept()
                except OSError as error:
                    raise _unreachable(self.host, error) from error
                link = Link(connection, patience_s)
                with contextlib.suppress(LostPeer):
                    word_N = link.receive(min(patience_s, 5.0), MOST)
                    word = b"" if word_N is None else word_N.numpy().tobytes()
                    if secrets.compare_digest(word, self.secret.encode()):
                        return link
                link.close()


def connect(host: str, port: int, secret: str, patience_s: float) -> Link:
    """Returns the connection to the Listener there, from the interface that INTERFACE names, if it does."""
    source = (own_address(), 0) if chosen_interface() else None
    try:
        link = Link(socket.create_connection((host, port), patience_s, source), patience_s)
        link.send(secret.encode())
    except (OSError, LostPeer) as error:
        raise _unreachable(host, error) from error
    return link


def own_address() -> str:
    """Returns this rank's address for connections: that of the interface which INTERFACE names, as for gloo.

    Else it is that on the route to the rendezvous: the leader is there, and can connect to it. Raises
    DistributedError for an interface that is not there, or has no address.
    """
    interface = chosen_interface()
    if not interface:
        return address_towards(os.environ.get("MASTER_ADDR", LOOPBACK)) or LOOPBACK
    if address := address_of(interface):
        return address
    raise DistributedError(
        "a network interface has no address",
        where=INTERFACE,
        found=interface,
        allowed=", ".join(name for _, name in socket.if_nameindex()),
        fix="name the one by which the nodes reach each other, on each node its own",
    )


def _probe(connection: socket.socket, patience_s: float) -> None:
    """Has the kernel end a connection whose other machine has not answered its probes for this long.

    The kernel of a machine answers also where the process is stopped, as by Ctrl-Z. What a system does not
    know is left out.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    between_s = max(1, math.floor(patience_s / (PROBES + 1)))
    wanted = {
        "TCP_KEEPIDLE": between_s,
        "TCP_KEEPINTVL": between_s,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": math.ceil(1000 * patience_s),
    }
    for name, value in wanted.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _reason(error: Exception) -> str:
    """Returns why a connection failed. One whose process ended with messages unread is reset."""
    if isinstance(error, TimeoutError | BlockingIOError):
        return "it does not answer"
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return CLOSED
    return str(error) or type(error).__name__


def _unreachable(host: str, error: Exception) -> DistributedError:
    what = "the leader and the draft's first rank cannot connect"
    where = f"a connection to {host}"
    fix = "let ranks connect to each other on any port, or use placement=leader"
    return DistributedError(what, where=where, found=_reason(error), fix=fix)
