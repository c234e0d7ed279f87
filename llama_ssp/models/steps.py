"""A decoder with compiled steps: programs for all widths and all numbers of rows, all-reduces inside.

A step has any number of tokens, of one row or of several, at any positions, over a cache of any size: these
are sizes that a program knows nothing of, so that nothing is compiled twice. A small model is one program. Of
a larger one a few blocks are, and are called with the weights of each group of blocks in turn: the time of
compiling does not grow with the number of blocks. Long passes, such as prompts, run eagerly: their time is
that of the products. Programs are kept on disk: the next start loads them.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama_ssp.config import Dtype
from llama_ssp.distributed.comm import Ranks
from llama_ssp.models import attention
from llama_ssp.models.decoder import Decoder, KeysValues, Turns
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.kernels import attention as attention_kernel
from llama_ssp.models.kernels import coded, linear
from llama_ssp.models.kernels.build import complaint, triton_runs
from llama_ssp.models.kv_cache import Feed
from llama_ssp.models.programs import Program, ProgramFile, ProgramSpec, compiled, sizes
from llama_ssp.models.shape import shape_of
from llama_ssp.models.slot_cache import SlotCache

log = logging.getLogger(__name__)

# A step gives logits, then what the model's taps are given.
Step = Callable[[Tensor, Tensor, Tensor, Tensor, list[KeysValues]], list[Tensor]]
# Tokens, their positions, first slots and slots; caches.
Arguments = tuple[Tensor, Tensor, Tensor, Tensor, list[KeysValues]]
WIDEST = 72  # tokens of a row in a step (also in attention.cpp): the longest draft, its lag, the next token
GROUP = 4  # blocks of a program: a call of a program takes about 30 us, and a block about 1 s to compile


class SteppedModel(DecoderModel):
    """The same logits, up to rounding in 16 bit, in less time."""

    def __init__(self, decoder: Decoder, config: Any, name: str, ranks: Ranks) -> None:
        super().__init__(decoder, config, name, ranks)
        if self.device.type == "cpu":
            self.attend = attention_kernel.attend
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

    @property
    def is_compiled(self) -> bool:
        """Whether steps are compiled; known after `prepare`."""
        return not self._failed

    def tap(self, blocks: tuple[int, ...]) -> None:
        if blocks != self.taps:
            self._step = None  # the next pass loads or compiles another
        super().tap(blocks)

    def _run(
        self, token_T: Tensor, feed: attention.Pass, cache: SlotCache, last_only: bool
    ) -> tuple[Tensor, list[Tensor]]:
        width = max(feed.widths)
        if last_only or width > WIDEST or feed.long_T is not None or self._failed:
            return super()._run(token_T, feed, cache, last_only)
        arguments = token_T, feed.position_T, feed.first_T, feed.slot_T, cache.layers
        if self._step is not None or self._made(arguments):
            logit_TV, *kept = self._call(arguments)
            return logit_TV, kept
        return super()._run(token_T, feed, cache, last_only)

    def _call(self, arguments: Arguments) -> list[Tensor]:
        assert self._step is not None
        with self.ranks.during("a step"):
            return self._step(*arguments)

    def _made(self, arguments: Arguments) -> bool:
        """Loads or compiles the step; whether the model can be compiled."""
        try:
            self._step = self._programs(arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compiler raises in a module that it does not know
            log.warning("engine: %s runs eagerly: it does not compile: %s", self.name, complaint(error))
            self._failed = True
        return not self._failed

    def _programs(self, arguments: Arguments) -> Step:
        began, compiles = time.perf_counter(), False
        programs: dict[Path, Program] = {}
        groups = groups_of(kinds := kinds_of(self.decoder, self.config))
        specs = program_specs(self.decoder, kinds, groups, bool(self.taps), *arguments)
        files = [ProgramFile(self, spec) for spec in specs]
        for file in files:
            program = programs.get(file.path) or file.load()
            if program is None:
                if not compiles:
                    log.info("engine: compiling the step of %s", self.name)
                compiles, program = True, compiled(file.spec)
                file.save(program)
            programs[file.path] = program
        how = f"compiled in {time.perf_counter() - began:.1f} s" if compiles else "loaded"
        log.info("engine: the step of %s is %s", self.name, how)
        return joined(self.decoder, groups, self.taps, [programs[file.path] for file in files])


def kinds_of(decoder: Decoder, config: Any) -> tuple[str, ...]:
    """What may differ from block to block, in words."""
    shapes = shape_of(config).blocks
    return tuple(
        f"{shape} {block} {sizes(block)}" for shape, block in zip(shapes, decoder.blocks, strict=True)
    )


def groups_of(kinds: tuple[str, ...]) -> list[slice]:
    """The blocks in groups of about GROUP that repeat each other; the last may be shorter."""
    count = len(kinds)
    period = next(p for p in range(1, count + 1) if kinds[p:] == kinds[:-p])
    size = period * max(1, GROUP // period)
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def program_specs(
    decoder: Decoder, kinds: tuple[str, ...], groups: list[slice], tapped: bool, token_T: Tensor,
    position_T: Tensor, first_T: Tensor, slot_T: Tensor, caches: list[KeysValues],
) -> list[ProgramSpec]:  # fmt: skip
    """The whole step, or what is before the groups, the groups, and what is behind them.

    Where the model has taps, all blocks' states come out of the programs: so groups share one all the same.
    """
    if len(groups) == 1:
        given = token_T, position_T, first_T, slot_T, caches
        return [ProgramSpec(whole_with_states if tapped else whole, decoder, given, kinds)]
    feed = attention.Pass(position_T, first_T, slot_T, attention_kernel.attend)
    x_TH = decoder.embedding.weight.new_empty(len(token_T), decoder.embedding.weight.shape[1])
    turns = {kind: rotary(feed) for kind, rotary in decoder.rotaries.items()}
    middle = [
        ProgramSpec(
            through_with_states if tapped else through, decoder.blocks[own],
            (x_TH, turns, position_T, first_T, slot_T, caches[own]), kinds[own],
        )
        for own in groups
    ]  # fmt: skip
    first = ProgramSpec(opening, decoder, (token_T, position_T, first_T, slot_T), kinds)
    return [first, *middle, ProgramSpec(closing, decoder, (x_TH,), kinds)]


def joined(decoder: Decoder, groups: list[slice], taps: tuple[int, ...], programs: list[Program]) -> Step:
    """The step that calls the programs of `program_specs`."""
    if len(programs) == 1:
        only = partial(programs[0], decoder)
        return partial(_chosen, only, taps) if taps else only
    first, *middle, last = programs
    blocks = [decoder.blocks[own] for own in groups]
    of_groups = list(zip(middle, blocks, groups, strict=True))

    def step(
        token_T: Tensor, position_T: Tensor, first_T: Tensor, slot_T: Tensor, caches: list[KeysValues]
    ) -> list[Tensor]:
        x_TH, turns = first(decoder, token_T, position_T, first_T, slot_T)
        states = [x_TH]
        for program, own, where in of_groups:
            states += program(own, states[-1], turns, position_T, first_T, slot_T, caches[where])
        return [last(decoder, states[-1]), *(states[number] for number in sorted(taps))]

    return step


def _chosen(step: Step, taps: tuple[int, ...], *arguments: Any) -> list[Tensor]:
    """Of a step that gives all states, those of the taps."""
    logit_TV, *states = step(*arguments)
    return [logit_TV, *(states[number] for number in sorted(taps))]


# The functions that torch traces: everything that differs from call to call is an argument, weights too.


def whole(decoder: Decoder, *given: Any) -> list[Tensor]:
    return whole_with_states(decoder, *given)[:1]


def whole_with_states(
    decoder: Decoder,
    token_T: Tensor,
    position_T: Tensor,
    first_T: Tensor,
    slot_T: Tensor,
    caches: list[KeysValues],
) -> list[Tensor]:
    """Logits, then what each block is given, and what the last one gives."""
    x_TH, turns = opening(decoder, token_T, position_T, first_T, slot_T)
    blocks = list(decoder.blocks)
    states = [x_TH, *through_with_states(blocks, x_TH, turns, position_T, first_T, slot_T, caches)]
    return [closing(decoder, states[-1]), *states]


def opening(
    decoder: Decoder, token_T: Tensor, position_T: Tensor, first_T: Tensor, slot_T: Tensor
) -> tuple[Tensor, Turns]:
    _never_empty(token_T)
    return decoder.opening(token_T, attention.Pass(position_T, first_T, slot_T, attention_kernel.attend))


def through(blocks: Any, *given: Any) -> list[Tensor]:
    return through_with_states(blocks, *given)[-1:]


def through_with_states(
    blocks: Any, x_TH: Tensor, turns: Turns, position_T: Tensor, first_T: Tensor, slot_T: Tensor,
    caches: list[KeysValues],
) -> list[Tensor]:  # fmt: skip
    """What each of the blocks gives."""
    _never_empty(x_TH)
    _never_empty(caches[0][0][0])
    feed = attention.Pass(position_T, first_T, slot_T, attention_kernel.attend)
    states = []
    for block, cache in zip(blocks, caches, strict=True):
        x_TH = block(x_TH, turns, cache, feed)
        states.append(x_TH)
    return states


def closing(decoder: Decoder, x_TH: Tensor) -> Tensor:
    _never_empty(x_TH)
    return decoder.closing(x_TH)


def _never_empty(tensor: Tensor) -> None:
    """Says so to torch: if a size could be 0, strides would be unknown, and every layer's cache be copied."""
    check: Any = torch._check
    check(tensor.shape[0] >= 1)


def has_kernels(name: str, dtype: Dtype, device: torch.device) -> bool:
    """Whether steps can be compiled here: their kernels may have to be built. If not, the log says why."""
    if device.type != "cpu" and not triton_runs():
        return False
    wanted: list[Callable[[], None]] = [partial(attention_kernel.operators, device.type)]
    if device.type == "cpu":
        wanted.append(linear.operators)
    if dtype in (Dtype.int8, Dtype.int4, Dtype.packed) and coded.available(device):
        wanted.append(partial(coded.operators, device.type))
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda make: make(), wanted))
    except (ImportError, OSError, subprocess.CalledProcessError) as error:
        log.warning("engine: %s runs eagerly: its kernel was not built: %s", name, complaint(error))
        return False
    return True
