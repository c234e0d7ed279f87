"""Two statistical checks, and the samplers that they draw from.

**Two samples.** Are two sets of texts drawn from one distribution? A permutation test on tokens, n-grams and
beginnings: under one distribution the texts of a prompt may change their labels freely, so the share of
shuffles that look as different as the labels do is a false-alarm rate that holds at any size.

**First tokens.** The first token of a round against its exact probabilities, over many rounds without a
forward. A round's logits are recorded once. Drafts are then drawn anew from the recorded distributions, by
the engine's own draws, and the engine decides on the recorded logits, for prompts with other names: only the
random numbers differ. Whatever the later drafts are, the first committed token has the target's
probabilities at the first position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from llama_ssp.config import CertifyConf
from llama_ssp.pair.batches import TimedRun, require_numbers, texts_of
from llama_ssp.report.statistics import sum_band, uniform_band, uniform_distance
from llama_ssp.speculative.array_ops import Array
from llama_ssp.speculative.draft_length import DraftLength
from llama_ssp.speculative.drafters.siblings import with_siblings
from llama_ssp.speculative.engine import Engine, RankEngine
from llama_ssp.speculative.generate import Limits
from llama_ssp.speculative.rng import Purpose
from llama_ssp.speculative.siblings import CHAIN
from llama_ssp.speculative.state import Prompt, Proposal, State
from llama_ssp.speculative.stats import Counts
from llama_ssp.speculative.verification import DraftBlock, TreeRule
from llama_ssp.tasks.certify.decisions import Round, Watch
from llama_ssp.tasks.certify.law import spread
from llama_ssp.tasks.certify.verdict import Check, Outcome, control, judged

Texts = Sequence[Sequence[int]]
Table = NDArray[np.float32]
END = -1  # pads a text that ended before the others
RAREST = 5  # tokens or n-grams that are rarer than this in both sets together are pooled
SHUFFLES = 20_000
PART = 2048  # shuffles that are weighted at once
FAMILIES: dict[str, Callable[[list[int]], list[tuple[int, ...]]]] = {
    "tokens by position": lambda text: list(enumerate(text)),
    "n-grams": lambda text: [tuple(text[i : i + n]) for n in (2, 3) for i in range(len(text) - n + 1)],
    "beginnings": lambda text: [tuple(text[: i + 1]) for i in range(len(text))],
}
ROUNDS = 24  # first tokens for each text that is sampled: 24,576 at the default size
PREFIXES = 8  # recorded rounds that they are drawn from


class Sampler(Protocol):
    """Continues prompts. A black box, such as another library's `generate`, is judged by its texts alone."""

    name: str

    def texts(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
        """Returns the new tokens of each prompt, its end token included; each prompt draws for itself."""


@dataclass
class EngineSampler:
    """Samples with an engine, batch by batch, counted and timed; `watch` looks at its rounds, if given.

    `rows` is the number of rows of its largest batch.
    """

    name: str
    engine: RankEngine
    lookahead: Callable[[int], DraftLength]
    ends: frozenset[int]
    batch_size: int
    advance: Callable[[int], None] = lambda _: None
    watch: Watch | None = None
    counts: Counts = field(default_factory=Counts)
    rows: int = 0

    def __post_init__(self) -> None:
        self.engine.watch = self.watch.see if self.watch else None

    def texts(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
        result: list[list[int]] = []
        for first in range(0, len(prompts), self.batch_size):
            batch = list(prompts[first : first + self.batch_size])
            run = TimedRun(self.engine, batch, max_new_tokens, self.counts)
            state = run.state
            for _ in run.rounds(Limits(max_new_tokens, self.ends), self.lookahead(state.rows)):
                pass
            self.rows = max(self.rows, state.rows)
            require_numbers(*texts_of(state))
            result += [state.generated(row) for row in range(state.rows)]
            self.advance(state.rows)
        return result


class KeepsEveryDraft(TreeRule):
    """Keeps every draft, siblings or not: the wrong rule that the negative control samples with."""

    name = "keeps every draft"

    def accept_chances(self, block: DraftBlock) -> Array:
        column_K = torch.arange(block.k, device=block.count_B.device)
        return (column_K < block.count_B[:, None]).to(torch.float64)

    def tree_chances(self, block: DraftBlock) -> Array:
        chance_BKC = super().tree_chances(block)
        return torch.cat([self.accept_chances(block)[..., None], chance_BKC[..., 1:]], -1)


def check_samples(
    subject: Sampler, regular: Sampler, wrong: Sampler, prompts: Sequence[Prompt], task: CertifyConf,
    seed: int, level: float, leads: bool,
) -> list[Check]:  # fmt: skip
    """Compares the subject's texts with regular ones, and those of a wrong rule, which must differ from them.

    Every rank samples, the leader judges.
    """
    regular_texts, subject_texts, wrong_texts = (
        _drawn(sampler, word, prompts, task)
        for sampler, word in ((regular, "regular"), (subject, "subject"), (wrong, "wrong"))
    )
    if not leads:
        return []
    length, texts = task.max_new_tokens, task.samples * len(prompts)
    subject_test = compare(regular_texts, subject_texts, length, level, seed)
    wrong_test = compare(regular_texts, wrong_texts, length, level, seed)
    least = min(subject_test.p_values.values())
    figures = {
        "texts_each": texts,
        "tokens_a_text": length,
        "p_values": subject_test.p_values,
        "p_value_that_fails": subject_test.level,
    }
    fault = f"the texts differ from regular ones: p value {least:.2g}, {texts} texts each"
    right = f"no difference from regular texts: least p value {least:.2g} of {texts} texts each"
    against = f"from regular sampling (p value {min(wrong_test.p_values.values()):.2g})"
    return [
        judged("two samples", [(subject_test.rejects, fault)], right, figures),
        control(wrong.name, wrong_test.rejects, against, {"p_values": wrong_test.p_values}),
    ]


def _drawn(
    sampler: Sampler, word: str, prompts: Sequence[Prompt], task: CertifyConf
) -> list[list[list[int]]]:
    """Samples each prompt's texts, with random streams of their own: two samples must not share one."""
    numbers = range(task.samples)
    copies = [replace(prompt, id=f"{prompt.id} {word} {number}") for prompt in prompts for number in numbers]
    texts = sampler.texts(copies, task.max_new_tokens)
    return [texts[first : first + task.samples] for first in range(0, len(texts), task.samples)]


@dataclass(frozen=True)
class Comparison:
    """The p value of each family; a family rejects at the level."""

    p_values: dict[str, float]
    level: float

    @property
    def rejects(self) -> bool:
        return any(p <= self.level for p in self.p_values.values())


def compare(
    regular: Sequence[Texts], others: Sequence[Texts], length: int, false_alarm: float, seed: int,
    shuffles: int = SHUFFLES,
) -> Comparison:  # fmt: skip
    """Compares two sets of texts, each by prompt, of at most `length` tokens."""
    total = {name: np.zeros(shuffles + 1) for name in FAMILIES}
    random = np.random.Generator(np.random.Philox(seed))
    for ours, theirs in zip(regular, others, strict=True):
        rows = [[*text, *[END] * (length - len(text))] for text in (*ours, *theirs)]
        is_ours = np.arange(len(rows)) < len(ours)
        labels = np.concatenate([is_ours[None], random.permuted(np.tile(is_ours, (shuffles, 1)), axis=1)])
        for name, features in FAMILIES.items():
            total[name] += _statistic(_table([features(row) for row in rows]), labels)
    # The labels are among their own shuffles; rounding must not separate equal statistics.
    p_values = {name: float(np.mean(t >= t[0] * (1 - 1e-6))) for name, t in total.items()}
    return Comparison(p_values, false_alarm / len(FAMILIES))


def _table(features: list[list[tuple[int, ...]]]) -> Table:
    """Counts how often each text has each feature; rare features are pooled."""
    counts = [Counter(row) for row in features]
    total = sum(counts, Counter[tuple[int, ...]]())
    column = {name: number for number, name in enumerate(n for n, count in total.items() if count >= RAREST)}
    table = np.zeros((len(counts), len(column) + 1), dtype=np.float32)
    for row, count in enumerate(counts):
        for name, times in count.items():
            table[row, column.get(name, len(column))] += times
    return table


def _statistic(table: Table, labels: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Sums, for each labelling, (excess over its share)^2 / sqrt(count) over the features.

    Divided by the count itself, as in a chi-square test, many rare features would hide the frequent ones.
    """
    total, share = table.sum(0), labels[0].mean()
    weight = 1 / np.sqrt(np.maximum(total, 1))
    parts = [
        ((labels[first : first + PART].astype(np.float32) @ table - share * total) ** 2 @ weight)
        for first in range(0, len(labels), PART)
    ]
    return np.concatenate(parts).astype(np.float64)


class FirstTokens:
    """Pools first tokens over prefixes: their places in the target's distribution, and how many of them are
    favourites of the draft: tokens to which it gives more than the target does."""

    def __init__(self, seed: int) -> None:
        self._uniforms = np.random.Generator(np.random.Philox(seed ^ 2))
        self.rounds = self.impossible = 0
        self.places: list[float] = []
        self.excess = self.variance = 0.0  # of favourites

    def see(
        self, token_N: NDArray[np.int64], target_V: NDArray[np.float64], draft_V: NDArray[np.float64]
    ) -> None:
        """Adds first tokens of one prefix."""
        order = np.argsort(-target_V, kind="stable")
        before_V = np.empty_like(target_V)
        before_V[order] = np.cumsum(target_V[order]) - target_V[order]
        self.rounds += len(token_N)
        self.impossible += int((target_V[token_N] <= 0).sum())
        place_N = before_V[token_N] + target_V[token_N] * self._uniforms.random(len(token_N))
        self.places += np.clip(place_N, 0, 1).tolist()
        favourite_V = draft_V > target_V
        share = min(1.0, float(target_V[favourite_V].sum()))
        self.excess += float(favourite_V[token_N].sum()) - share * len(token_N)
        self.variance += share * (1 - share) * len(token_N)


def first_tokens(engine: Engine, rounds: list[Round], seed: int, count: int, rows: int) -> FirstTokens:
    """Draws and decides `count` rounds, `rows` at a time, from a few of the recorded ones."""
    result = FirstTokens(seed)
    chosen = spread(rounds, PREFIXES)
    for number, seen in enumerate(chosen):
        each = -(-count // len(chosen))
        tokens: list[int] = []
        while len(tokens) < each:
            names = [f"first {number} {len(tokens) + row}" for row in range(min(rows, each - len(tokens)))]
            tokens += _decided_anew(engine, seen, names)
        result.see(np.asarray(tokens), seen.target_WV[0].numpy(), seen.draft_KV[0].numpy())
    return result


@torch.inference_mode()
def _decided_anew(engine: Engine, seen: Round, names: list[str]) -> list[int]:
    """Returns the first token of a round of each of these prompts."""
    counts, device = (seen.count,) * len(names), engine.target.model.device
    state = State([Prompt(name, seen.prefix(0)) for name in names], len(seen.text) + 1, device)
    state.prompt_lengths = [seen.prompt_length] * len(names)
    draft_BKV = seen.draft_KV.to(device).expand(len(names), -1, -1)
    drafted = []
    for offset in range(seen.count):
        drafted.append(engine.draws.categorical(draft_BKV[:, offset], state.slot(Purpose.DRAFT, offset)))
        state.write_draft(drafted[-1], offset, counts)
    proposal = Proposal(torch.stack(drafted, 1), draft_BKV, counts)
    logit_WV = seen.logit_WV
    if seen.siblings:
        proposal = with_siblings(proposal, state, engine.draws, [len(seen.siblings[0])] * len(names))
        assert proposal.siblings is not None
        main, aside = iter(logit_WV), (one.logit_WV[0] for one in chain(*seen.behind))
        numbers = proposal.siblings.numbers[0]
        logit_WV = torch.stack([next(main if number == CHAIN else aside) for number in numbers])
    result = engine.judge(state, proposal, logit_WV.to(device).expand(len(names), -1, -1))
    return [result.tokens(row)[0] for row in range(len(names))]


def check_first(seen: FirstTokens, level: float) -> Check:
    """Checks that first tokens have their exact probabilities."""
    figures: dict[str, object] = {"rounds": seen.rounds, "tokens_impossible": seen.impossible}
    if not seen.rounds:
        return Check("first token", Outcome.blind, "nothing was drafted", figures)
    distance, band = uniform_distance(seen.places), uniform_band(seen.rounds, level / 2)
    excess, most = seen.excess / seen.rounds, sum_band(seen.variance, level / 2) / seen.rounds
    figures |= {
        "largest_distance": distance,
        "largest_distance_by_chance": band,
        "excess_of_favourites": excess,
        "excess_of_favourites_by_chance": most,
    }
    impossible = f"{seen.impossible} of {seen.rounds} first tokens have probability 0"
    elsewhere = (
        f"{distance:.1%} of {seen.rounds} first tokens lie elsewhere than their exact probabilities say"
    )
    favours = f"first tokens are {excess:.1%} too often those to which the draft gives more than the target"
    faults = [(seen.impossible, impossible), (abs(excess) > most, favours), (distance > band, elsewhere)]
    right = f"{seen.rounds} first tokens have their exact probabilities within {distance:.1%}"
    right += f"; {most:.1%} too many of the draft's favourites would show"
    return judged("first token", faults, right, figures)
