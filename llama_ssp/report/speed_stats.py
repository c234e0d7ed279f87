"""The figures of task=measure: medians with intervals, ratios, and what theory predicts. No torch.

A ratio is taken within one repeat, in which every contender has a turn on the same prompts; then its median
is taken. So a drift of the machine's speed favours no contender.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from statistics import median
from typing import Any

from llama_ssp.report.statistics import Estimate, median_coverage, median_of, percentiles, ratio_of_sums
from llama_ssp.speculative.draft_length import tokens_per_round
from llama_ssp.speculative.stats import Counts, ratio
from llama_ssp.text.prompts import TextPrompt

PERCENTILES = (50, 90, 99)
# MT-bench's categories, which are one of Spec-Bench's subtasks.
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")

Answers = Mapping[str, list[Counts]]
"""By a question's id: for each repeat, what all turns of the question took together."""


@dataclass
class Sample:
    """One contender's turn: all prompts once. task=measure fills in waits and overlaps as it goes.

    Clocks end when the device has: `counts.decode_s` is the time of all rounds, without prefill, and its
    tokens are all that the rounds brought, the first one too.
    """

    first_token_ms: list[float] = field(default_factory=list)  # of each batch, prefill included
    inter_token_ms: list[float] = field(default_factory=list)  # of each token after its row's first round
    counts: Counts = field(default_factory=Counts)
    overlaps: list[dict[str, Any]] = field(
        default_factory=list
    )  # of each batch, with a draft on its own ranks

    @property
    def tokens(self) -> int:
        return self.counts.committed

    @property
    def ms_per_token(self) -> float:
        return 1000 * self.counts.decode_s / self.tokens

    def take(self, first_token_s: float, counts: Counts) -> None:
        """Adds a batch's time to the first token, and its counters."""
        self.first_token_ms.append(1000 * first_token_s)
        self.counts.merge(counts)


@dataclass
class Record:
    """All turns of one contender."""

    name: str
    k: int | None  # 0: one model alone; None: adaptive
    samples: list[Sample] = field(default_factory=list)  # one for each repeat
    split: dict[str, float] = field(default_factory=dict)  # ms/token by part of a round, of one more turn

    def figures(self) -> dict[str, Any]:
        """Returns the figures under the names of the JSON interface; none before the first turn has ended."""
        if not self.samples:
            return {}

        by_repeat = [sample.ms_per_token for sample in self.samples]
        firsts = [median(sample.first_token_ms) for sample in self.samples]
        waits = [ms for sample in self.samples for ms in sample.inter_token_ms]
        levels = zip(PERCENTILES, percentiles(waits, PERCENTILES), strict=True)
        overlaps = [batch for sample in self.samples for batch in sample.overlaps]
        return {
            **interval("ms_per_token", by_repeat),
            **interval("tokens_per_s", [1000 / ms for ms in by_repeat]),
            "ms_per_token_by_repeat": by_repeat,
            **interval("time_to_first_token_ms", firsts),
            **{f"inter_token_ms_p{level}": wait for level, wait in levels},
            "time_split_ms_per_token": self.split,
            "overlap": overlap_of(overlaps),
            "repeats": len(self.samples),
            **Counts.sum(sample.counts for sample in self.samples).summary(),
        }


@dataclass
class Speeds:
    """All contenders: the target, the draft if it is a model, the pair at each K."""

    target: Record
    draft: Record | None
    pair: list[Record]

    def figures(self) -> dict[str, Any]:
        """Returns the figures of all, right at any moment."""
        costs = self._within(self.draft, self.target) if self.draft else []
        cost_ratio = median(costs) if costs else None
        counts = [sample.counts for record in self.pair for sample in record.samples]
        accepted = sum(turn.accepted.total() for turn in counts)
        # The likeliest acceptance of a draft, if all were independent and equal: over all K, adaptive K too.
        alpha = ratio(accepted, sum(turn.decided for turn in counts))

        pair = [
            {
                "k": record.k,
                **interval("speedup", self._within(self.target, record)),
                "predicted_speedup": predicted(alpha, cost_ratio, record.k),
                **record.figures(),
            }
            for record in self.pair
        ]
        fastest = max(pair, key=lambda row: row["speedup"] or 0.0, default=None)  # None: no turn yet
        best = None
        if fastest and fastest["speedup"]:
            best = {"k": fastest["k"], "speedup": fastest["speedup"]}

        repeats = len(self.target.samples)
        kind_of_interval = "one repeat: there are no intervals"
        if repeats > 1:
            kind_of_interval = f"medians of {repeats} interleaved repeats, intervals by order statistics"
        return {
            "target_alone": self.target.figures(),
            "draft_alone": self.draft.figures() if self.draft else None,
            "pair": pair,
            **interval("cost_ratio", costs),
            "alpha": alpha,
            "best": best,
            "interval": kind_of_interval,
            "interval_coverage": median_coverage(repeats) if repeats else None,
        }

    @staticmethod
    def _within(numerator: Record, denominator: Record) -> list[float]:
        """Returns ratios of ms/token, repeat by repeat.

        draft / target is the cost ratio of a draft, target / pair is the speedup.
        """
        repeats = zip(numerator.samples, denominator.samples, strict=False)  # one may have had a turn more
        return [above.ms_per_token / below.ms_per_token for above, below in repeats]


def interval(name: str, values: list[float]) -> dict[str, float | None]:
    """Returns a median and its interval as three figures; one value has no interval."""
    if len(values) < 2:
        value = values[0] if values else nan
        return Estimate(value, low=nan, high=nan).figures(name)
    return median_of(values).figures(name)


def overlap_of(batches: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns what came of a draft on ranks of its own, all batches taken together; None without one."""
    if not batches:
        return None
    summed = [name for name in batches[0] if name not in ("ready_share", "draft_lost")]
    sums = {name: sum(batch[name] for batch in batches) for name in summed}
    reasons = [batch["draft_lost"] for batch in batches if batch["draft_lost"]]
    return {
        **sums,
        "ready_share": ratio(sums["rows_ready"], sums["rows_asked"]),
        "draft_lost": reasons[0] if reasons else None,
    }


def predicted(alpha: float | None, cost_ratio: float | None, k: int | None) -> float | None:
    """Returns expected tokens over expected time of a round: Leviathan et al., theorem 3.8."""
    if alpha is None or cost_ratio is None or k is None:
        return None
    return tokens_per_round(alpha, k) / (k * cost_ratio + 1)


def by_category(questions: Sequence[TextPrompt], regular: Answers, pair: Answers) -> list[dict[str, Any]]:
    """Returns a row for each category, of the questions that both have answered.

    `regular` is the target alone. Where there are several categories, a last row is of all of them. Intervals
    are over questions, at 95 %: what other questions of the same kind would give. Spec-Bench takes MT-bench's
    categories as one; a file of MT-bench alone keeps them apart.
    """
    answered = [question for question in questions if question.id in regular and question.id in pair]
    joins_mt_bench = any(question.category not in MT_BENCH for question in questions)
    groups: dict[str, list[str]] = {}  # ids by category
    for question in answered:
        category = question.category
        if joins_mt_bench and category in MT_BENCH:
            category = "mt_bench"
        groups.setdefault(category, []).append(question.id)
    if len(groups) > 1:
        groups["overall"] = [question.id for question in answered]

    rows = []
    for category, members in groups.items():
        plain = [Counts.sum(regular[question]) for question in members]
        fast = [Counts.sum(pair[question]) for question in members]
        rows.append(_row(category, plain, fast))
    return rows


def _row(category: str, plain: list[Counts], fast: list[Counts]) -> dict[str, Any]:
    """Returns a category's figures.

    `plain` (the target alone) and `fast` (the pair) hold what each question took in all its repeats, in the
    same order.
    """
    plain_s = [counts.decode_s for counts in plain]
    plain_tokens = [counts.committed for counts in plain]
    fast_s = [counts.decode_s for counts in fast]
    fast_tokens = [counts.committed for counts in fast]
    rounds = [counts.row_rounds for counts in fast]

    # speedup = (sum plain_s / sum plain_tokens) / (sum fast_s / sum fast_tokens), sums over questions.
    speedup = ratio_of_sums(over=[plain_s, fast_tokens], under=[fast_s, plain_tokens])
    counted = Counts.sum(fast).figures()
    kept = ("acceptance_rate", "acceptance_by_position", "tokens_committed", "ms_per_token")
    return {
        "category": category,
        "questions": len(plain),
        **ratio_of_sums(over=[fast_tokens], under=[rounds]).figures("tokens_per_round"),
        **speedup.figures("speedup"),
        **{name: figure for name, figure in counted.items() if name in kept},
    }
