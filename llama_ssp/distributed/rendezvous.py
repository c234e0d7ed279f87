"""How ranks find each other: the run's store, and who has come."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import torch.distributed as dist

from llama_ssp.config.environment import START, number_of, rank_environment
from llama_ssp.distributed.peers import Identity, own_identity
from llama_ssp.distributed.placement import LEADER
from llama_ssp.distributed.signals import GUARD
from llama_ssp.distributed.store import Cause, Place, Store, stopped
from llama_ssp.errors import DistributedError, JointError

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
RETRY_S = 0.2
EARLY_S = 10.0  # for a rank that fails before all have met, to tell the others; they may still be importing
stores: Any = dist  # which has them, though it does not say so
LOOPBACK = "lo"


@dataclass(frozen=True)
class Address:
    """Who this rank is and where all meet, as the environment has it."""

    rank: int
    world: int
    host: str
    port: int
    launched: bool  # torchrun keeps the store, and outlives the ranks

    @property
    def hosts(self) -> bool:
        return self.rank == LEADER and not self.launched

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Rendezvous:
    """All ranks have come."""

    address: Address
    store: Any
    everyone: dict[int, Identity]


def meet(patience_s: float) -> Rendezvous:
    """Waits until every rank has come, this long at most."""
    address = _address()
    if _on_one_machine(address.world):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    until = time.monotonic() + patience_s
    store = _store(address, until, patience_s)
    board = Store(store, address.rank, address.world)
    try:
        board.open()  # whoever is here can be read
        store.set(f"here/{address.rank}", json.dumps(asdict(own_identity())))
        return Rendezvous(address, store, _arrived(store, board, address, until, patience_s))
    except KeyboardInterrupt as stop:
        own = stopped(address.rank, stop.args[0], Place("start"))
        cause, speaks = board.settle(own, stopped=True)
        if address.hosts:
            board.linger()
        raise JointError(cause.line, cause.code, speaks) from stop
    except RuntimeError as error:
        gone = DistributedError(
            "the store at which the ranks meet is gone", where=f"rank {address.rank}, {address}",
            found=str(error)[-160:], fix="look for the first error of the other ranks",
        )  # fmt: skip
        gone.speaks = address.rank == (LEADER if address.launched else LEADER + 1)
        raise gone from error


def announce(line: str, code: int, stopped: bool, say: Callable[[], None]) -> int:
    """Tells the other ranks why this one ends before all have met; returns the exit code.

    Calls `say` unless another rank has said the same line, or, where this rank was `stopped`, ended with a
    cause of its own. Raises DistributedError or RuntimeError where there is no store to tell them by.
    """
    address = _address()
    if stopped and not address.launched:  # no other rank stops this one
        if address.rank == LEADER:
            say()
        return code
    GUARD.grace_s = EARLY_S  # a rank that is stopped now has its line to say
    GUARD.arm("cause", 2 * EARLY_S, code, "" if stopped else line)
    store = _store(address, time.monotonic() + EARLY_S, EARLY_S)
    board = Store(store, address.rank, address.world)
    cause, speaks = board.settle(Cause(line, code), stopped)
    if speaks:
        say()
    GUARD.disarm("cause")
    with suppress(RuntimeError):
        board.heard()
    if address.hosts:
        board.linger(seconds=EARLY_S)
    return cause.code


def _address() -> Address:
    missing = [name for name in ENVIRONMENT if not os.environ.get(name)]
    if missing:
        raise DistributedError(
            "several ranks were asked for, but not by torchrun", where="environment",
            found=f"no {', '.join(missing)}", fix=START,
        )  # fmt: skip
    found = rank_environment()
    return Address(
        found.rank, found.world, os.environ["MASTER_ADDR"], number_of("MASTER_PORT", 1, 65535),
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
    )  # fmt: skip


def _store(address: Address, until: float, patience_s: float) -> Any:
    """The run's store; the leader keeps it where torchrun does not."""
    listener = _listener(address) if address.hosts else None
    if listener is None:
        _reach(address, until, patience_s)
    store = stores.TCPStore(
        address.host, address.port, address.world, address.hosts, timedelta(seconds=patience_s),
        wait_for_workers=False, master_listen_fd=listener.detach() if listener else None,
    )  # fmt: skip
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return stores.PrefixStore(f"llama_ssp/{attempt}", store)


def _listener(address: Address) -> socket.socket:
    """On the loopback device where the ranks meet there, so that nobody else can come."""
    try:
        if _is_loopback(address.host):
            return socket.create_server((socket.gethostbyname(address.host), address.port), backlog=1024)
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", address.port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
            )
        return socket.create_server(("", address.port), backlog=1024)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise DistributedError(
            "the port at which the ranks meet is in use" if taken else "the ranks cannot meet there",
            where=f"MASTER_ADDR and MASTER_PORT, {address}", found=error.strerror,
            fix="choose another MASTER_PORT; torchrun --standalone takes a free one",
        ) from error  # fmt: skip


def _reach(address: Address, until: float, patience_s: float) -> None:
    """Waits until somebody listens there: TCPStore itself would fill the log while it tries."""
    while True:
        try:
            socket.create_connection((address.host, address.port), timeout=RETRY_S * 5).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                absent = DistributedError(
                    "nobody is where the ranks meet",
                    where=f"rank {address.rank} of {address.world}, {address}",
                    found=f"{error.strerror or error}, for {patience_s:g} s",
                    fix="check MASTER_ADDR, MASTER_PORT and that rank 0 was started",
                )  # fmt: skip
                absent.speaks = True  # the leader may not be there to say it
                raise absent from error
            time.sleep(RETRY_S)


def _arrived(
    store: Any, board: Store, address: Address, until: float, patience_s: float
) -> dict[int, Identity]:
    every = range(address.world)
    while not all(here := [store.check([f"here/{rank}"]) for rank in every]):
        if cause := board.cause():  # of a rank that does not come
            GUARD.ending = True
            board.heard()
            if address.hosts:
                board.linger()
            raise JointError(cause.line, cause.code, speaks=False)
        if time.monotonic() > until:
            come = [rank for rank in every if here[rank]]
            absent = [rank for rank in every if not here[rank]]
            error = DistributedError(
                "not all ranks have come", where=f"rank {address.rank}, {address}",
                found=f"ranks {_listed(come)} of {address.world} after {patience_s:g} s",
                fix=f"start {_listed(absent)} too, or raise placement.timeout_s",
            )  # fmt: skip
            error.speaks = address.rank == come[0]
            raise error
        time.sleep(RETRY_S / 4)
    return {rank: Identity(**json.loads(store.get(f"here/{rank}"))) for rank in every}


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _on_one_machine(world: int) -> bool:
    local = os.environ.get("LOCAL_WORLD_SIZE") == str(world)
    return local and LOOPBACK in {name for _, name in socket.if_nameindex()}


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False
