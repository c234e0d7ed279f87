"""Whether the nodes of a run can connect to each other, and at which address each listens. No torch.

gloo listens at the address of the machine's own name, or of the interface in GLOO_SOCKET_IFNAME, at any free
port. Where a firewall drops what comes there, or the name is a loopback address (127.0.1.1 in Debian's
/etc/hosts), gloo waits for minutes and says nothing of it. So the first rank of each node tries that before.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from llama_ssp.config.environment import rank_environment
from llama_ssp.distributed.board import LOOK_S, MAX_WORD, Board, BoardLost
from llama_ssp.distributed.identity import own_identity
from llama_ssp.distributed.interfaces import (
    INTERFACE,
    LOOPBACK,
    address_of,
    address_towards,
    chosen_interface,
    default_interface,
    interface_of,
)
from llama_ssp.errors import DistributedError, LostPeer, one_line

log = logging.getLogger(__name__)
TRY_S = 10.0  # for a connection to another node
KEY = "node/{}"  # by rank
NOT_FIRST = "-"  # in place of an address: another rank of this node has it
NAME_IT = (
    f"name the nodes' network: export {INTERFACE}=eth0 NCCL_SOCKET_IFNAME=eth0 (its name by: ip address)"
)


@dataclass(frozen=True)
class Address:
    """Where the first rank of a node listens; `machine` as in Identity."""

    host: str
    machine: str
    address: str
    port: int


def is_first_here() -> bool:
    """Returns whether this is the first rank of its node, which speaks for it."""
    return os.environ.get("LOCAL_RANK") == "0"


def choose_interface() -> None:
    """Sets GLOO_SOCKET_IFNAME where this machine's own name is a loopback address, unless the user has.

    It becomes the interface of the way to the rendezvous, on the rendezvous's own machine that of the default
    route. Without either it stays unset: `reachable` says then what is missing.
    """
    if os.environ.get(INTERFACE) or not is_loopback(own_address()):
        return
    towards = address_towards(os.environ.get("MASTER_ADDR", LOOPBACK))
    if not towards or is_loopback(towards):
        interface = default_interface()
    else:
        interface = interface_of(towards) or default_interface()
    if interface:
        os.environ[INTERFACE] = interface
        said = "%s=%s: %s, the name of this machine, is a loopback address"
        log.info(said, INTERFACE, interface, socket.gethostname())


def own_address() -> str:
    """Returns the address at which gloo listens; a loopback address if it finds no other."""
    if interface := chosen_interface():
        return address_of(interface) or LOOPBACK
    with suppress(OSError):
        for family, _, _, _, place in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as tried:
                tried.bind(place)
                return str(place[0])
    return LOOPBACK


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


@contextmanager
def reachable(board: Board, rank: int, world: int, patience_s: float) -> Iterator[None]:
    """Tries whether the first ranks of all nodes connect to each other; each listens while it is inside.

    All ranks enter it. Raises DistributedError, with the names of both nodes, where a connection fails.
    """
    if rank_environment().nodes == 1:
        yield
        return
    if not is_first_here():
        board.write(KEY.format(rank), NOT_FIRST)
        yield
        return

    own = own_address()
    with _listening(own) as listener:
        facts = [socket.gethostname(), own_identity().machine, own, listener.getsockname()[1]]
        board.write(KEY.format(rank), json.dumps(facts))
        for other in addresses(board, world, patience_s):
            if (other.address, other.port) != (own, facts[-1]):
                _require_connection(other)
        yield


def _listening(address: str) -> socket.socket:
    """Returns a socket that listens at the address. Raises DistributedError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=128)
    except OSError as error:
        raise DistributedError(
            "this machine cannot listen at its own address",
            where=f"{socket.gethostname()}, {address}",
            found=error.strerror or error,
            fix=NAME_IT,
        ) from error


def addresses(board: Board, world: int, patience_s: float) -> list[Address]:
    """Returns where all nodes listen, by the order of their ranks. Raises LostPeer."""
    keys = [KEY.format(rank) for rank in range(world)]
    until = time.monotonic() + patience_s
    while not all(contents := board.read(keys)):
        if time.monotonic() > until:
            absent = contents.index(b"")
            raise LostPeer(
                "a rank has not said where it listens", found=f"no word of rank {absent}", fix="start again"
            )
        time.sleep(LOOK_S)
    return [read_address(content) for content in contents if content != NOT_FIRST.encode()]


def read_address(content: bytes) -> Address:
    """Returns the address; raises BoardLost if no rank can have written it."""
    with suppress(ValueError, RecursionError, TypeError):
        host, machine, address, port = json.loads(content[: 4 * MAX_WORD])
        words = (host, machine, address)
        is_port = isinstance(port, int) and 0 < port < 65536
        if is_port and all(isinstance(word, str) and len(word) <= MAX_WORD for word in words):
            ipaddress.ip_address(address.partition("%")[0])
            return Address(one_line(host), machine, address, port)
    raise BoardLost("the ranks' store holds something that no rank wrote, in place of a node's address")


def _require_connection(other: Address) -> None:
    """Raises DistributedError unless this node can connect to the other one."""
    here = socket.gethostname()
    if is_loopback(other.address) and other.machine != own_identity().machine:
        raise DistributedError(
            "a node listens where no other node can reach it: its own name is a loopback address",
            where=other.host,
            found=other.address,
            fix=f"on {other.host} {NAME_IT}, or give the name its address in /etc/hosts",
        )
    try:
        socket.create_connection((other.address, other.port), TRY_S).close()
    except OSError as error:
        late = isinstance(error, TimeoutError)
        raise DistributedError(
            "two nodes cannot connect to each other",
            where=f"from {here} to {other.host}, {other.address}, port {other.port}",
            found=f"no answer in {TRY_S:g} s" if late else error.strerror or error,
            fix=f"open all TCP ports between the nodes (gloo and NCCL take any free one), or {NAME_IT}",
        ) from error
