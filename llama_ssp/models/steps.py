"""A decoder with compiled steps: one program for all widths and all numbers of rows, all-reduces inside.

A step has any number of tokens, of one row or of several, at any positions, over a cache of any size: these
are sizes that the program knows nothing of, so that nothing is compiled twice. Long passes, such as prompts,
run eagerly: their time is that of the products. The program is kept on disk: the next start loads it.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import subprocess
import time
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from llama_ssp.config import Dtype
from llama_ssp.distributed.comm import Ranks
from llama_ssp.models import attention
from llama_ssp.models.decoder import Decoder, KeysValues
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.kernels import attention as attention_kernel
from llama_ssp.models.kernels import coded, linear
from llama_ssp.models.kernels.build import cache_folder, complaint, is_ours, processor
from llama_ssp.models.kv_cache import Feed
from llama_ssp.models.slot_cache import SlotCache

log = logging.getLogger(__name__)

Step = Callable[..., Tensor]
Arguments = tuple[Tensor, Tensor, Tensor, list[KeysValues]]  # tokens, positions, first slots, caches
WIDEST = 72  # tokens of a row in a step: the longest draft, what a draft lags, and the next token
NUMBERS = itertools.count()  # of the decoders that this process compiles
OPTIONS: dict[str, Any] = {
    "guard_filter_fn": torch.compiler.skip_all_guards_unsafe, "size_asserts": False,
    "cpp.threads": 1,  # what is between two linear layers is too little to be divided
}  # fmt: skip
FOLDER = Path(__file__).parent
# The code that a step is made from.
TRACED = [FOLDER / f"{name}.py" for name in ("attention", "decoder", "experts", "linear", "steps")]
TRACED += [
    FOLDER / "kernels" / f"{name}.{kind}"
    for name in ("attention", "coded", "linear")
    for kind in ("cpp", "py")
]
TRACED += [FOLDER / "kernels" / f"{name}_triton.py" for name in ("attention", "coded", "experts")]


class SteppedModel(DecoderModel):
    """The same logits, up to rounding in 16 bit, in less time."""

    def __init__(self, decoder: Decoder, config: Any, name: str, ranks: Ranks) -> None:
        super().__init__(decoder, config, name, ranks)
        self._step: Step | None = None
        self._failed = False

    @torch.inference_mode()
    def prepare(self, widths: Iterable[int] = (), rows: int = 1, capacity: int = 8) -> None:
        """Loads or compiles the step before it is needed, on a text without meaning. All ranks call it.

        One program serves all widths, rows and capacities; graphs (cuda_graphs.py) are made for each width.
        """
        cache = self.new_cache(1, 8)
        for start, count in ((0, 1), (1, 2)):
            token_BW = torch.zeros(1, count, dtype=torch.int64, device=self.device)
            self.logits(token_BW, Feed((start,), (count,), 8, self.device), cache, last_only=False)

    def _run(self, token_T: Tensor, feed: attention.Feed, cache: SlotCache, last_only: bool) -> Tensor:
        width = max(count for _, _, count in feed.rows)
        if last_only or width > WIDEST or feed.long_T is not None or self._failed:
            return super()._run(token_T, feed, cache, last_only)
        arguments = token_T, feed.position_T, feed.first_T, cache.layers
        if self._step is not None or self._made(arguments):
            return self._call(arguments)
        return super()._run(token_T, feed, cache, last_only)

    def _call(self, arguments: Arguments) -> Tensor:
        assert self._step is not None
        with self.ranks.during("a step"):
            return self._step(*arguments)

    def _made(self, arguments: Arguments) -> bool:
        """Loads or compiles the step; whether the model can be compiled."""
        began, kept = time.perf_counter(), StepFile(self)
        step = kept.load()
        if step is not None:
            log.info("engine: loaded the step of %s", self.name)
        else:
            log.info("engine: compiling the step of %s", self.name)
            try:
                step = compiled(self.decoder, marked(*arguments))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever the compiler raises in a module that it does not know
                said = str(error).strip().splitlines() or [type(error).__name__]
                log.warning("engine: %s runs eagerly: it does not compile: %s", self.name, said[0][:200])
                self._failed = True
                return False
            kept.save(step)
            log.info("engine: compiled %s in %.1f s", self.name, time.perf_counter() - began)
        self._step = step
        return True


def compiled(decoder: Decoder, arguments: Arguments) -> Any:
    """The program, for `marked` arguments; `save_compiled_function` writes it.

    torch keeps programs by code, and no guards are checked that would tell decoders apart: each has code of
    its own. torch also keeps, by place in the source, which sizes and numbers differed from an earlier
    decoder's, and would take those for variables, unguarded: `dynamic=False` keeps it to the marked ones.
    """
    step: Any = traced(decoder)
    name = f"step_{next(NUMBERS)}"
    code = step.__code__.replace(co_name=name, co_qualname=name)
    own = types.FunctionType(code, step.__globals__, name, None, step.__closure__)
    options = dict(OPTIONS)  # torch.compile takes the filter out of the dictionary that it is given
    program: Any = torch.compile(own, fullgraph=True, dynamic=False, options=options)
    program = program.aot_compile((arguments, {}))
    program.disable_guard_check()
    return program


def traced(decoder: Decoder) -> Step:
    """One step as torch traces it: everything that differs from call to call is an argument."""

    def step(token_T: Tensor, position_T: Tensor, first_T: Tensor, caches: list[KeysValues]) -> Tensor:
        # Without these, a size could be 0, strides would be unknown, and every layer's cache be copied.
        check: Any = torch._check
        check(token_T.shape[0] >= 1)
        check(caches[0][0].shape[1] >= 1)
        feed = attention.Feed(position_T, first_T, attention_kernel.attend)
        logit_TV: Tensor = decoder(token_T, feed, caches)[0]
        return logit_TV

    return step


def marked(token_T: Tensor, position_T: Tensor, first_T: Tensor, caches: list[KeysValues]) -> Arguments:
    """The arguments, with sizes marked that may differ in the next call; a number of tokens may be 1."""
    for tensor in (token_T, position_T, first_T):
        torch._dynamo.decorators.mark_unbacked(tensor, 0, shape_id="T")
    for layer in caches:
        for tensor in layer:
            torch._dynamo.decorators.mark_unbacked(tensor, 1, shape_id="N")
    return token_T, position_T, first_T, caches


def has_kernels(name: str, dtype: Dtype, device: torch.device) -> bool:
    """Whether steps can be compiled here: their kernels may have to be built. If not, the log says why."""
    try:
        if device.type == "cpu":
            linear.operators()
        attention_kernel.operators(device.type)
        if dtype in (Dtype.int8, Dtype.int4, Dtype.packed) and coded.available(device):
            coded.operators(device.type)
    except (ImportError, OSError, subprocess.CalledProcessError) as error:
        log.warning("engine: %s runs eagerly: its kernel was not built: %s", name, complaint(error))
        return False
    return True


class StepFile:
    """A compiled step on disk, in inductor's cache folder: the next start loads it and traces nothing.

    Its name is a hash of all that it was made from; weights are not in it. It may not exist yet.
    """

    def __init__(self, model: SteppedModel) -> None:
        self._decoder, self._name = model.decoder, model.name
        tensors = itertools.chain(model.decoder.named_parameters(), model.decoder.named_buffers())
        sizes = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]
        versions = torch.__version__, transformers.__version__, torch.get_num_threads(), processor()
        config = model.config.to_json_string(use_diff=False)
        parts = *versions, config, model.decoder, sizes, model.device, model.ranks.label
        code = [file.read_text(encoding="utf-8") for file in TRACED]
        name = hashlib.sha256("\0".join([*map(str, parts), *code]).encode()).hexdigest()[:16]
        self.path = cache_folder() / f"step-{name}.bin"

    def load(self) -> Any | None:
        """The step, ready to be called; None if there is none that works.

        What is in the file is run: only this user may be able to write it and its folder.
        """
        try:
            if not is_ours(self.path):
                return None
            with self.path.open("rb") as file:
                given = {"decoder": self._decoder}
                step: Any = torch.compiler.load_compiled_function(file, external_data=given)
            step.disable_guard_check()
        except Exception as error:  # whatever torch raises for a file that is not whole
            log.debug("engine: %s: %s: %s", self.path, type(error).__name__, error)
            return None
        return step

    def save(self, step: Any) -> None:
        """Writes the step; if that fails, the next start compiles again."""
        part = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            step.save_compiled_function(str(part), external_data={"decoder": self._decoder})
            part.chmod(0o600)
            part.replace(self.path)
        except Exception as error:  # whatever torch finds in a module that it cannot write
            part.unlink(missing_ok=True)
            log.debug("engine: the step of %s is not kept: %s", self._name, error)
