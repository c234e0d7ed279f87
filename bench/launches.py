"""What a GPU would launch, and how often the host would wait, counted on a CPU by an emulated device.

    python bench/launches.py [write=FILE.md]

It counts rounds by rows, K and sampling controls, and over two ranks by the draft's seat, on the leader and
on the other rank; prompts, a conversation's second turn and scores; and the experts of a prompt. Target and
draft have three layers each; a pass by a graph is one launch (tests/far.py). The host waits for the device
when it reads from it, and when it copies from memory that is not pinned (`pageable`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# First: it changes what of torch all others import.
from tests.far import (  # noqa: E402
    CONTROLS,
    SEATS,
    Counts,
    FarTensor,
    Replayed,
    Watch,
    attend,
    brought,
    of_a_round,
    over_ranks,
)

# isort: split

import torch  # noqa: E402

from bench.surroundings import report  # noqa: E402
from bench.words import Words  # noqa: E402
from llama_ssp.distributed.comm import ALONE  # noqa: E402
from llama_ssp.models import experts, steps  # noqa: E402
from llama_ssp.models.kernels.expert_stacks import Stack  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402
from llama_ssp.speculative.draft_length import FixedDraftLength  # noqa: E402
from llama_ssp.speculative.engine import Engine  # noqa: E402
from llama_ssp.speculative.generate import Limits, generate  # noqa: E402
from llama_ssp.speculative.logprobs import LogprobReader  # noqa: E402
from llama_ssp.speculative.rng import CounterDraws  # noqa: E402
from llama_ssp.speculative.state import Prompt  # noqa: E402
from tests.families import build, decoder_of  # noqa: E402
from tests.rig import engine_of, perturbed  # noqa: E402

Row = tuple[object, ...]
LONG = 4096
NOTES = (
    "Counts, not times. `copies` are queued to the device, `pageable` ones are not. Filtered:",
    "temperature 0.8, top-k, top-p and min-p; penalised: three penalties, a bias, a ban and a least",
    "length. Before filters and penalties were graphs (commit a6fccef0), rounds of one row with K = 4",
    "launched 99 times greedy, 205 filtered, 297 penalised; of 8 rows 135, 247 and 335. Before short",
    "prompts took compiled steps and rows were written together (commit 94941d2d), prompts of 20 tokens",
    "launched 367 times, a second turn 368 (133 and 134 before such steps were graphs, commit",
    "59a50c26), rounds of 64 rows 148 (K = 0) and 204 (K = 4). Before drafts went from device to device",
    "(commit 011f5d13), the leader of two ranks waited twice a round; the other rank copied once from",
    "pageable memory, and waited once besides if it had a copy of the draft.",
)
NAMES = {"leader": "on the leader", "copies": "on each", "split": "split"}


@dataclass
class Asked(Words):
    """The command line."""

    write: str = ""


def rounds() -> Iterator[Row]:
    modules = build("llama-gqa"), perturbed(build("llama-gqa"), 0.3)
    decoders = [decoder_of(module) for module in modules]
    cases = [*product(CONTROLS, (1, 8), (0, 4)), ("plain", 64, 0), ("plain", 64, 4)]
    for controls, rows, k in cases:
        counts = of_a_round(modules[0].config, decoders, rows, k, controls)
        yield f"a round: {rows} rows, K = {k}, {controls}", *per_round(counts)


def rounds_over_ranks() -> Iterator[Row]:
    """The draft is on the leader, whole on both ranks, or split over both."""
    for seat, rows in product(SEATS, (1, 8)):
        (_, leader), (_, follower) = over_ranks(seat, rows, 4)
        what = f"a round over 2 ranks: {rows} rows, K = 4, draft {NAMES[seat]}"
        yield f"{what}: the leader", *per_round(leader)
        yield f"{what}: the other", *per_round(follower)


def per_round(counts: Counts) -> Row:
    return tuple(f"{count:.1f}" for count in astuple(counts))


def passes() -> Iterator[Row]:
    """Prompts, a turn that adds 20 tokens to 4,096 and what was written, and a text that is scored."""
    module = build("llama-gqa", max_position_embeddings=2 * LONG)
    with Watch() as watch:
        pair = [Replayed(brought(decoder_of(each)), module.config, "far", ALONE) for each in (module, module)]
        for model in pair:
            model.prepare([5], 1, 2 * LONG)
        engine = engine_of(pair[0], pair[1], draws=CounterDraws(0, pair[0].replay), chunk=2048)
        for tokens in (5, 20, 70, LONG):
            text = tuple(3 + n % 50 for n in range(tokens))
            what = f"a prompt of {tokens} tokens, target and draft"
            yield what, *counted(watch, partial(engine.prefill, [Prompt("a", text)], 64))
        state = engine.prefill([Prompt("a", text)], 64)
        written(engine, state)
        turn = {0: Prompt("b", (*state.texts[0], *range(20)))}
        yield (
            "the second turn of a chat, 20 tokens",
            *counted(watch, partial(engine.admit, state, turn, True)),
        )
        reader = LogprobReader(1)
        yield f"scores of {LONG} tokens", *counted(watch, partial(engine.score, [Prompt("c", text)], reader))


def written(engine: Engine, state: Any) -> None:
    for _ in generate(engine, state, Limits(16), FixedDraftLength(4, 1)):
        pass


def counted(watch: Watch, work: Callable[[], Any]) -> Row:
    """Returns what the work takes."""
    before = watch.counts()
    work()
    return tuple(int(count) for count in astuple(watch.counts().since(before)))


def mixtures() -> Iterator[Row]:
    """The experts of one layer for 512 tokens: 128 experts, eight of them a token."""
    weight_TK, expert_TK = torch.rand(512, 128).topk(8)
    tensors = torch.rand(512, 32), weight_TK, expert_TK, torch.rand(128, 64, 32), torch.rand(128, 32, 32)
    ways: dict[str, Any] = {"sorted": experts.grouped, "one after the other": experts._one_by_one}
    for name, way in ways.items():
        with Watch() as watch:
            *given, up, down = map(FarTensor, tensors)
            layers = experts.Layers(Stack([up]), Stack([down]), None, None, experts.Gate("silu"))
            yield f"512 tokens, 8 of 128 experts each, {name}", *counted(watch, partial(way, *given, layers))


if __name__ == "__main__":
    asked = Asked.of(sys.argv[1:])
    steps.attention_kernel.attend = attend
    head = ("", "launches", "copies", "pageable", "waits")
    table = [head, *passes(), *mixtures(), *rounds(), *rounds_over_ranks()]
    lines = aligned([[str(cell) for cell in row] for row in table], 1)
    report(
        asked.write, "What is launched", {"target": "an emulated device"}, *NOTES, "", "```", *lines, "```"
    )
