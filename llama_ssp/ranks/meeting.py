"""How ranks find each other: the run's store, and who has come."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import torch.distributed as dist

from llama_ssp.errors import DistributedError
from llama_ssp.placement import LEADER
from llama_ssp.ranks.board import Board
from llama_ssp.ranks.peers import Identity, own_identity

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
START = "start with torchrun --nproc-per-node N launch/run.py"
RETRY_S = 0.2
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
class Meeting:
    """All ranks have come."""

    address: Address
    store: Any
    everyone: dict[int, Identity]


def meet(patience_s: float) -> Meeting:
    """Waits until every rank has come, this long at most."""
    address = _address()
    if _on_one_machine(address.world):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    until = time.monotonic() + patience_s
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = stores.PrefixStore(f"llama_ssp/{attempt}", _store(address, until, patience_s))
    Board(store, address.rank, address.world).open()  # whoever is here can be read
    store.set(f"here/{address.rank}", json.dumps(asdict(own_identity())))
    return Meeting(address, store, _arrived(store, address, until, patience_s))


def _address() -> Address:
    missing = [name for name in ENVIRONMENT if not os.environ.get(name)]
    if missing:
        raise DistributedError(
            "several ranks were asked for, but not by torchrun", where="environment",
            found=f"no {', '.join(missing)}", fix=START,
        )  # fmt: skip
    world = _number("WORLD_SIZE", 2, 2**20)
    return Address(
        _number("RANK", 0, world - 1), world, os.environ["MASTER_ADDR"], _number("MASTER_PORT", 1, 65535),
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
    )  # fmt: skip


def _number(name: str, least: int, most: int) -> int:
    text = os.environ[name]
    if not text.isdecimal() or not least <= int(text) <= most:
        raise DistributedError(
            f"{name} is no usable number", where="environment", found=repr(text),
            allowed=f"{least}..{most}", fix=START,
        )  # fmt: skip
    return int(text)


def _store(address: Address, until: float, patience_s: float) -> Any:
    """The run's store; the leader keeps it where torchrun does not."""
    listener = _listener(address) if address.hosts else None
    if listener is None:
        _reach(address, until, patience_s)
    return stores.TCPStore(
        address.host, address.port, address.world, address.hosts, timedelta(seconds=patience_s),
        wait_for_workers=False, master_listen_fd=listener.detach() if listener else None,
    )  # fmt: skip


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


def _arrived(store: Any, address: Address, until: float, patience_s: float) -> dict[int, Identity]:
    every = range(address.world)
    while not all(here := [store.check([f"here/{rank}"]) for rank in every]):
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
