"""A trial of compiled steps over several GPUs, in processes of their own, before a model's weights are read.

Sums of NCCL inside CUDA graphs may hang, or give wrong numbers, on a machine where they have never run, and a
process whose GPU hangs cannot be mended. So every rank of the model starts a small process on its GPU. These
processes cut a small model over as many ranks, in the same number format, and compare its compiled steps with
its eager ones. One that does not answer in time is killed. The verdict is the same on all ranks. It is kept,
by a hash of all that it depends on, and not by the time that something took: a text should not depend on how
busy the machine was.

After that, the steps of the real model are compared in the same way, under a deadline (`check`).
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
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.process_group import gpu_of, open_ranks
from llama_ssp.distributed.signals import CODE_FILE, end_with_parent, leave
from llama_ssp.errors import DISTRIBUTED, DistributedError
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
TRIAL_S = 120.0  # for the small processes, which import torch, meet and compile
CHECK_S = 120.0  # for the steps of the real model, which are compiled by then
WIDTHS, ROWS, STEPS = (1, 2, 5), (1, 2), 8
CHECKED = 2  # steps of each width of the real model
# How far logits may be off, as a share of the largest: compiled steps round less often than eager ones.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2.0**-7, torch.bfloat16: 2.0**-5}
PASSED = ""
DRIVER = Path("/proc/driver/nvidia/version")
TRIED: dict[Path, str] = {}  # the verdicts of this process, for where no file can be written


@dataclass
class Trial:
    """The trial of one model over `ranks`, all of which call it. `verdict` is PASSED, or why it failed."""

    name: str
    dtype: Dtype
    device: torch.device
    ranks: Ranks
    verdict: str = PASSED
    place: Path = field(init=False)  # of the kept verdict

    def __post_init__(self) -> None:
        versions: list[Any] = [torch.__version__, gpu_of(self.device)]
        if self.device.type == "cuda":
            library: Any = torch.cuda.nccl
            versions += [library.version(), DRIVER.read_text() if DRIVER.exists() else ""]
        text = "\0".join(map(str, (*versions, self.dtype.value, source_text())))
        every = self.ranks.gather_texts(_hash(text))  # a verdict is about these GPUs together
        self.place = cache_folder() / f"trial-{_hash(' '.join(every))}.json"

    def passes(self) -> bool:
        """Whether the model's steps may be compiled: by the kept verdict, or else by trying."""
        kept = self._kept()
        self.verdict = kept or PASSED
        if json.dumps(None) in self.ranks.gather_texts(json.dumps(kept)):
            log.info("engine: trying compiled steps over %d ranks, before weights are read", self.ranks.world)
            self.verdict = self._tried()
        self._agree()
        if self.verdict != kept:
            self._keep()
        if self.verdict != PASSED:
            self._warn("failed their trial")
        return self.verdict == PASSED

    def check(self, model: SteppedModel, widths: Iterable[int], rows: int, capacity: int) -> None:
        """Compares the real model's steps; eager steps if they differ. If they hang, all ranks end."""

        def late() -> None:
            self.verdict = f"the steps of {self.name} did not end in {CHECK_S:g} s"
            self._keep()

        what = f"the check of {self.name}'s compiled steps; the next start runs eagerly"
        with self.ranks.within(CHECK_S, what, late):
            self.verdict = difference(model, widths, (rows,), CHECKED, capacity)
        self._agree()
        if self.verdict != PASSED:
            model.give_up()
            self._warn("were wrong")

    def _agree(self) -> None:
        every = self.ranks.gather_texts(self.verdict)
        self.verdict = next((verdict for verdict in every if verdict != PASSED), PASSED)

    def _warn(self, what: str) -> None:
        if self.ranks.is_leader:
            how = f"engine=compiled skips the trial; to try again delete {self.place}"
            log.warning(
                "engine: %s runs eagerly: compiled steps over %d ranks %s (%s); %s",
                self.name, self.ranks.world, what, self.verdict, how,
            )  # fmt: skip

    def _tried(self) -> str:
        """Runs this rank's small process; returns why it failed."""
        rank, attempt = str(self.ranks.rank), os.environ.get(ATTEMPT, "0")
        environment = os.environ | {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(self.ranks.world),
            ATTEMPT: f"{attempt}/{self.place.stem}",  # for keys of their own in the store
        }  # fmt: skip
        environment.pop(CODE_FILE, None)
        try:
            ended = subprocess.run(
                [*COMMAND, str(self.device), self.dtype.value], env=environment, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, errors="replace", timeout=TRIAL_S, start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"no answer in {TRIAL_S:g} s"
        except OSError as error:
            return f"its process did not start: {error}"
        if ended.returncode == 0:
            return PASSED
        lines = ended.stderr.strip().splitlines()
        return lines[-1].removeprefix("error: ") if lines else f"exit code {ended.returncode}"

    def _kept(self) -> str | None:
        """The verdict of an earlier start; None if there is none that can be read."""
        if self.place in TRIED:
            return TRIED[self.place]
        try:
            verdict = json.loads(self.place.read_text(encoding="utf-8"))["verdict"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return verdict if isinstance(verdict, str) else None

    def _keep(self) -> None:
        TRIED[self.place] = self.verdict
        part = part_of(self.place)
        try:
            self.place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            part.write_text(json.dumps({"verdict": self.verdict}) + "\n", encoding="utf-8")
            part.replace(self.place)
        except OSError as error:
            log.warning("engine: the verdict is not kept: %s", error)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@torch.inference_mode()
def difference(
    model: SteppedModel, widths: Iterable[int], rows: Iterable[int], steps: int, capacity: int = 0
) -> str:
    """Why compiled steps give other logits than eager ones over the same tokens; PASSED if they do not.

    Each has a cache of its own. Eager steps, with their sums over ranks, come between the compiled ones.
    """
    tolerance, caches, reason = TOLERANCE[model.dtype], [], PASSED
    for count, width in itertools.product(rows, widths):
        caches.append(model.new_cache(count, max(capacity, steps * width)))  # none takes another's memory
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
        reason = difference(small_model(dtype, device, ranks), WIDTHS, ROWS, STEPS)
        if reason != PASSED:
            raise DistributedError(reason)
        ranks.close()
    except BaseException as error:
        cause = ranks.cause_of(error)
        leave(DISTRIBUTED, str(cause))


if __name__ == "__main__":
    main()
