"""A trial of compiled steps over several GPUs, in processes of their own, before weights are read.

Sums of NCCL inside CUDA graphs may hang, or give wrong numbers, on a machine where they have never run, and a
process with a hung GPU cannot recover. So every rank of the model starts a small process on its GPU. Together
these split a two-layer model over the same number of ranks, in the same number format, and compare its
compiled steps with its eager ones. One that does not answer in time is killed. The verdict is the same on
all ranks. Where the steps themselves were tried it is kept in a file, whose name is a hash of all that it
depends on: a text should not depend on how busy the machine was.

After that, the steps of the real model are compared in the same way (`check`).
"""

import hashlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from llama_ssp.config import Dtype
from llama_ssp.distributed.bounded import KILLED_S
from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.gpus import gpus_here
from llama_ssp.distributed.launcher import of_small_process
from llama_ssp.distributed.process_group import gpu_of, open_ranks
from llama_ssp.distributed.signals import end_with_parent, leave
from llama_ssp.errors import DISTRIBUTED, DistributedError, LostPeer, first_line
from llama_ssp.models.kept_files import cache_folder, part_of, source_text
from llama_ssp.models.step_check import PASSED, difference, small_model
from llama_ssp.models.steps import SteppedModel

log = logging.getLogger(__name__)

COMMAND = [sys.executable, "-m", "llama_ssp.pair.trial"]
# For the small processes: to import torch, meet and compile; and for their steps, once they are ready.
PREPARE_S = 600.0
TRIAL_S = 120.0
LOOK_S = 0.25  # between looks at what they have said
CHECK_S = 120.0  # for the steps of the real model, which are compiled by then
# Of the small model.
WIDTHS = (1, 2, 5)
ROWS = (1, 2)
STEPS = 8
# Of the real model: steps of each width; more layers, and experts, are farther off.
CHECKED = 2
SLACK = 4
READY = "ready"
EXCLUSIVE = "a GPU is in compute mode EXCLUSIVE_PROCESS, which admits no process for a trial"
DRIVER = Path("/proc/driver/nvidia/version")
# A verdict depends on these variables, too.
SETTINGS = ("NCCL_", "TORCH_NCCL_", "PYTORCH_CUDA_ALLOC", "PYTORCH_ALLOC")


@dataclass(kw_only=True)
class Trial:
    """The trial of one model over `ranks`, all of which call it. `verdict` is PASSED, or why it failed."""

    name: str
    dtype: Dtype
    device: torch.device
    ranks: Ranks
    verdict: str = PASSED
    differs: bool = False  # the real model, of which no file is written
    is_lasting: bool = True  # whether the verdict holds for later starts, too
    file: Path = field(init=False)

    def __post_init__(self) -> None:
        facts: list[Any] = sorted(item for item in os.environ.items() if item[0].startswith(SETTINGS))
        code = source_text() + Path(__file__).read_text(encoding="utf-8")
        facts += [torch.__version__, gpu_of(self.device), self.dtype.value, code]
        if self.device.type == "cuda":
            library: Any = torch.cuda.nccl
            facts += [library.version(), version("triton"), DRIVER.read_text() if DRIVER.exists() else ""]
        every = self.ranks.gather_texts(_hash("\0".join(map(str, facts))))  # of these GPUs together
        self.file = cache_folder() / f"trial-{_hash(' '.join(every))}.json"

    def __str__(self) -> str:
        """Returns what is said of a trial that has failed."""
        steps = f"compiled steps over {self.ranks.world} ranks"
        if self.differs:
            return f"{steps} give other logits ({self.verdict}); engine=compiled skips this check"
        if self.verdict == EXCLUSIVE:
            fix = "nvidia-smi -c DEFAULT lets it try them; engine=compiled skips the trial"
            return f"{steps} were not tried ({self.verdict}); {fix}"
        again = f"to try again delete {self.file}" if self.is_lasting else "the next start tries again"
        return f"{steps} failed their trial ({self.verdict}); engine=compiled skips the trial; {again}"

    def passes(self, limit_s: float = math.inf) -> bool:
        """Returns whether the model's steps may be compiled, by an earlier start's verdict, or by trying.

        A trial takes `limit_s` at most; one that is cut short by that gives no verdict.
        """
        known = self._read()
        self.verdict = known or PASSED
        if json.dumps(None) in self.ranks.gather_texts(json.dumps(known)):
            self.verdict, self.is_lasting = self._tried(limit_s)
        self._agree()
        if self.verdict != known and self.is_lasting:
            self._write(self.verdict)
        return self.verdict == PASSED

    def _tried(self, limit_s: float) -> tuple[str, bool]:
        """Returns this rank's verdict, and whether those of all ranks hold for later starts."""
        exclusive = self.ranks.gather_ints([int(self._is_exclusive())])
        if any(is_exclusive for (is_exclusive,) in exclusive):
            return EXCLUSIVE, False
        log.info("engine: trying compiled steps over %d ranks, before weights are read", self.ranks.world)
        verdict, is_lasting = self._run(limit_s)
        are_lasting = self.ranks.gather_ints([int(is_lasting)])
        return verdict, all(lasts for (lasts,) in are_lasting)

    def _is_exclusive(self) -> bool:
        """Returns whether this rank's GPU, on which this process is, admits no other one."""
        if self.device.type != "cuda":
            return False
        uuid = gpu_of(self.device)
        return any(gpu.exclusive and gpu.uuid.removeprefix("GPU-") == uuid for gpu in gpus_here())

    def check(self, model: SteppedModel, widths: Iterable[int], rows: int, capacity: int) -> None:
        """Compares the real model's steps, which are eager from then on if they differ."""
        self.ranks.barrier()  # others may compile another model still
        with self.blamed(), self.ranks.within(CHECK_S, f"the check of {self.name}'s compiled steps"):
            self.verdict = difference(model, widths, (rows,), CHECKED, SLACK, capacity)
        self._agree()
        if self.verdict != PASSED:
            self.differs = True
            model.give_up()

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Ends all ranks where something fails or hangs inside; the next start then runs eagerly."""
        self.ranks.on_timeout = partial(self._write, "the steps of the model itself did not end in time")
        try:
            yield
        except Exception as error:
            if not isinstance(error, LostPeer) and "memory" not in str(error):
                self._write(first_line(error))
            raise
        finally:
            del self.ranks.on_timeout

    def _agree(self) -> None:
        every = self.ranks.gather_texts(self.verdict)
        self.verdict = next((verdict for verdict in every if verdict != PASSED), PASSED)

    def _run(self, limit_s: float) -> tuple[str, bool]:
        """Runs this rank's small process; returns why it failed, and whether that holds for later starts.

        It does if the process became ready, and `limit_s` has not cut it short.
        """
        environment = of_small_process(self.ranks, self.file.stem)
        try:
            process = subprocess.Popen(
                [*COMMAND, str(self.device), self.dtype.value],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            return f"its process did not start: {error}", False

        began = time.monotonic()
        said, errors, is_late = _followed(process, limit_s)
        if is_late and time.monotonic() - began >= limit_s:
            return f"no answer in {limit_s:.3g} s", False

        is_ready = _is_ready(said)
        if is_late:
            reason = f"no answer in {TRIAL_S:g} s" if is_ready else f"not ready in {PREPARE_S:g} s"
        elif process.returncode == 0:
            reason = PASSED
        else:
            last_line = errors.decode(errors="replace").strip().rpartition("\n")[2]
            reason = last_line.removeprefix("error: ") or f"exit code {process.returncode}"
        return reason, is_ready

    def _read(self) -> str | None:
        """Returns the verdict of an earlier start; None if there is none that can be read."""
        try:
            verdict = json.loads(self.file.read_text(encoding="utf-8"))["verdict"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return verdict if isinstance(verdict, str) else None

    def _write(self, verdict: str) -> None:
        part = part_of(self.file)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            part.write_text(json.dumps({"verdict": verdict}) + "\n", encoding="utf-8")
            part.replace(self.file)
        except OSError as error:
            log.warning("engine: the verdict is not kept: %s", error)


def _followed(process: subprocess.Popen[bytes], limit_s: float) -> tuple[bytes, bytes, bool]:
    """Waits for a small process; returns its output, its errors, and whether it was late, and so was killed.

    It is late if it is not ready in time, if it does not end in time once it is ready, or after `limit_s`.
    """
    said = b""
    errors = b""
    end = time.monotonic() + limit_s
    until = min(time.monotonic() + PREPARE_S, end)
    try:
        while time.monotonic() < until:
            was_ready = _is_ready(said)
            try:
                said, errors = process.communicate(timeout=LOOK_S)
                return said, errors, False
            except subprocess.TimeoutExpired as so_far:  # has all that was said until now
                said = so_far.stdout or said
                errors = so_far.stderr or errors
            if _is_ready(said) and not was_ready:
                until = min(time.monotonic() + TRIAL_S, end)
        return said, errors, True
    finally:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _is_ready(said: bytes) -> bool:
    return READY.encode() in said.splitlines()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> None:
    """Runs one rank's small process: exits with 0 if the trial passes, else with a line on standard error."""
    end_with_parent(signal.SIGKILL)
    device = torch.device(sys.argv[1])
    dtype = Dtype(sys.argv[2])
    ranks = open_ranks(device)
    try:
        ranks.connect()
        model = small_model(dtype, device, ranks)
        with model.uncaptured():
            difference(model, WIDTHS, ROWS, steps=1)  # compiles; what is off is found again
        print(READY, flush=True)
        reason = difference(model, WIDTHS, ROWS, STEPS)
        if reason != PASSED or not model.is_compiled:
            raise DistributedError(reason or "no step was compiled")
        ranks.close()
    except BaseException as error:
        cause = ranks.cause_of(error)
        leave(DISTRIBUTED, str(cause))


if __name__ == "__main__":
    main()
