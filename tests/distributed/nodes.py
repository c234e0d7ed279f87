"""Two nodes, and what befalls one of them or the link: do all ranks end, how soon, and what is said?

    python -m tests.distributed.nodes [write=FILE.md] [only=TEXT]

Two torchrun agents on this machine, with a rank each, stand for two nodes. Where network namespaces can be
made (by root), each has one of its own, and a switch between them that can be cut; elsewhere they share the
loopback interface, and nothing is cut. A node is frozen by SIGSTOP of its agent and its rank, as a paused
virtual machine would be; it is thawed when the other node's rank has ended. Faults are put in from here.
"""

import ctypes
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from bench.surroundings import report
from llama_ssp import cli
from llama_ssp.distributed import identity
from llama_ssp.distributed.signals import CODE_FILE
from tests.distributed.faults import RUN, TORCHRUN, strike_at
from tests.processes import kill, wait_for
from tests.warm import ROOT, start

TIMEOUT_S = 6.0  # placement.timeout_s
APPEAR_S = 8.0  # placement.appear_s
LIMIT_S = (
    16.0  # from the fault until no rank that can run is left, and from the thaw until none is left at all
)
AGENT_S = 5.0  # for the agents, which are torchrun's; later is said so
CODE = "5"
NODES = 2
PHASES = ("start", "connect", "load", "verify", "end")
FROZEN = "node frozen"
KILLED = "agent killed"
CUT = "link cut"
LEADERS = "leader's node"
OTHER = "other node"
VICTIMS = {LEADERS: 0, OTHER: 1}
CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/run/netns")
NUMBERS = itertools.count()  # of the networks of this process
# What a rank says of an event: of the other node, of torchrun on it, or of a start that does not come about.
SAID = (
    "has not answered for",
    "is gone",
    "not all ranks have come",
    "gets no answer",
    "torchrun's store does not answer",
)


class Cell(NamedTuple):
    """What happens, in which phase, and to which node; a cut concerns both."""

    event: str
    phase: str
    victim: str


CELLS = [
    *(Cell(event, phase, victim) for event in (FROZEN, KILLED) for phase in PHASES for victim in VICTIMS),
    *(Cell(CUT, phase, OTHER) for phase in PHASES),
]


class Outcome(NamedTuple):
    """Seconds until those ranks that could run had ended, the thawed ones, and the agents; and faults."""

    ended_s: float
    thawed_s: float | None
    agents_s: float | None
    lines: list[str]
    wrong: list[str]


class Network:
    """Two namespaces and a switch, by `ip`; all go in the end."""

    def __init__(self, name: str) -> None:
        self.nodes = [f"{name}{number}" for number in range(NODES)]
        self.switch = f"{name}s"
        self.addresses = [f"10.77.0.{number + 1}" for number in range(NODES)]

    def make(self) -> None:
        for name in (*self.nodes, self.switch):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self.switch, "link", "set", "br0", "up")
        for number, node in enumerate(self.nodes):
            port = f"port{number}"
            ip("-n", node, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self.switch)
            ip("-n", node, "address", "add", f"{self.addresses[number]}/24", "dev", "eth0")
            ip("-n", node, "link", "set", "eth0", "up")
            ip("-n", self.switch, "link", "set", port, "master", "br0")
            ip("-n", self.switch, "link", "set", port, "up")

    def remove(self) -> None:
        for name in (*self.nodes, self.switch):
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)

    def cut(self) -> None:
        """Takes node 1 off the switch: its interface stays up, and nothing comes through any more."""
        ip("-n", self.switch, "link", "set", "port1", "nomaster")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def network() -> Iterator[Network | None]:
    """Makes a network; None where this user or this machine cannot."""
    made = Network(f"ssp{os.getpid()}-{next(NUMBERS)}-")
    try:
        try:
            made.make()
        except (OSError, subprocess.CalledProcessError):
            yield None
            return
        yield made
    finally:
        if shutil.which("ip"):
            made.remove()


def enter_namespace(name: str) -> None:
    """This process, and all that it starts, are in the namespace from now on."""
    with (NAMESPACES / name).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")


def freeze() -> None:
    """Stops this rank's agent, then the rank itself."""
    os.kill(os.getppid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_agent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)  # the kernel kills this rank, too


def cut(switch: str) -> None:
    ip("-n", switch, "link", "set", "port1", "nomaster")


def strike(event: str, switch: str) -> None:
    """Notes the time, and has the event happen."""
    Path("striking").write_text(str(time.time()))
    Path("striking").rename("struck")
    {FROZEN: freeze, KILLED: kill_agent, CUT: partial(cut, switch)}[event]()


def as_rank(event: str, phase: str, victim: str, switch: str) -> NoReturn:
    """The command on a rank; on the victim's node the event happens when the phase begins."""
    rank = int(os.environ["RANK"])
    Path(f"{rank}.agent").write_text(str(os.getppid()))
    Path(f"{rank}.pid").write_text(str(os.getpid()))
    os.environ[CODE_FILE] = str(Path(f"{rank}.code").absolute())
    identity._machine = partial(str, f"node {rank}")  # so that neither rank sees the other's process
    happens = partial(strike, event, switch)
    if rank == VICTIMS[victim]:
        if phase == "start":
            strike_where("meet", partial(strike_when_the_other_has_come, happens))
        elif phase == "connect":
            strike_where("_backend", happens)
        elif phase == "end":
            strike_at_close(happens)
    elif phase == "start":
        strike_where("meet", Path("other.comes").touch)
    if phase in ("load", "verify"):
        strike_at(VICTIMS[victim], phase, happens, rank)
    cli.main()
    raise AssertionError("the command exits")


def strike_when_the_other_has_come(happens: Callable[[], None]) -> None:
    wait_for(Path("other.comes").exists)
    happens()


def strike_where(name: str, happens: Callable[[], None]) -> None:
    """The event happens when a function of process_group is called."""
    from llama_ssp.distributed import process_group

    original = getattr(process_group, name)

    def called(*values: Any) -> Any:
        happens()
        return original(*values)

    setattr(process_group, name, called)


def strike_at_close(happens: Callable[[], None]) -> None:
    """The event happens when this rank is about to part from the other."""
    from llama_ssp.distributed.process_group import Group

    close = Group.close

    def closing(self: Group) -> None:
        happens()
        close(self)

    Group.close = closing  # type: ignore[method-assign]


def agents(folder: Path, cell: Cell, made: Network | None, *words: str) -> list[Any]:
    """Starts both nodes' torchrun; what each says is in NODE.err."""
    folder.mkdir(parents=True, exist_ok=True)
    address = made.addresses[0] if made else "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env["NODE_FAULT"] = ",".join([*cell, made.switch if made else ""])
    if made is None:
        env["GLOO_SOCKET_IFNAME"] = "lo"
    started = []
    for node in range(NODES):
        meeting = ["--nnodes", NODES, "--node-rank", node, "--master-addr", address, "--master-port", port]
        launch = [*TORCHRUN, *meeting, "--nproc-per-node", 1, "-m", "tests.distributed.nodes"]
        streams = [os.devnull, folder / f"{node}.out", folder / f"{node}.err"]
        first = partial(enter_namespace, made.nodes[node]) if made else None
        started.append(start([*launch, *words], folder, streams, env, first))
    return started


def outcome(cell: Cell, folder: Path, made: Network | None) -> Outcome:
    """Has the event happen, and waits until no rank is left."""
    words = (
        *RUN, "placement=leader", f"placement.timeout_s={TIMEOUT_S:g}", f"placement.appear_s={APPEAR_S:g}",
        "out=null", "engine=eager",
    )  # fmt: skip
    started = agents(folder, cell, made, *words)
    try:
        wait_for((folder / "struck").exists, partial(_said, folder))
        struck = float((folder / "struck").read_text())
        pids = [int((folder / f"{rank}.pid").read_text()) for rank in range(NODES)]
        victim = VICTIMS[cell.victim]
        frozen = [victim] if cell.event == FROZEN else []
        can_run = [rank for rank in range(NODES) if rank not in frozen]
        ended_s = _gone(struck, [pids[rank] for rank in can_run])
        thawed_s = None
        if frozen:
            thawed = time.time()
            kill(int((folder / f"{victim}.agent").read_text()), pids[victim], by=signal.SIGCONT)
            thawed_s = _gone(thawed, [pids[victim]])
        agents_s = _gone(struck, [agent.pid for agent in started], AGENT_S)
        return _judged(cell, folder, (ended_s, thawed_s, agents_s))
    finally:
        for agent in started:
            agent.kill()


def _gone(since: float, pids: list[int], limit_s: float = 2 * LIMIT_S) -> float:
    """Returns the seconds until none of the processes is left; infinite if that does not come about."""
    until = time.time() + limit_s
    while not all(map(_is_gone, pids)):
        if time.time() > until:
            return float("inf")
        time.sleep(0.05)
    return time.time() - since


def _is_gone(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def _said(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.err")))


def _judged(cell: Cell, folder: Path, seconds: tuple[float, float | None, float]) -> Outcome:
    """Whether it took little time, and each node that can speak has said once what was not answered."""
    ended_s, thawed_s, agents_s = seconds
    wrong = []
    if ended_s > LIMIT_S:
        wrong.append("too late")
    if thawed_s is not None and thawed_s > LIMIT_S:
        wrong.append("the thawed node is too late")
    lines = []
    for node in range(NODES):
        said = (folder / f"{node}.err").read_text()
        own = [line.removeprefix("error: ") for line in said.splitlines() if line.startswith("error: ")]
        lines += own
        is_victim = node == VICTIMS[cell.victim] and cell.event != CUT
        if not is_victim:
            code = (folder / f"{node}.code").read_text().strip() if (folder / f"{node}.code").exists() else ""
            if code != CODE:
                wrong.append(f"code {code!r} on node {node}")
        if len(own) > 1:
            wrong.append(f"{len(own)} lines on node {node}")
    unlike = [line for line in lines if not any(part in line for part in SAID)]
    if not lines or unlike:
        wrong.append(f"said: {unlike or 'nothing'}")
    return Outcome(ended_s, thawed_s, agents_s, lines, wrong)


HEAD = f"""\
Two torchrun agents with a gloo rank each on one machine, {{network}}. placement.timeout_s={TIMEOUT_S:g},
placement.appear_s={APPEAR_S:g} (in "start" one rank has not come yet).

{{passed}} of {{cells}} cells passed: within {LIMIT_S:g} s of the event no rank was left that could run (both,
where the link was cut), with code {CODE} and one line on each node; a frozen node, let run again then, ended
within {LIMIT_S:g} s, too. The agents are torchrun's own processes, and hold no GPU: "-" is more than
{AGENT_S:g} s.

| event | phase | where | seconds until the ranks had ended | the thawed one | the agents | said | |
|---|---|---|---|---|---|---|---|"""


def main() -> None:
    if "NODE_FAULT" in os.environ:
        as_rank(*os.environ["NODE_FAULT"].split(","))
    own = dict(argument.split("=", 1) for argument in sys.argv[1:])
    rows = []
    passed = 0
    with network() as made:
        has_network = made is not None
    cells = [cell for cell in CELLS if own.get("only", "") in ", ".join(cell)]
    for cell in [cell for cell in cells if has_network or cell.event != CUT]:
        with network() as made, tempfile.TemporaryDirectory() as folder:
            found = outcome(cell, Path(folder), made)
        passed += not found.wrong
        thawed = "" if found.thawed_s is None else f"{found.thawed_s:.1f}"
        agents_s = "-" if found.agents_s == float("inf") else f"{found.agents_s:.1f}"
        where = "between them" if cell.event == CUT else cell.victim
        said = " / ".join(dict.fromkeys(found.lines))
        verdict = "; ".join(found.wrong) or "passed"
        row = [cell.event, cell.phase, where, f"{found.ended_s:.1f}", thawed, agents_s, said, verdict]
        rows.append(f"| {' | '.join(row)} |")
        print(rows[-1], file=sys.stderr, flush=True)
    kind = "in network namespaces joined by a switch" if has_network else "over its loopback interface"
    title = "Two nodes: what ends, how soon, and what is said"
    head = HEAD.format(network=kind, passed=passed, cells=len(rows))
    report(own.get("write", ""), title, {}, head, *rows)
    sys.exit(passed < len(rows))


if __name__ == "__main__":
    main()
