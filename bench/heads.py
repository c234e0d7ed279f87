"""The shipped head beside the shipped draft model, n-grams and regular decoding, in one interleaved run.

    python bench/heads.py [head=demo_head] [temperatures=0,0.5,1] [ks=2,4] [new=64] [prompts=24] [repeats=3]
                          [threads=2] [write=FILE.md]

Every repeat runs each contender once, in turn, on the same prompts; the first repeat does not count. Prompts
are openings of held-out documents: no shipped model has learned from these files. Times are decoding only, as
of bench/side_by_side.py.

Tokens a round are all tokens over all rounds, with the standard error over prompts. The head and the draft
model are also compared prompt by prompt, at the same K: what the head brings more, and how much longer it
takes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "launch")]

import torch  # noqa: E402
from demo.data import library_documents  # noqa: E402
from side_by_side import REGULAR, by_us  # noqa: E402
from surroundings import report  # noqa: E402
from words import Words  # noqa: E402

from llama_ssp.config.compose import composed  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.placing.pairs import pair_specs  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402
from llama_ssp.speculative.stats import Counts  # noqa: E402

USUAL = ["model=demo", "engine=compiled", "placement=cpu", "speculation.adaptive=true"]  # measures the costs
HEAD, DRAFT = "head", "draft model"
OPENING = 32  # tokens of a prompt
DATA_SEED = 0  # of the shipped models' data


@dataclass
class Asked(Words):
    """The command line."""

    head: str = "demo_head"
    temperatures: str = "0,0.5,1"
    ks: str = "2,4"
    new: int = 64
    prompts: int = 24
    repeats: int = 3
    threads: int = 2
    write: str = ""


@dataclass
class Contender:
    """A pair, a temperature and K; the times and tokens of its rounds."""

    name: str
    heat: float
    pair: PairSession
    k: int
    ms: list[float] = field(default_factory=list)  # a token, of each repeat
    counts: dict[str, Counts] = field(default_factory=dict)  # by prompt

    def play(self, texts: list[str], new: int, repeat: int) -> None:
        run = self.pair.run
        sampling = replace(run.sampling, temperature=self.heat)
        run = replace(run, sampling=sampling, speculation=replace(run.speculation, adaptive=False))
        spent = 0.0
        for number, text in enumerate(texts):
            seed = repeat * len(texts) + number
            ms, seen = by_us(self.pair, run, new, seed, self.k, [text])
            spent += ms
            if repeat:
                self.counts.setdefault(text, Counts()).merge(seen)
        if repeat:
            self.ms.append(spent / len(texts))

    def per_round(self) -> tuple[float, dict[str, float]]:
        """Tokens a round, and by how much each prompt moves that."""
        tokens = {text: each.committed for text, each in self.counts.items()}
        rounds = sum(each.row_rounds for each in self.counts.values())
        mean = sum(tokens.values()) / rounds
        return mean, {t: (n - mean * self.counts[t].row_rounds) / rounds for t, n in tokens.items()}

    def line(self, regular: Contender) -> list[str]:
        ratios = [theirs / ours for theirs, ours in zip(regular.ms, self.ms, strict=True)]
        whole = Counts()
        for each in self.counts.values():
            whole.merge(each)
        rate = whole.summary()["acceptance_rate"]
        mean, moved = self.per_round()
        return [
            f"{self.heat:g}", self.name, f"{median(self.ms):.2f}", f"{median(ratios):.2f}x",
            f"{min(ratios):.2f}..{max(ratios):.2f}", "" if rate is None else f"{rate:.2f}",
            f"{mean:.2f} +- {error(moved):.2f}",
        ]  # fmt: skip


def error(moved: dict[str, float]) -> float:
    """The standard error of a sum over prompts, given what each adds to it."""
    count = len(moved)
    squares = sum(value**2 for value in moved.values())
    return float((squares * count / (count - 1)) ** 0.5)


def compared(head: Contender, draft: Contender) -> list[str]:
    """What the head brings more than the draft model, of the same prompts, and how much longer it takes."""
    (own, own_moved), (other, other_moved) = head.per_round(), draft.per_round()
    more = f"{own - other:+.2f} +- {error({t: own_moved[t] - other_moved[t] for t in own_moved}):.2f}"
    longer = [ours / theirs for ours, theirs in zip(head.ms, draft.ms, strict=True)]
    times = f"{median(longer):.2f} ({min(longer):.2f}..{max(longer):.2f})"
    per_round = median(ratio * own / other for ratio in longer)
    return [f"{head.heat:g}", f"{head.k}", more, f"{per_round:.2f}", times]


def opened(words: list[str], new: int) -> PairSession:
    """The demo model with these drafts, ready."""
    return PairSession(pair_specs(composed([*USUAL, *words]), [], 1)[0]).load(1, 256 + new)


def openings(pair: PairSession, count: int) -> list[str]:
    """Beginnings of held-out documents."""
    held_out = library_documents(DATA_SEED).held_out
    found = [pair.tokens.encode(text[: 16 * OPENING]) for text in held_out]  # a token is shorter
    return [pair.tokens.decode(ids[:OPENING]) for ids in found if len(ids) > 2 * OPENING][:count]


def contenders(pairs: dict[str, PairSession], heat: float, asked: Asked) -> list[Contender]:
    """All contenders at a temperature, regular decoding first."""
    found = [Contender(REGULAR, heat, pairs[DRAFT], 0)]
    ks = [int(k) for k in asked.ks.split(",")]
    return found + [Contender(f"{name}, K = {k}", heat, pairs[name], k) for k in ks for name in pairs]


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    torch.set_num_threads(asked.threads)
    pairs = {
        HEAD: opened([f"draft={asked.head}"], asked.new),
        DRAFT: opened(["draft=demo_draft"], asked.new),
        "n-grams": opened(["draft=none", "speculation=ngram"], asked.new),
    }
    texts = openings(pairs[HEAD], asked.prompts)
    each = [contenders(pairs, float(heat), asked) for heat in asked.temperatures.split(",")]
    for repeat in range(asked.repeats + 1):
        for one in (one for own in each for one in own):
            one.play(texts, asked.new, repeat)
    write_tables(asked, pairs, each)


def write_tables(asked: Asked, pairs: dict[str, PairSession], each: list[list[Contender]]) -> None:
    """Prints and writes the results file."""
    shares = [
        f"{name} {pair.costs.rounds[1] / pair.costs.rounds[0] - 1:.3f}"
        for name, pair in pairs.items()
        if pair.costs
    ]
    rows = [["T", "contender", "ms/token", "over regular", "least..most", "accepted", "tokens/round"]]
    over = [["T", "K", "tokens a round", "time a round", "time a token"]]
    for own in each:
        rows += [one.line(own[0]) for one in own]
        drafts = {one.k: one for one in own if one.name.startswith(DRAFT)}
        heads = [one for one in own if one.name.startswith(HEAD)]
        over += [compared(one, drafts[one.k]) for one in heads]
    report(
        asked.write, "The shipped head beside the shipped draft model and n-grams",
        pairs[HEAD].models.devices,
        f"Batch 1, openings of {asked.prompts} held-out documents, {OPENING} tokens each, {asked.new} new "
        f"tokens, {asked.threads} threads, {asked.repeats} interleaved repeats. Ratios of times are medians, "
        "with the least and the most; +-: one standard error over prompts.",
        f"What a draft and its verification add to a target step: {', '.join(shares)}.",
        "", "The head over the draft model: what it brings more, and ratios of times (above 1: slower).",
        "", "```", *aligned(over, 2), "```", "", "All of them:", "", "```", *aligned(rows, 2), "```",
    )  # fmt: skip


if __name__ == "__main__":
    main()
