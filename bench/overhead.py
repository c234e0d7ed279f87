"""The cost of a round without its forward passes: probabilities, sampling and the decision.

    python bench/overhead.py [ks=1,4,8,12] [vocabs=8192,32000,128256] [turns=60] [threads=1] [write=FILE.md]

Both models are replaced by precomputed logits, of a steep distribution as models have them. Rounds are drawn
and decided as rng.py and verification.py define it, and by the CPU kernel. Then, for five distributions of
each vocabulary, top-k and top-p are compared with sorting all tokens, as they are defined; also for flat
distributions, with a nucleus of most of the vocabulary. The least time of all turns counts, as disturbances
only add time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from contenders import one_round  # noqa: E402
from surroundings import surroundings, write  # noqa: E402
from torch import Tensor  # noqa: E402

from llama_ssp.config import SamplingConfig  # noqa: E402
from llama_ssp.models.kv_cache import Feed, RaggedCache  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402
from llama_ssp.speculative.drafters.local import ModelDrafter  # noqa: E402
from llama_ssp.speculative.engine import Engine  # noqa: E402
from llama_ssp.speculative.model_runner import ModelRunner  # noqa: E402
from llama_ssp.speculative.native import by_kernel  # noqa: E402
from llama_ssp.speculative.rng import CounterDraws  # noqa: E402
from llama_ssp.speculative.sampling import SamplingTransform, filtered  # noqa: E402
from llama_ssp.speculative.state import Prompt  # noqa: E402
from llama_ssp.speculative.verification import RULES  # noqa: E402

SPREAD = {"steep": 3.0, "flat": 0.3}  # standard deviations of logits
CONTROLS = {
    "plain": SamplingConfig(),
    "top-k 50": SamplingConfig(top_k=50),
    "top-p 0.95": SamplingConfig(top_p=0.95),
    "penalties": SamplingConfig(repetition_penalty=1.1, frequency_penalty=0.1),
}


class Instant:
    """A model with precomputed logits."""

    context, device = 4096, torch.device("cpu")

    def __init__(self, vocab: int, columns: int) -> None:
        self.vocab = vocab
        self._logits_1WV = (SPREAD["steep"] * random(columns, vocab)).bfloat16()[None]

    def new_cache(self, rows: int, capacity: int) -> RaggedCache:
        return RaggedCache(rows, capacity)

    def logits(self, token_BW: Tensor, feed: Feed, cache: RaggedCache, last_only: bool) -> Tensor:
        return self._logits_1WV[:, : feed.width]


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


def sorting_all(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Top-k and top-p as they are defined."""
    down = probs.sort(-1, descending=True).values
    least = down[..., top_k - 1 : top_k] if top_k else down
    if top_p < 1:
        least = torch.where(down.cumsum(-1) - down < top_p, down, 1).amin(-1, keepdim=True)
    kept = torch.where(probs >= least, probs, 0)
    return kept / kept.sum(-1, keepdim=True)


def main() -> None:
    own = {"ks": "1,4,8,12", "vocabs": "8192,32000,128256", "turns": "60", "threads": "1", "write": ""}
    own.update(argument.split("=", 1) for argument in sys.argv[1:])
    torch.set_num_threads(int(own["threads"]))
    turns = int(own["turns"])
    ks, vocabs = ([int(n) for n in own[name].split(",")] for name in ("ks", "vocabs"))
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
    if own["write"]:
        write(own["write"], text)


if __name__ == "__main__":
    main()
