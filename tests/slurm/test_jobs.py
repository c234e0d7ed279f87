"""Jobs on a real Slurm, disturbed in every way a cluster knows, end with the undisturbed output; srun."""

import json
import subprocess
import sys

import pytest

from llama_ssp.errors import USAGE
from tests.processes import kill, wait_for
from tests.slurm.jobs import COMMAND, RECORDS, SUPERVISOR, TORCHRUN, Batches
from tests.slurm.lab import NODES, Lab
from tests.warm import LAUNCH

pytestmark = [pytest.mark.slow, pytest.mark.slurm]


def test_an_array_of_groups_shares_the_work(batches: Batches, expected: bytes):
    job = batches.submit("cluster.groups=3")
    assert batches.whole() == expected
    assert {end.code for end in batches.ends} == {0} and len(batches.ends) == 3
    assert batches.computed() == RECORDS  # nobody did another's work
    told = batches.run("task.status=true", "output=json").document
    assert told["tokens_committed"] == 48 * RECORDS and 0 < told["acceptance_rate"] < 1
    logs = sorted(path.name for path in (batches.work / "logs").iterdir())
    assert logs == [f"llama-ssp-answers-{job}_{element}.out" for element in range(3)]


@pytest.mark.long
def test_stopped_in_good_order_a_job_goes_on(batches: Batches, lab: Lab, expected: bytes):
    """Requeued; then near its time limit: by Slurm's own signal, which comes when less than signal_s is left.

    Slurm looks every half minute.
    """
    job = batches.submit("cluster.slurm.signal_s=170")
    with batches.paused(job):
        lab.run("scontrol", "requeue", job)
        lab.wait_taken_away(job)
    with batches.paused(job):
        assert batches.computed() < batches.finished + 5
        minutes = lab.run("squeue", "-h", "-j", job, "-o", "%M").split(":")[-2]
        lab.run("scontrol", "update", f"jobid={job}", f"timelimit={int(minutes) + 2}")
        wait_for(lambda: "the time limit is near" in batches.logs(), batches.logs)
    wait_for(lambda: "Restarts=2" in lab.run("scontrol", "show", "job", job), batches.logs)
    lab.run("scontrol", "update", f"jobid={job}", "timelimit=20")
    assert batches.whole() == expected
    assert [(end.restart, end.stopped_by) for end in batches.ends] == [(0, "slurm"), (1, "time"), (2, "")]
    assert not any(end.failed for end in batches.ends) and batches.ends[1].finished < RECORDS


@pytest.mark.long
def test_two_ranks_are_killed_then_preempted(batches: Batches, lab: Lab, expected: bytes):
    """One of them, then torchrun, which takes its ranks with it; then another job takes all nodes."""
    job = batches.submit("cluster.gpus=2")
    with batches.paused(job) as ranks:
        kill(ranks[0])
    with batches.paused(job):
        kill(batches.processes(job, TORCHRUN)[0])
    with batches.paused(job):
        options = ["--partition=urgent", f"--nodes={NODES}", "--exclusive", "--output=/dev/null"]
        lab.run("sbatch", *options, "--wrap=sleep 1")
        lab.wait_taken_away(job)
    assert batches.whole() == expected
    ends = [(end.restart, end.failed, end.stopped_by) for end in batches.ends]
    assert ends == [(0, True, ""), (1, True, ""), (2, False, "slurm"), (3, False, "")], batches.logs()


@pytest.mark.long
def test_a_cancelled_job_goes_on_when_it_is_submitted_again(batches: Batches, lab: Lab, expected: bytes):
    """At once: what the cancelled ranks had claimed waits for nobody."""
    first = batches.submit("cluster.groups=2")
    with batches.paused(first):
        lab.run("scancel", first)
    lab.wait_empty()
    assert not batches.output.exists()
    batches.submit("cluster.groups=2")
    assert batches.whole() == expected


@pytest.mark.long
def test_a_killed_rank_of_two_nodes(batches: Batches, lab: Lab, expected: bytes):
    """And before: the controller is down when the ranks are to be started."""
    here, go = batches.home / "here", batches.home / "go"
    job = batches.submit(
        "cluster.nodes=2", f"cluster.slurm.setup=['touch {here}','until [ -e {go} ]; do sleep 0.1; done']"
    )
    wait_for(here.exists, batches.logs)
    lab.stop_controller()
    go.touch()
    wait_for(lambda: "srun: error" in batches.logs(), batches.logs)
    lab.start_controller()
    wait_for(lambda: len(batches.processes(job)) == 2, batches.logs)
    with batches.paused(job) as ranks:
        kill(ranks[0])
    assert batches.whole() == expected
    assert [end.failed for end in batches.ends][-2:] == [True, False]


DEADLY = """
import os, signal
from llama_ssp.batch import attempts as parts

begin = parts.Attempt.begin

def deadly(self, indices, among):
    begin(self, indices, among)
    if 0 in indices:
        os.kill(os.getpid(), signal.SIGKILL)

parts.Attempt.begin = deadly
"""


@pytest.mark.long
def test_a_record_that_kills_its_ranks_is_set_aside(batches: Batches, expected: bytes):
    """The very first, so that the goes it ends finish nothing: the element is not given up for that."""
    (batches.home / "sitecustomize.py").write_text(DEADLY)  # python imports it before anything else
    batches.submit("task.retries=1", f"cluster.slurm.setup=['export PYTHONPATH={batches.home}']")
    lines = batches.whole().splitlines()
    assert lines[1:] == expected.splitlines()[1:]
    assert "set aside" in json.loads(lines[0])["error"]["message"]
    assert [end.code for end in batches.ends] == [137, 137, 137, 0]  # among others, with them again, alone
    assert batches.ends[0].finished == 0 and batches.ends[-1].finished > 0


@pytest.mark.long
def test_slurm_itself_is_lost(batches: Batches, lab: Lab, expected: bytes):
    """Its controller comes and goes: a job that runs does not mind, and one that is killed waits for it.

    Then a node dies with its tasks; then one whose tasks outlive it. Two attempts live at once: the first,
    which Slurm has given up, does not requeue the second.
    """
    job = batches.submit()
    with batches.paused(job) as ranks:
        lab.stop_controller()
        kill(ranks[0])
        lab.start_controller()
    with batches.paused(job):
        lab.lose_node(lab.run("squeue", "-h", "-j", job, "-o", "%N"), with_tasks=True)
    with batches.paused(job) as ranks:  # so that they live, however long Slurm takes to notice
        lab.lose_node(lab.run("squeue", "-h", "-j", job, "-o", "%N"), with_tasks=False)
        wait_for(lambda: set(batches.processes(job)) - set(ranks), batches.logs)
    assert batches.whole() == expected
    wait_for(lambda: not batches.processes(job, SUPERVISOR), batches.logs)
    assert batches.output.read_bytes() == expected
    restarts = [end.restart for end in batches.ends]
    assert restarts[0] == 0 and batches.ends[0].failed and not any(end.failed for end in batches.ends[1:])
    assert 3 in restarts and 1 not in restarts  # nobody was left to tell how the second ended
    assert "Restarts=3" in lab.run("scontrol", "show", "job", job)


GENERATE = ("generate", *COMMAND[1:6], "prompt=hello", "max_new_tokens=8", "output=json", "out=null")


def srun(lab: Lab, batches: Batches, *words: str) -> subprocess.CompletedProcess[str]:
    tasks, *words = words
    run = ["srun", "--quiet", "-N", "1", "--overcommit", "-n", tasks, sys.executable, str(LAUNCH), *words]
    env = {**lab.env, "OMP_NUM_THREADS": "1"}
    return subprocess.run(run, cwd=batches.home, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_one_task_of_srun_starts_its_ranks(lab: Lab, batches: Batches):
    done = srun(lab, batches, "1", *GENERATE, "ranks=2")
    assert done.returncode == 0, done.stderr
    assert "over 2 ranks" in json.loads(done.stdout)["devices"]["model"]


@pytest.mark.long
def test_two_tasks_of_srun_are_refused(lab: Lab, batches: Batches):
    done = srun(lab, batches, "2", *GENERATE)
    assert done.returncode == USAGE and done.stdout == ""
    assert done.stderr.count("error: ") == 1 + done.stderr.count("srun: error: "), done.stderr
    assert "ranks=2" in done.stderr


@pytest.mark.long
def test_two_tasks_of_srun_share_a_batch_job(lab: Lab, batches: Batches, expected: bytes):
    done = srun(lab, batches, "2", *COMMAND)
    assert done.returncode == 0 and batches.output.read_bytes() == expected, done.stderr
