"""A trial of compiled steps over several GPUs, in processes of their own, before weights are read.

Sums of NCCL inside CUDA graphs may hang, or give wrong numbers, on a machine where they have never run, and a
process with a hung GPU cannot recover. So every rank of the model starts a small process on its GPU. Together
these split a two-layer model over the same number of ranks, in the same number format, and compare its
compiled steps with its eager ones. One that does not answer in time is killed. The verdict is the same on
all ranks. It is written to a file, whose name is a hash of all that it depends on: a text should not depend
on how busy the machine was.

After that, the steps of the real model are compared in the same way (`check`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import torch
from torch import Tensor

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.distributed.comm import Ranks, nothing
from llama_ssp.distributed.failures import LostPeer
from llama_ssp.distributed.process_group import gpu_of, open_ranks
from llama_ssp.distributed.signals import CODE_FILE, end_with_parent, leave
from llama_ssp.errors import DISTRIBUTED, DistributedError, first_line
from llama_ssp.models.assemble import decoder, wanted
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.devices import TORCH_DTYPES
from llama_ssp.models.feed import Feed
from llama_ssp.models.formats.coded import taken
from llama_ssp.models.kernels.build import cache_folder, part_of
from llama_ssp.models.linear import formats
from llama_ssp.models.loader import stepped
from llama_ssp.models.programs import source_text
from llama_ssp.models.sharding import Cut
from llama_ssp.models.slot_cache import SlotCache
from llama_ssp.models.steps import SteppedModel, has_kernels
from llama_ssp.models.synthetic import config_for

log = logging.getLogger(__name__)

ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
COMMAND = [sys.executable, "-m", "llama_ssp.pair.trial"]
SOURCES = Path(__file__).resolve().parents[2]  # the program may not be installed
TRIAL_S = 120.0  # for the small processes, which import torch, meet and compile
CHECK_S = 120.0  # for the steps of the real model, which are compiled by then
WIDTHS, ROWS, STEPS = (1, 2, 5), (1, 2), 8
CHECKED = 2  # steps of each width of the real model
# How far logits may be off, as a share of the largest: compiled steps round less often than eager ones.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2.0**-7, torch.bfloat16: 2.0**-5}
SLACK = 4  # of a real model: it has more layers, and experts, of which another may be chosen
PASSED, READY = "", "ready"
DRIVER = Path("/proc/driver/nvidia/version")
SETTINGS = (
    "NCCL_",
    "TORCH_NCCL_",
    "PYTORCH_CUDA_ALLOC",
    "PYTORCH_ALLOC",
)  # variables that a verdict depends on
VERDICTS: dict[Path, str] = {}  # of this process, for where no file can be written


@dataclass
class Trial:
    """The trial of one model over `ranks`, all of which call it. `verdict` is PASSED, or why it failed."""

    name: str
    dtype: Dtype
    device: torch.device
    ranks: Ranks
    verdict: str = PASSED
    differs: bool = False  # the real model, of which no file is written
    file: Path = field(init=False)

    def __post_init__(self) -> None:
        facts: list[Any] = [torch.__version__, gpu_of(self.device), self.dtype.value, source_text()]
        facts += [Path(__file__).read_text(encoding="utf-8")]
        facts += sorted(item for item in os.environ.items() if item[0].startswith(SETTINGS))
        if self.device.type == "cuda":
            library: Any = torch.cuda.nccl
            facts += [library.version(), version("triton"), DRIVER.read_text() if DRIVER.exists() else ""]
        every = self.ranks.gather_texts(_hash("\0".join(map(str, facts))))  # of these GPUs together
        self.file = cache_folder() / f"trial-{_hash(' '.join(every))}.json"

    def __str__(self) -> str:
        """What is said of a trial that has failed."""
        steps = f"compiled steps over {self.ranks.world} ranks"
        if self.differs:
            return f"{steps} give other logits ({self.verdict}); engine=compiled skips this check"
        again = f"engine=compiled skips the trial; to try again delete {self.file}"
        return f"{steps} failed their trial ({self.verdict}); {again}"

    def passes(self) -> bool:
        """Whether the model's steps may be compiled, by the verdict of an earlier start, or by trying."""
        known, is_lasting = self._read(), True
        self.verdict = known or PASSED
        if json.dumps(None) in self.ranks.gather_texts(json.dumps(known)):
            log.info("engine: trying compiled steps over %d ranks, before weights are read", self.ranks.world)
            self.verdict, is_ready = self._run()
            is_lasting = all(own for (own,) in self.ranks.gather_ints([int(is_ready)]))
        self._agree()
        if self.verdict != known and is_lasting:
            self._write()
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
        """What fails or hangs inside ends all ranks, and is a failed trial: the next start runs eagerly."""
        self.ranks.on_timeout = partial(self._fail, "the steps of the model itself did not end in time")
        try:
            yield
        except Exception as error:
            if not isinstance(error, LostPeer) and "memory" not in str(error):
                self._fail(first_line(error))
            raise
        finally:
            self.ranks.on_timeout = nothing

    def _fail(self, reason: str) -> None:
        self.verdict = reason
        self._write()

    def _agree(self) -> None:
        every = self.ranks.gather_texts(self.verdict)
        self.verdict = next((verdict for verdict in every if verdict != PASSED), PASSED)

    def _run(self) -> tuple[str, bool]:
        """Runs this rank's small process; returns why it failed, and whether it came to its first step.

        Before that, what fails is the process itself, not compiled steps.
        """
        members = self.ranks.gather_texts(os.environ.get("RANK", "0"))
        rank, attempt = str(self.ranks.rank), os.environ.get(ATTEMPT, "0")
        path = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(self.ranks.world),
            # The small processes have keys of their own in the store.
            ATTEMPT: f"{attempt}/{self.file.stem}/{'-'.join(members)}",
            "PYTHONPATH": path, "PYTHONSAFEPATH": "1",
        }  # fmt: skip
        for name in (CODE_FILE, "LOCAL_WORLD_SIZE"):
            environment.pop(name, None)
        with TemporaryFile() as out, TemporaryFile() as err:
            try:
                code: int | None = subprocess.run(
                    [*COMMAND, str(self.device), self.dtype.value], env=environment, stdin=subprocess.DEVNULL,
                    stdout=out, stderr=err, timeout=TRIAL_S, start_new_session=True,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                code = None
            except OSError as error:
                return f"its process did not start: {error}", False
            said, errors = (_read_all(stream) for stream in (out, err))
        last = errors.strip().rpartition("\n")[2].removeprefix("error: ") or f"exit code {code}"
        reason = PASSED if code == 0 else last if code is not None else f"no answer in {TRIAL_S:g} s"
        return reason, READY in said

    def _read(self) -> str | None:
        """The verdict of an earlier start; None if there is none that can be read."""
        if self.file in VERDICTS:
            return VERDICTS[self.file]
        try:
            verdict = json.loads(self.file.read_text(encoding="utf-8"))["verdict"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return verdict if isinstance(verdict, str) else None

    def _write(self) -> None:
        VERDICTS[self.file] = self.verdict
        part = part_of(self.file)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            part.write_text(json.dumps({"verdict": self.verdict}) + "\n", encoding="utf-8")
            part.replace(self.file)
        except OSError as error:
            log.warning("engine: the verdict is not kept: %s", error)


def _read_all(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@torch.inference_mode()
def difference(
    model: SteppedModel, widths: Iterable[int], rows: Iterable[int], steps: int, slack: int = 1,
    capacity: int = 0,
) -> str:  # fmt: skip
    """Why compiled steps give other logits than eager ones over the same tokens; PASSED if they do not.

    Each has a cache of its own. Eager steps, with their sums over ranks, come between the compiled ones.
    Caches of a `capacity` are those that a run will have, one after the other.
    """
    tolerance, caches, reason = slack * TOLERANCE[model.dtype], list[SlotCache](), PASSED
    for count, width in itertools.product(rows, widths):
        if capacity:
            caches.clear()  # the next one takes its memory
        caches.append(model.new_cache(count, max(capacity, steps * width)))
        eager_cache = DecoderModel.new_cache(model, count, steps * width)
        numbers, before_BWV = torch.Generator().manual_seed(width), None
        for step in range(steps):  # all of them, whatever is found: other ranks wait in their sums
            token_BW = torch.randint(model.vocab, (count, width), generator=numbers).to(model.device)
            where = (step * width,) * count, (width,) * count
            compiled_BWV = _logits(model, token_BW, where, caches[-1])
            with model.eagerly():
                eager_BWV = _logits(model, token_BW, where, eager_cache)
            top = float(eager_BWV.abs().max())
            off = float((compiled_BWV - eager_BWV).abs().max()) / top
            if reason == PASSED and not off <= tolerance:
                reason = f"step {step + 1} of {width} tokens in {count} rows: logits are off by {off:.2g} of "
                reason += f"the largest, {tolerance:.2g} is allowed"
            if before_BWV is not None and float((compiled_BWV - before_BWV).abs().max()) <= tolerance * top:
                reason = reason or "other tokens have the same logits"
            before_BWV = compiled_BWV
    return reason


def _logits(
    model: SteppedModel, token_BW: Tensor, where: tuple[tuple[int, ...], tuple[int, ...]], cache: SlotCache
) -> Tensor:
    return model.logits(token_BW, Feed(*where, cache.capacity, model.device), cache, last_only=False).float()


class RandomWeights:
    """Weights by name, so that all that a layer writes reaches the logits."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self.shapes, self._dtype = shapes, dtype

    def read(self, name: str, cut: Cut | None) -> Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:  # a norm
            whole = torch.ones(shape)
        else:
            numbers = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = torch.randn(shape, generator=numbers) / math.sqrt(shape[-1])
        return taken(whole, cut).to(self._dtype)


def small_model(dtype: Dtype, device: torch.device, ranks: Ranks) -> SteppedModel:
    """This rank's part of a Llama of two layers with random weights; raises DistributedError if eager."""
    heads = 2 * max(4, ranks.world), max(4, ranks.world), 64
    shape = ModelConf(
        name="trial", family="llama", n_layers=2, n_heads=heads[0], n_kv_heads=heads[1], head_dim=heads[2],
        dim=1024, ffn=2048, vocab=4096, context=1024,
    )  # fmt: skip
    if not has_kernels(shape.name, dtype, device, heads):
        raise DistributedError("there is no kernel for compiled steps", str(device))
    config, held = config_for(shape), TORCH_DTYPES[dtype]
    source = RandomWeights(wanted(config), held)
    made = decoder(config, source, ranks, held, *formats(dtype, device, fast=True), device)
    return stepped(device)(made, config, shape.name, ranks)


def main() -> None:
    """One rank's small process: exits with 0 if the trial has passed, else with a line on standard error."""
    end_with_parent(signal.SIGKILL)
    device, dtype = torch.device(sys.argv[1]), Dtype(sys.argv[2])
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
