"""A decoder with compiled steps: programs for all widths and all numbers of rows, all-reduces inside.

A step has any number of tokens, of one row or of several, at any positions, over a cache of any size: these
are sizes that a program knows nothing of, so that nothing is compiled twice. A small model is compiled as one
program. A larger one is cut into groups of a few blocks: one program is compiled for a group, and called for
each group in turn, with that group's weights. So where blocks repeat each other (`groups_of`), compiling
takes the same time for any number of them. Long passes, such as prompts, run eagerly: matrix products take
nearly all of their time, and compiling would gain little. Programs are kept on disk: the next start loads
them.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.distributed.comm import Ranks
from llama_ssp.models import attention
from llama_ssp.models.decoder import Decoder
from llama_ssp.models.decoder_model import DecoderModel, Step
from llama_ssp.models.devices import TORCH_DTYPES
from llama_ssp.models.families import family_of
from llama_ssp.models.graph_sizes import WIDEST, short_prompt
from llama_ssp.models.kernels import attention as attention_kernel
from llama_ssp.models.kernels import coded, linear, probe
from llama_ssp.models.kernels.build import complaint, triton_runs
from llama_ssp.models.kernels.kernel_sizes import TORCH_HEAD
from llama_ssp.models.kv_cache import Caches, KVCache, growing
from llama_ssp.models.passes import Pass, all_rows
from llama_ssp.models.programs import Program, ProgramSpec, load_or_compile, sizes
from llama_ssp.models.quantization import QUANTISED
from llama_ssp.models.shape import shape_of
from llama_ssp.models.sharding import kinds_of_heads

log = logging.getLogger(__name__)

# Tokens, their positions and first slots; caches.
Arguments = tuple[Tensor, Tensor, Tensor, Caches]
GROUP = 4  # blocks of a program: a call of a program takes about 30 us, and a block about 1 s to compile
ODD = 3  # blocks at the beginning that may be of other kinds than the rest


class SteppedModel(DecoderModel):
    """A decoder with compiled steps: the eager logits, up to rounding in 16 bit, in less time."""

    def __init__(self, decoder: Decoder, config: Any, name: str, ranks: Ranks) -> None:
        super().__init__(decoder, config, name, ranks)
        family = family_of(config.model_type)
        # With soft caps, sinks or wide heads `attend_rows` makes a matrix of all scores on a GPU.
        shape = shape_of(config)
        is_wide = max(heads.head_dim for heads in shape.heads) > TORCH_HEAD
        if self.device.type == "cpu" or family.softcap or family.names.sinks or is_wide:
            self.attend = attention_kernel.attend
        self._step: Step | None = None
        self.is_compiled = True  # until compiling fails
        self.longest_prompt = short_prompt(cpu=self.device.type == "cpu")

    @torch.inference_mode()
    def prepare(
        self,
        widths: Iterable[int] = (),
        rows: int = 1,
        capacity: int = 8,
        ragged: bool = True,
        rewinds: int = 0,
    ) -> None:
        """Loads or compiles the step before it is needed, on a text without meaning. All ranks call it.

        One program serves all widths, rows and capacities; graphs (cuda_graphs.py) are made for each width.
        """
        cache = self.new_cache(1, 8)
        for start, count in ((0, 1), (1, 2)):
            token_BW = torch.zeros(1, count, dtype=torch.int64, device=self.device)
            pass_ = Pass(spans=all_rows([start], [count]), device=self.device)
            self._try(token_BW, pass_, cache)

    def _try(self, token_BW: Tensor, pass_: Pass, cache: KVCache) -> None:
        """Runs a step, and waits for the device."""
        logit_BWV = self.logits(token_BW, pass_, cache)
        with self.ranks.during("a step"):
            logit_BWV[0, 0, 0].item()

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Inside, steps are not compiled, and attention is torch's own."""
        was_compiled = self.is_compiled
        attend = self.attend
        self.is_compiled = False
        self.attend = attention.attend_rows
        try:
            yield
        finally:
            self.is_compiled = was_compiled
            self.attend = attend

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Inside, compiled steps are launched kernel by kernel: nothing is captured."""
        yield

    def give_up(self) -> None:
        """From now on steps run eagerly, by torch's own attention."""
        self.is_compiled = False
        self.attend = attention.attend_rows
        self._drop_steps()

    def tap(self, blocks: tuple[int, ...]) -> None:
        """A head taps the leader's part alone, but all ranks make their steps anew."""
        if not self._on_all_ranks([blocks == self.taps])[0]:
            self._drop_steps()
        super().tap(blocks)

    def _drop_steps(self) -> None:
        """The next step loads or compiles another program."""
        self._step = None

    def _step_for(
        self, token_T: Tensor, pass_: Pass, places: attention.Places, cache: KVCache
    ) -> Step | None:
        if pass_.width > WIDEST or places.long_T is not None or not self.is_compiled:
            return None
        if pass_.last_only and len(token_T) > self.longest_prompt:
            return None
        if cache.ring and pass_.width > cache.ring:  # two tokens would have one place in the ring
            return None
        arguments = (token_T, places.position_T, places.first_T, cache.layers)
        if self._step is None and not self._made(arguments):
            return None
        return self._step

    def _made(self, arguments: Arguments) -> bool:
        """Loads or compiles the step; returns whether it could be compiled on all ranks."""
        try:
            self._step = self._programs(arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compiler raises in a module that it does not know
            log.warning("engine: %s runs eagerly: it does not compile: %s", self.name, complaint(error))
        # One rank may compile for minutes where another has its program kept: the step waits for all.
        self.is_compiled = self._on_all_ranks([self._step is not None])[0]
        return self.is_compiled

    def _on_all_ranks(self, facts: list[bool]) -> list[bool]:
        """Returns which of the facts hold on every rank."""
        every = self.ranks.gather_ints(list(map(int, facts))) if facts else []
        return [all(column) for column in zip(*every, strict=True)]

    def _programs(self, arguments: Arguments) -> Step:
        """Loads or compiles the programs of all sections; sections that are alike share one."""
        began = time.perf_counter()
        x, position_T, first_T, caches = arguments
        loaded: dict[Path, Program] = {}
        calls = list[Call]()
        kinds = kinds_of(self.decoder, self.config)
        for section, blocks in sections_of(self.decoder, kinds, tapped=bool(self.taps)):
            spec = ProgramSpec(
                function=run_section,
                module=section,
                arguments=(x, position_T, first_T, caches[blocks]),
                kinds=kinds[blocks],
            )
            program = load_or_compile(self, spec, loaded)
            calls.append((program, section, blocks))

            # The next section is given what a block gives, (T, H). Programs are made by shapes, not values.
            table_VH = self.decoder.embedding.weight
            x = table_VH.new_empty(len(x), table_VH.shape[1], dtype=self.decoder.residual_dtype)
        log.debug("engine: the step of %s is ready in %.1f s", self.name, time.perf_counter() - began)
        return partial(run_programs, calls, sorted(self.taps), self.ranks)


class Section(nn.Module):
    """Some blocks in a row, which one program computes; sections that are alike share it.

    The first section is given tokens, the others what the last block before them gives; the last one gives
    logits.
    """

    def __init__(self, decoder: Decoder, blocks: slice, first: bool, last: bool, tapped: bool) -> None:
        super().__init__()
        self.rotaries = decoder.rotaries
        self.blocks = decoder.blocks[blocks]
        self.tapped = tapped
        self.first = decoder if first else None
        self.last = decoder if last else None

    def forward(self, x: Tensor, places: attention.Places, caches: Caches) -> list[Tensor]:
        """Returns what each part gives if states are tapped, else what the last part gives."""
        states = [x]
        if self.first is not None:
            states.append(self.first.embed(x, places))
        turns = {kind: rotary(places) for kind, rotary in self.rotaries.items()}
        for block, cache in zip(self.blocks, caches, strict=True):
            states.append(block(states[-1], turns, cache, places))
        if self.last is not None:
            states.append(self.last.to_logits(states[-1]))
        return states[1:] if self.tapped else states[-1:]

    def extra_repr(self) -> str:  # a program's file is named by the section's repr, too
        return f"tapped={self.tapped}"


def run_section(
    section: Section, x: Tensor, position_T: Tensor, first_T: Tensor, caches: Caches
) -> list[Tensor]:
    """The function that torch traces: what differs from call to call is an argument, weights too."""
    check: Any = torch._check
    sizes_of_caches = [tensor.shape[dim] for cache in caches for tensor, dim, _ in growing(cache)]
    for size in (x.shape[0], *sizes_of_caches):
        check(size >= 1)  # if it could be 0, strides would be unknown, and each cache be copied
    places = attention.Places(position_T=position_T, first_T=first_T, attend=attention_kernel.attend)
    states: list[Tensor] = section(x, places, caches)
    return states


Call = tuple[Program, Section, slice]


def run_programs(
    calls: list[Call],
    taps: list[int],
    ranks: Ranks,
    token_T: Tensor,
    position_T: Tensor,
    first_T: Tensor,
    caches: Caches,
) -> list[Tensor]:
    """Returns the logits, then the states that are tapped."""
    x = token_T
    states = list[Tensor]()
    with ranks.during("a step"):
        for program, section, blocks in calls:
            states += program(section, x, position_T, first_T, caches[blocks])
            x = states[-1]
    return [x, *(states[number] for number in taps)]


def kinds_of(decoder: Decoder, config: Any) -> tuple[str, ...]:
    """Returns what may differ from block to block, in words."""
    pairs = zip(shape_of(config).blocks, decoder.blocks, strict=True)
    return tuple(f"{shape} {block} {sizes(block)}" for shape, block in pairs)


def sections_of(decoder: Decoder, kinds: tuple[str, ...], tapped: bool) -> list[tuple[Section, slice]]:
    """Returns the sections, each with its blocks.

    A small decoder is one section; a larger one is the embedding, groups of blocks, and the head.
    """
    spans = groups_of(kinds)
    if len(spans) > 1:
        count = len(kinds)
        spans = [slice(0, 0), *spans, slice(count, count)]
    last = len(spans) - 1
    return [
        (Section(decoder, span, first=number == 0, last=number == last, tapped=tapped), span)
        for number, span in enumerate(spans)
    ]


def groups_of(kinds: tuple[str, ...]) -> list[slice]:
    """Cuts the blocks into groups of the same kinds, so that one program serves all groups.

    A group is one or more whole periods of the kinds: at most GROUP blocks, or one period if that is longer.
    The groups are equally long if they can be; else the last one is shorter.

        s s s s s s s      4 + 3
        s s f s s f        3 + 3
        d s s s s s s      1 + 3 + 3
        d s s              3

    A model of more than GROUP blocks may begin with up to ODD other ones, such as dense layers before layers
    with experts: these are a group of their own. Blocks without a period are one group: one odd block at the
    end is enough. The program of all blocks then takes about a second a block to compile, at the first start.
    """
    count = len(kinds)
    for odd in range(1, ODD + 1):
        rest = kinds[odd:]
        if count > GROUP and period_of(kinds) == count and period_of(rest) < len(rest):
            groups = [slice(odd + group.start, odd + group.stop) for group in groups_of(rest)]
            return [slice(0, odd), *groups]

    period = period_of(kinds)
    lengths = [period * periods for periods in range(max(1, GROUP // period), 0, -1)]
    size = next((length for length in lengths if length > 1 and count % length == 0), lengths[0])
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def period_of(kinds: tuple[str, ...]) -> int:
    """Returns after how many blocks the kinds begin anew: after all of them, where nothing is repeated."""
    count = len(kinds)
    return next((p for p in range(1, count) if kinds[p:] == kinds[:-p]), count)


def has_kernels(
    name: str,
    dtype: Dtype,
    device: torch.device,
    heads: tuple[int, int, int],
    model: ModelConf | None = None,
) -> bool:
    """Returns whether steps can be compiled here: kernels may have to be built. If not, the log says why.

    `heads`: how many of queries, how many of keys, and their size. On a GPU the kernels are tried, too, those
    that `model` uses; without one, it has no experts, and heads of one kind.
    """
    on_cpu = device.type == "cpu"
    if not on_cpu and not triton_runs():
        return False
    in_codes = dtype in (*QUANTISED, Dtype.packed) and coded.available(device)
    wanted: list[Callable[[], None]] = [partial(attention_kernel.operators, device.type)]
    if on_cpu:
        wanted.append(linear.operators)
    if in_codes:
        wanted.append(partial(coded.operators, device.type))

    numbers = TORCH_DTYPES[dtype]
    kinds = list[probe.CodedKind]()
    if in_codes:
        kinds = probe.kinds_of(dtype, model.code_mix if model else "")
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda make: make(), wanted))
        if not on_cpu:
            queries, *usual = heads
            others = [] if model is None else kinds_of_heads(model)[1:]
            for keys, size in [tuple(usual), *others]:
                probe.require_attention(queries // keys, size, numbers, device)
            for kind in kinds:
                probe.require_coded(kind, device)
    except Exception as error:  # whatever compilers, libraries and kernels raise
        log.warning("engine: %s runs eagerly: its kernels fail: %s", name, complaint(error))
        return False

    has_plain_experts = bool(model and model.experts) and not any(kind.experts for kind in kinds)
    return on_cpu or not has_plain_experts or probe.experts_run(numbers, device, many=False)
