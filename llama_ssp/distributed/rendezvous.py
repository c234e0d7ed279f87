"""How ranks find each other: the run's store, and which ranks have come."""

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
from llama_ssp.distributed.failures import Watch
from llama_ssp.distributed.peers import Identity, Peers, own_identity
from llama_ssp.distributed.placement import LEADER
from llama_ssp.distributed.signals import GUARD
from llama_ssp.distributed.store import READ, Cause, Place, Store, interrupted
from llama_ssp.errors import DistributedError, JointError

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
RETRY_S = 0.2
EARLY_S = 10.0  # for a rank that fails before all have met, to tell the others; they may still be importing
stores: Any = dist  # has them, though its type does not say so
LOOPBACK = "lo"
MET: list[Any] = []  # torch's store, once for each meeting of this process: each has keys of its own


@dataclass(frozen=True)
class Address:
    """This rank's number and where all ranks meet, from the environment."""

    rank: int
    world: int
    host: str
    port: int
    launched: bool  # torchrun keeps the store, and outlives the ranks

    @property
    def hosts(self) -> bool:
        """Whether this process keeps the store."""
        return self.rank == LEADER and not self.launched

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def meet(patience_s: float) -> tuple[Any, Watch]:
    """Waits until every rank has come, this long at most; returns torch's store and the watch, which runs."""
    address = _address()
    if _on_one_machine(address.world):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    until = time.monotonic() + patience_s
    store = _store(address, until, patience_s)
    try:
        store.open()  # the ranks that are here can be read
        store.tcp.set(f"here/{address.rank}", json.dumps(asdict(own_identity())))
        peers = Peers(_arrived(store, address, until, patience_s), address.rank)
        watch = Watch(store, peers, address.rank, address.world, patience_s, not address.launched)
    except KeyboardInterrupt as stop:
        cause, speaks = store.settle(interrupted(address.rank, stop, Place("start")), stopped=True)
        if address.hosts:
            store.linger()
        raise JointError(cause.line, cause.code, speaks) from stop
    except RuntimeError as error:
        where, fix = f"rank {address.rank}, {address}", "look for the first error of the other ranks"
        what = "the store at which the ranks meet is gone"
        gone = DistributedError(what, where, str(error)[-160:], fix=fix)
        gone.speaks = address.rank == (LEADER if address.launched else LEADER + 1)
        raise gone from error
    watch.start()
    MET.append(store.tcp.underlying_store)
    return store.tcp, watch


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
    GUARD.end(grace_s=EARLY_S)  # a rank that is stopped now has its line to say
    GUARD.arm("cause", 2 * EARLY_S, code, "" if stopped else line)
    store = _store(address, time.monotonic() + EARLY_S, EARLY_S)
    cause, speaks = store.settle(Cause(line, code), stopped)
    if speaks:
        say()
    GUARD.disarm("cause")
    with suppress(RuntimeError):
        store.mark(READ, address.rank)
    if address.hosts:
        store.linger(seconds=EARLY_S)
    return cause.code


def _address() -> Address:
    missing = [name for name in ENVIRONMENT if not os.environ.get(name)]
    if missing:
        what, found = "several ranks were asked for, but not by torchrun", f"no {', '.join(missing)}"
        raise DistributedError(what, "environment", found, fix=START)
    own, host = rank_environment(), os.environ["MASTER_ADDR"]
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return Address(own.rank, own.world, host, number_of("MASTER_PORT", 1, 65535), launched)


def _store(address: Address, until: float, patience_s: float) -> Store:
    """The run's store, with keys for this meeting."""
    tcp = MET[-1] if MET else _connected(address, until, patience_s)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"llama_ssp/{attempt}/{len(MET)}"
    return Store(stores.PrefixStore(name, tcp), address.rank, address.world)


def _connected(address: Address, until: float, patience_s: float) -> Any:
    """torch's store; the leader keeps it where torchrun does not."""
    listener = _listener(address).detach() if address.hosts else None
    if listener is None:
        _reach(address, until, patience_s)
    where = address.host, address.port, address.world, address.hosts, timedelta(seconds=patience_s)
    what = "no store of the ranks answers where they meet"
    fix = "check MASTER_ADDR, or choose another MASTER_PORT"
    refused = DistributedError(what, f"rank {address.rank} of {address.world}, {address}", fix=fix)
    refused.speaks = True  # the leader may not be there to say it
    # TCPStore waits without end for a process that accepts the connection and is silent.
    GUARD.arm("meet", patience_s, refused.code, str(refused))
    try:
        return stores.TCPStore(*where, wait_for_workers=False, master_listen_fd=listener)
    except RuntimeError as error:
        raise refused from error
    finally:
        GUARD.disarm("meet")


def _listener(address: Address) -> socket.socket:
    """On the loopback device where the ranks meet there, so that no other machine can connect."""
    try:
        if _is_loopback(address.host):
            return socket.create_server((socket.gethostbyname(address.host), address.port), backlog=1024)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", address.port), family=family, backlog=1024, dualstack_ipv6=dual)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        what = "the port at which the ranks meet is in use" if taken else "the ranks cannot meet there"
        fix = "choose another MASTER_PORT; torchrun --standalone takes a free one"
        where = f"MASTER_ADDR and MASTER_PORT, {address}"
        raise DistributedError(what, where, error.strerror, fix=fix) from error


def _reach(address: Address, until: float, patience_s: float) -> None:
    """Waits until a process listens there: TCPStore itself would fill the log while it tries.

    torchrun listens before it starts its ranks: where it does not, and all are on this machine, it has ended.
    """
    while True:
        try:
            socket.create_connection((address.host, address.port), timeout=RETRY_S * 5).close()
            return
        except (OSError, UnicodeError) as error:  # the second where it can be no host's name
            where = f"rank {address.rank} of {address.world}, {address}"
            launched_here = address.launched and _on_one_machine(address.world)
            if launched_here and isinstance(error, ConnectionRefusedError):
                ended = DistributedError("torchrun has ended", where, error.strerror, fix="start it again")
                ended.speaks = address.rank == LEADER
                raise ended from error
            if time.monotonic() > until:
                found = f"{getattr(error, 'strerror', None) or error}, for {patience_s:g} s"
                fix = "check MASTER_ADDR, MASTER_PORT and that rank 0 was started"
                absent = DistributedError("no process listens where the ranks meet", where, found, fix=fix)
                absent.speaks = True  # the leader may not be there to say it
                raise absent from error
            time.sleep(RETRY_S)


def _arrived(store: Store, address: Address, until: float, patience_s: float) -> dict[int, Identity]:
    """Waits for all ranks; their processes."""
    every = range(address.world)
    while not all(here := [store.tcp.check([f"here/{rank}"]) for rank in every]):
        if cause := store.cause():  # of a rank that does not come
            GUARD.end()
            store.mark(READ, address.rank)
            if address.hosts:
                store.linger()
            raise JointError(cause.line, cause.code, speaks=False)
        if time.monotonic() > until:
            come = ", ".join(str(rank) for rank in every if here[rank])
            absent = ", ".join(str(rank) for rank in every if not here[rank])
            where, found = f"rank {address.rank}, {address}", f"ranks {come} of {address.world} after"
            fix = f"start {absent} too, or raise placement.timeout_s"
            if address.hosts and _is_loopback(address.host) and not _on_one_machine(address.world):
                fix += "; for ranks on other machines set MASTER_ADDR to an address that they reach: "
                fix += f"here it is {socket.gethostbyname(address.host)}, the loopback device alone"
            error = DistributedError("not all ranks have come", where, f"{found} {patience_s:g} s", fix=fix)
            error.speaks = address.rank == here.index(True)
            raise error
        time.sleep(RETRY_S / 4)
    return {rank: Identity(**json.loads(store.tcp.get(f"here/{rank}"))) for rank in every}


def _on_one_machine(world: int) -> bool:
    local = os.environ.get("LOCAL_WORLD_SIZE") == str(world)
    return local and LOOPBACK in {name for _, name in socket.if_nameindex()}


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False
