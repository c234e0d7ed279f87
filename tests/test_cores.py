"""How many cores a process may keep busy: by its affinity, and by the quotas of its control groups."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from llama_ssp.distributed import control_groups, cores
from llama_ssp.distributed.cores import cores_here
from llama_ssp.models import host_cores
from llama_ssp.pair import call_threads
from llama_ssp.pair.call_threads import CallThreads
from llama_ssp.placing.kept_constants import threads_of
from llama_ssp.report.machine import host

ROOT = Path(__file__).parents[1]
HOST_CORES = 16
PERIOD_US = 100_000
V1_ROOT = Path("/sys/fs/cgroup/cpu")  # of a machine with groups of version 1
# What /proc/self/cgroup says, the folder of its groups, and the controllers that share one.
TABLES = {
    "v1": ("9:memory:/other\n4:cpu,cpuacct:/pods/own\n3:cpuset:/\n", "cpu"),
    "v2": ("0::/pods/own\n", "."),
    "both": ("4:cpu:/pods/own\n1:name=systemd:/\n0::/init.scope\n", "cpu"),
}


class Groups:
    """The files of control groups, in a folder of the test."""

    def __init__(self, folder: Path, version: str) -> None:
        table, root = TABLES[version]
        self.table = folder / "table"
        self.table.write_text(table)
        self.is_v2 = version == "v2"
        self.root = folder / root

    def limit(self, place: str, quota_us: int | None, period_us: int = PERIOD_US) -> None:
        """Writes the quota of the group, as the system shows it; None is no limit."""
        group = self.root / place
        group.mkdir(parents=True, exist_ok=True)
        if self.is_v2:
            quota = "max" if quota_us is None else str(quota_us)
            (group / "cpu.max").write_text(f"{quota} {period_us}\n")
        else:
            (group / "cpu.cfs_quota_us").write_text(f"{-1 if quota_us is None else quota_us}\n")
            (group / "cpu.cfs_period_us").write_text(f"{period_us}\n")


@pytest.fixture(params=TABLES)
def groups(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    """A process that may run on 16 cores, in a group within another, without a limit."""
    made = Groups(tmp_path, request.param)
    monkeypatch.setattr(control_groups, "GROUPS_TABLE", made.table)
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path)
    monkeypatch.setattr(cores, "own_cores", lambda: {*range(HOST_CORES)})
    return made


def test_without_files_all_cores_count(groups: Groups) -> None:
    assert cores_here() == HOST_CORES


@pytest.mark.parametrize(
    "place", ["pods/own", "pods", "."], ids=["its own", "one above", "shown as the root"]
)
@pytest.mark.parametrize(
    ("quota_us", "count"),
    [(50_000, 1), (100_000, 1), (150_000, 2), (400_000, 4), (6_400_000, HOST_CORES), (None, HOST_CORES)],
)
def test_a_group_has_less_than_its_machine(
    place: str, quota_us: int | None, count: int, groups: Groups
) -> None:
    """Half a core is one thread, one and a half are two."""
    groups.limit(place, quota_us)
    assert cores_here() == count


@pytest.mark.parametrize(("own", "above"), [(300_000, 800_000), (800_000, 300_000), (None, 300_000)])
def test_the_least_quota_on_the_way_holds(own: int | None, above: int, groups: Groups) -> None:
    groups.limit("pods/own", own)
    groups.limit("pods", above)
    assert cores_here() == 3


def test_a_quota_is_of_its_own_period(groups: Groups) -> None:
    groups.limit("pods/own", 20_000, period_us=10_000)
    assert cores_here() == 2


def test_files_that_say_nothing_limit_nothing(groups: Groups) -> None:
    groups.limit("pods/own", 100_000)
    for file in (groups.root / "pods/own").iterdir():
        file.write_text("\n")
    assert cores_here() == HOST_CORES
    groups.table.unlink()
    assert cores_here() == HOST_CORES


def test_the_affinity_is_a_limit_too(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "own_cores", lambda: {3, 5})
    groups.limit("pods/own", 800_000)
    assert cores_here() == 2


@pytest.mark.parametrize("groups", ["v2"], indirect=True)
def test_plans_and_records_count_the_share(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    groups.limit("pods", 250_000)
    monkeypatch.delenv(host_cores.THREADS, raising=False)
    host.cache_clear()
    assert (threads_of(1), host()["cores"]) == (3, 3)
    host.cache_clear()
    monkeypatch.setenv(host_cores.THREADS, "5")
    assert threads_of(1) == 5


def test_no_module_counts_the_cores_of_the_host() -> None:
    """Except the one that has the share."""
    counting = set[str]()
    for path in (ROOT / "llama_ssp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "cpu_count":
                counting.add(path.name)
    assert counting == {"cores.py"}


CHILD = """
import os, sys
from llama_ssp.models import host_cores
host_cores.cores_here = lambda: int(sys.argv[1])
host_cores.usual_threads = lambda: 4
host_cores.keep_threads_to_share()
import torch
print(os.environ[host_cores.THREADS], torch.get_num_threads())
"""


@pytest.mark.parametrize(
    ("share", "given", "threads"),
    [(1, None, 1), (3, None, 3), (1, "2", 2)],
    ids=["one", "three", "the user's"],
)
def test_a_run_computes_on_its_share(share: int, given: str | None, threads: int) -> None:
    env = {name: value for name, value in os.environ.items() if name != host_cores.THREADS}
    if given is not None:
        env[host_cores.THREADS] = given
    words = [sys.executable, "-c", CHILD, str(share)]
    said = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    number, taken = map(int, said.split())
    assert number == threads and taken <= threads  # MKL takes no more than there are cores


def test_a_share_that_is_no_limit_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(host_cores.THREADS, raising=False)
    monkeypatch.setattr(host_cores, "usual_threads", lambda: 4)
    monkeypatch.setattr(host_cores, "cores_here", lambda: 4)
    host_cores.keep_threads_to_share()
    assert host_cores.THREADS not in os.environ


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch computes on four threads; of others nothing is known."""
    monkeypatch.delenv(host_cores.THREADS, raising=False)
    monkeypatch.setattr(call_threads, "free_cores", lambda _: None)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("usual", "threads"), [(4, 2), (8, 4)], ids=["torch's own number", "a number of the script"]
)
def test_calls_compute_on_the_share(
    usual: int, threads: int, four_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a script has told torch itself stands."""
    monkeypatch.setattr(call_threads, "usual_threads", lambda: usual)
    monkeypatch.setattr(call_threads, "cores_here", lambda: 2)
    with CallThreads(on_cpu=True).chosen():
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 4


@pytest.fixture
def half_a_core() -> Iterator[Path]:
    """A real control group with half a core, where this machine lets one be made."""
    folder = V1_ROOT / f"llama-ssp-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group of version 1 can be made: {error.strerror}")
    try:
        (folder / "cpu.cfs_period_us").write_text("100000")
        (folder / "cpu.cfs_quota_us").write_text("50000")
        yield folder
    finally:
        with suppress(OSError):
            folder.rmdir()


IN_GROUP = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from llama_ssp.distributed.cores import cores_here
from llama_ssp.models.host_cores import keep_threads_to_share
keep_threads_to_share()
import torch
print(cores_here(), torch.get_num_threads())
"""


def test_a_real_group_with_half_a_core_has_one_thread(half_a_core: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != host_cores.THREADS}
    words = [sys.executable, "-c", IN_GROUP, str(half_a_core)]
    said = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["1", "1"]
