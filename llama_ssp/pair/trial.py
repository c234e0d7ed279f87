"""A trial of compiled steps over several GPUs, in processes of their own, before weights are read.

Sums of NCCL inside CUDA graphs may hang, or give wrong numbers, on a machine where they have never run, and a
process with a hung GPU cannot recover. So every rank of the model starts a small process on its GPU. Together
these split a two-layer model over the same number of ranks, in the same number format, and compare its
compiled steps with its eager ones. One that does not answer in time is killed. The verdict is the same on
all ranks. It is written to a file, whose name is a hash of all that it depends on: a text should not depend
on how busy the machine was.

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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from llama_ssp.config import Dtype
from llama_ssp.distributed.board import ATTEMPT
from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.launcher import import_path
from llama_ssp.distributed.process_group import gpu_of, open_ranks
from llama_ssp.distributed.signals import CODE_FILE, end_with_parent, leave
from llama_ssp.errors import DISTRIBUTED, DistributedError, LostPeer, first_line
from llama_ssp.models.kept_files import cache_folder, part_of, source_text
from llama_ssp.models.step_check import PASSED, difference, small_model
from llama_ssp.models.steps import SteppedModel

log = logging.getLogger(__name__)

COMMAND = [sys.executable, "-m", "llama_ssp.pair.trial"]
TRIAL_S = 120.0  # for the small processes, which import torch, meet and compile
CHECK_S = 120.0  # for the steps of the real model, which are compiled by then
# Of the small model.
WIDTHS = (1, 2, 5)
ROWS = (1, 2)
STEPS = 8
# Of the real model: steps of each width; more layers, and experts, are farther off.
CHECKED = 2
SLACK = 4
READY = "ready"
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
    has_verdict: bool = True  # not if something failed before the first step: the next start tries again
    differs: bool = False  # the real model, of which no file is written
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
        again = f"engine=compiled skips the trial; to try again delete {self.file}"
        return f"{steps} failed their trial ({self.verdict}); {again}"

    def passes(self, most_s: float = math.inf) -> bool:
        """Whether the model's steps may be compiled, by the verdict of an earlier start, or by trying.

        A trial takes `most_s` at most; one that is cut short by that gives no verdict.
        """
        known = self._read()
        is_lasting = True
        self.verdict = known or PASSED
        if json.dumps(None) in self.ranks.gather_texts(json.dumps(known)):
            log.info("engine: trying compiled steps over %d ranks, before weights are read", self.ranks.world)
            self.verdict, is_ready = self._run(most_s)
            is_lasting = all(own for (own,) in self.ranks.gather_ints([int(is_ready)]))
        self._agree()
        self.has_verdict = self.verdict == PASSED or is_lasting
        if self.verdict != known and is_lasting:
            self._write(self.verdict)
        return self.verdict == PASSED

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

    def _run(self, most_s: float) -> tuple[str, bool]:
        """Runs this rank's small process; returns why it failed, and whether it came to its first step.

        It did not come to one, as far as the verdict goes, where `most_s` have cut it short.
        """
        limit_s = min(TRIAL_S, most_s)
        members = self.ranks.gather_texts(os.environ.get("RANK", "0"))
        rank = str(self.ranks.rank)
        attempt = os.environ.get(ATTEMPT, "0")
        environment = os.environ | import_path() | {"RANK": rank, "LOCAL_RANK": rank}
        environment["WORLD_SIZE"] = str(self.ranks.world)
        # The small processes have keys of their own in the store.
        environment[ATTEMPT] = f"{attempt}/{self.file.stem}/{'-'.join(members)}"
        for name in (CODE_FILE, "LOCAL_WORLD_SIZE"):
            environment.pop(name, None)
        try:
            ended = subprocess.run(
                [*COMMAND, str(self.device), self.dtype.value],
                env=environment,
                timeout=limit_s,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                start_new_session=True,
            )
            code: int | None = ended.returncode
            outputs = (ended.stdout, ended.stderr)
        except subprocess.TimeoutExpired as late:
            code = None
            outputs = (late.stdout or b"", late.stderr or b"")
        except OSError as error:
            return f"its process did not start: {error}", False
        said, errors = (output.decode(errors="replace") for output in outputs)
        if code is None:
            reason = f"no answer in {limit_s:.3g} s"
        elif code == 0:
            reason = PASSED
        else:
            last_line = errors.strip().rpartition("\n")[2]
            reason = last_line.removeprefix("error: ") or f"exit code {code}"
        is_cut_short = code is None and limit_s < TRIAL_S
        return reason, READY in said and not is_cut_short

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


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> None:
    """Runs one rank's small process: exits with 0 if the trial passes, else with a line on standard error."""
    end_with_parent(signal.SIGKILL)
    device = torch.device(sys.argv[1])
    dtype = Dtype(sys.argv[2])
    ranks = open_ranks(device)
    try:
        model = small_model(dtype, device, ranks)
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
