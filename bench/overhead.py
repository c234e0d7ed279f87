"""The cost of a round without its forward passes: probabilities, sampling and the decision.

    python bench/overhead.py [ks=1,4,8,12] [vocabs=8192,32000,128256] [turns=60] [threads=1] [write=FILE.md]
    python bench/overhead.py compiled=true [rows=1,8] [ks=4] ...

Both models are replaced by precomputed logits, of a steep distribution as models have them. Rounds are drawn
and decided as rng.py and verification.py define it, and by the CPU kernel. Then, for five distributions of
each vocabulary, top-k and top-p are compared with sorting all tokens, as they are defined; also for flat
distributions, with a nucleus of most of the vocabulary. The least time of all turns counts, as disturbances
only add time.

With `compiled=true` it compares the kernel with torch.compile of the functions that it replaces: rounds as
defined, by the kernel, and compiled take turns, after a pass over 48 MB that empties the caches as a target's
forward does. The median CPU times count, which other programs disturb least, and the part of the kernel's
gain that compiling has.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from contenders import one_round  # noqa: E402
from surroundings import surroundings, write  # noqa: E402
from torch import Tensor  # noqa: E402

from bench.words import changed  # noqa: E402
from llama_ssp.config import SamplingConfig  # noqa: E402
from llama_ssp.models.kv_cache import Feed, RaggedCache  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402
from llama_ssp.speculative import native, verification  # noqa: E402
from llama_ssp.speculative.array_ops import excess  # noqa: E402
from llama_ssp.speculative.drafters.local import ModelDrafter  # noqa: E402
from llama_ssp.speculative.engine import Engine  # noqa: E402
from llama_ssp.speculative.model_runner import ModelRunner  # noqa: E402
from llama_ssp.speculative.native import HostDraws, by_kernel  # noqa: E402
from llama_ssp.speculative.rng import CounterDraws, Purpose, heat, inverse_cdf, race  # noqa: E402
from llama_ssp.speculative.sampling import SamplingTransform, filtered  # noqa: E402
from llama_ssp.speculative.state import Prompt, Proposal, State  # noqa: E402
from llama_ssp.speculative.verification import RULES, Rule  # noqa: E402

SPREAD = {"steep": 3.0, "flat": 0.3}  # standard deviations of logits
CONTROLS = {
    "plain": SamplingConfig(),
    "top-k 50": SamplingConfig(top_k=50),
    "top-p 0.95": SamplingConfig(top_p=0.95),
    "penalties": SamplingConfig(repetition_penalty=1.1, frequency_penalty=0.1),
}


class Instant:
    """A model with precomputed logits."""

    context, device, restart = 4096, torch.device("cpu"), None

    def __init__(self, vocab: int, columns: int, rows: int = 1, work: Tensor | None = None) -> None:
        self.vocab, self._work = vocab, work
        logits_WV = (SPREAD["steep"] * random(rows * columns, vocab)).bfloat16()
        self._logits_BWV = logits_WV.view(rows, columns, vocab)

    def new_cache(self, rows: int, capacity: int) -> RaggedCache:
        return RaggedCache(rows, capacity)

    def logits(self, token_BW: Tensor, feed: Feed, cache: RaggedCache, last_only: bool) -> Tensor:
        if self._work is not None:
            self._work.add_(1)
        return self._logits_BWV[:, : feed.width]


def random(rows: int, vocab: int) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))


def least_ms(work: Callable[[], object], turns: int) -> float:
    work()
    taken = []
    for _ in range(turns):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return 1000 * min(taken)


def round_ms(vocab: int, k: int, sampling: SamplingConfig, turns: int, draws: CounterDraws) -> float:
    transform, model = SamplingTransform(sampling, (), vocab), Instant(vocab, k + 1)
    drafter = ModelDrafter(ModelRunner(model, k + 1), transform, draws)
    engine = Engine(ModelRunner(model, k + 1), drafter, transform, RULES["block"], draws)
    state = engine.prefill([Prompt("0", tuple(range(64)))], turns + 2 * (k + 1))
    return least_ms(lambda: one_round(engine, state, k), turns)


class PlainBlock:
    """A `DraftBlock` without cached properties, which cannot be compiled."""


def compiled(rule: Rule, draws: HostDraws) -> Any:
    """`native.decide` by torch.compile of the rule's functions."""

    @partial(torch.compile, dynamic=False, fullgraph=True)
    def core(
        target: Tensor, draft: Tensor, drafted: Tensor, count: Tensor, coin: Tensor, clock: Tensor
    ) -> Any:
        double = [probs.double() / probs.double().sum(-1, keepdim=True) for probs in (target, draft)]
        block: Any = PlainBlock()
        block.target_BWV, block.draft_BKV = double
        block.drafted_BK, block.count_B = drafted, count
        block.k = drafted.shape[1]
        block.carried_BW = verification._carried(block)
        inner = block.carried_BW[:, 1:-1, None]
        block.spare_BJ = excess(inner, block.target_BWV[:, 1:-1], block.draft_BKV[:, 1:]).sum(-1)
        damaged = target[..., 0].isnan().any(1) | draft[..., 0].isnan().any(1)
        accepted = rule.accepted(coin < rule.accept_chances(block))
        token = race(rule.correction_probs(block, accepted), clock)
        overlap = verification.acceptance_prob(block)
        columns = accepted[:, None], token[:, None], damaged[:, None], drafted
        return torch.cat([*columns, overlap, *rule.standing(block, overlap)], 1)

    def decide(_rule: Rule, _draws: Any, state: State, proposal: Proposal, probs: Tensor) -> Any:
        coin = draws._uniforms(state.slot(Purpose.ACCEPT), proposal.k, probs.device).contiguous()
        clock = draws._clocks(state.slot(Purpose.CORRECT), 2 * heat(probs.shape[-1]), probs.device)
        return core(probs, proposal.draft_BKV, proposal.drafted_BK, torch.tensor(proposal.count), coin, clock)

    return decide


class CompiledDraws(HostDraws):
    """Drafts are drawn by the compiled definition; the kernel makes the numbers, as before."""

    _compiled = staticmethod(torch.compile(inverse_cdf, dynamic=False))

    def _by_cdf(self, probs_BV: Tensor, uniform_B1: Tensor) -> Tensor:
        return self._compiled(probs_BV, uniform_B1.contiguous())


def whole_rounds(vocab: int, k: int, rows: int, turns: int) -> list[float]:
    """Median milliseconds of CPU time of a round: as defined, by the kernel, compiled; they take turns."""
    work, rule = torch.zeros(12 * 2**20), RULES["block"]
    transform = SamplingTransform(SamplingConfig(), (), vocab)
    engines, taken = [], [[], [], []]
    for draws in (CounterDraws(0), HostDraws(0), CompiledDraws(0)):
        target, draft = Instant(vocab, k + 1, rows, work), Instant(vocab, k + 1, rows)
        drafter = ModelDrafter(ModelRunner(draft, k + 1), transform, draws)
        by_compiler = isinstance(draws, CompiledDraws)
        with patch.object(native, "decide", compiled(rule, draws) if by_compiler else native.decide):
            engine = Engine(ModelRunner(target, k + 1), drafter, transform, rule, draws)
        prompts = [Prompt(str(row), tuple(range(64))) for row in range(rows)]
        engines.append((engine, engine.prefill(prompts, turns + k + 4)))
    for turn in range(turns + 3):
        for times, (engine, state) in zip(taken, engines, strict=True):
            began = time.process_time()
            engine.verify(state, engine.draft(state, [k] * rows))
            times += [1000 * (time.process_time() - began)] * (turn >= 3)
            for row in range(rows):
                state.append(row, [1])
            engine.roll_back(state)
    return [median(times) for times in taken]


def against_compiler(vocabs: list[int], ks: list[int], rows: list[int], turns: int) -> list[list[str]]:
    """The table of `compiled=true`."""
    torch._dynamo.config.recompile_limit = 64
    table = [
        ["vocabulary", "K", "rows", "as defined, ms", "by kernel", "compiled", "part of the kernel's gain"]
    ]
    for vocab, k, count in product(vocabs, ks, rows):
        defined, kernel, by_compiler = whole_rounds(vocab, k, count, turns)
        part = f"{(defined - by_compiler) / (defined - kernel):.0%}"
        table.append(
            [str(vocab), str(k), str(count), *(f"{ms:.2f}" for ms in (defined, kernel, by_compiler)), part]
        )
    return table


def sorting_all(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Top-k and top-p as they are defined."""
    down = probs.sort(-1, descending=True).values
    least = down[..., top_k - 1 : top_k] if top_k else down
    if top_p < 1:
        least = torch.where(down.cumsum(-1) - down < top_p, down, 1).amin(-1, keepdim=True)
    kept = torch.where(probs >= least, probs, 0)
    return kept / kept.sum(-1, keepdim=True)


def main() -> None:
    own = {"ks": "", "vocabs": "8192,32000,128256", "turns": "60", "threads": "1", "write": "", "rows": "1,8"}
    own = changed(own | {"compiled": "false"}, sys.argv[1:])
    torch.set_num_threads(int(own["threads"]))
    turns, against = int(own["turns"]), own["compiled"] == "true"
    own["ks"] = own["ks"] or ("4" if against else "1,4,8,12")
    ks, vocabs, counts = ([int(n) for n in own[name].split(",")] for name in ("ks", "vocabs", "rows"))
    if against:
        table = aligned(against_compiler(vocabs, ks, counts, turns), 3)
        head = [
            "# The kernel and the compiler",
            "",
            *surroundings({"probabilities": f"cpu, {own['threads']} threads"}),
        ]
        text = "\n".join([*head, f"Medians of {turns} rounds.", "", "```", *table, "```", ""])
        print(text)
        write(own["write"], text)
        return
    rounds = [["vocabulary", "controls", "decided", *(f"K = {k}, ms" for k in ks)]]
    for vocab in vocabs:
        for name, sampling in CONTROLS.items():
            for decided, draws in (
                ("as defined", CounterDraws(0)),
                ("by kernel", by_kernel(CounterDraws(0))),
            ):
                taken = (f"{round_ms(vocab, k, sampling, turns, draws):.2f}" for k in ks)
                rounds.append([str(vocab), name, decided, *taken])
    filters = [["vocabulary", "distributions", "cut", "sorting all, ms", "ours, ms"]]
    for vocab in vocabs:
        for kind, spread in SPREAD.items():
            probs = torch.softmax(spread * random(5, vocab), -1)
            for cut in ((50, 1.0), (0, 0.95)):
                both = (
                    least_ms(lambda probs=probs, cut=cut: sorting_all(probs, *cut), turns // 4),
                    least_ms(lambda probs=probs, cut=cut: filtered(probs, *cut, 0.0), turns // 4),
                )
                named = f"top-k {cut[0]}" if cut[0] else f"top-p {cut[1]}"
                filters.append([str(vocab), kind, named, *(f"{ms:.2f}" for ms in both)])
    text = "\n".join(
        [
            "# A round beside its passes", "", *surroundings({"round": f"cpu, {own['threads']} threads"}),
            f"The least of {turns} turns, of {turns // 4} for filters alone.",
            "", "A round without its passes:", "", "```", *aligned(rounds, 3), "```", "",
            "Filters of five distributions:", "", "```", *aligned(filters, 3), "```", "",
        ]
    )  # fmt: skip
    print(text)
    write(own["write"], text)


if __name__ == "__main__":
    main()
