"""Replay against real speculative runs: tokens a round of five pairs, at K = 1, 2, 4, 8, by both rules.

    python bench/replay.py [pairs=shipped,head,ngram,int4,gemma] [settings=plain,filtered,greedy] [ks=1,2,4,8]
                           [error=1] [least=256] [most=768] [new=32] [rows=64] [threads=1] [minutes=25]
                           [state=FILE.json] [write=FILE.md]

Of each pair and setting the target regularly writes texts, which are replayed: one pass of target and draft;
for a head and n-grams a pass for each start. Then the pair itself writes texts after the same prompts, a cell
for each K and rule. Texts are added, `rows` at a time, until there are `least` and the standard error of
tokens a round, over texts, is at most `error` per cent, or until there are `most`. Prompts are beginnings
that the target samples after the program's own sentences. Sampled texts of published models are in bf16, all
others in fp32.

The state file keeps the numbers of every text. The command stops after `minutes`, and goes on where it
stopped; it writes the results that are there.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from surroundings import report  # noqa: E402

from bench.real_model import GEMMA, REAL  # noqa: E402
from bench.words import Words  # noqa: E402
from llama_ssp.config import RunConf, Verification  # noqa: E402
from llama_ssp.config.compose import composed  # noqa: E402
from llama_ssp.distributed.comm import ALONE  # noqa: E402
from llama_ssp.pair.replay import TokenText, draft_laws, target_laws  # noqa: E402
from llama_ssp.pair.run import Run  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.placing.pairs import pair_specs  # noqa: E402
from llama_ssp.report.statistics import QUANTILE, ratio_of_sums  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402
from llama_ssp.speculative.replay import (  # noqa: E402
    counts_of,
    expected_rounds,
    kept_chances,
    ratios,
    windows,
)
from llama_ssp.speculative.state import Prompt  # noqa: E402
from llama_ssp.text.prompts import SENTENCES, SHORT  # noqa: E402

USUAL = ("placement=cpu", "engine=eager", "out=null")
PAIRS = {
    "shipped": ("model=demo", "draft=demo_draft"),
    "head": ("model=demo", "draft=demo_head"),
    "ngram": (f"model={REAL}", "draft=none", "speculation=ngram"),
    "int4": (f"model={REAL}", "draft=int4"),
    "gemma": (f"model={REAL}", f"draft={REAL}"),  # the target is replaced by Gemma
}
OWN_DTYPE = "ngram", "int4"  # pairs whose draft, if any, has the target's weights: its format is its own
SHIPPED = "shipped", "head"
SETTINGS = {
    "plain": ("sampling=plain",),
    "filtered": ("sampling=plain", "sampling.temperature=0.7", "sampling.top_p=0.9"),
    "greedy": ("sampling=greedy",),
}
IN_WORDS = {"plain": "T = 1", "filtered": "T = 0.7, top-p 0.9", "greedy": "greedy"}
SHORTEST, VARIED = 8, 24  # tokens that are sampled after a sentence to make a prompt: 8 to 31
PLACES = 10**6  # a seed for each cell and batch


@dataclass
class Asked(Words):
    """The command line."""

    pairs: str = ",".join(PAIRS)
    settings: str = ",".join(SETTINGS)
    ks: str = "1,2,4,8"
    error: float = 1.0
    least: int = 256
    most: int = 768
    new: int = 32
    rows: int = 64
    threads: int = 1
    minutes: float = 25.0
    state: str = "replay_state.json"
    write: str = ""


class Kept:
    """The numbers of texts by cell, in a file: [tokens, rounds] of each, and the seconds that they took."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._content: dict[str, Any] = {"cells": {}, "seconds": {}, "prompts": {}}
        if place.exists():
            self._content = json.loads(place.read_text(encoding="utf-8"))

    def cell(self, name: str) -> list[list[float]]:
        cell: list[list[float]] = self._content["cells"].setdefault(name, [])
        return cell

    def seconds(self, name: str) -> float:
        return float(self._content["seconds"].get(name, 0.0))

    @property
    def prompts(self) -> dict[str, list[list[int]]]:
        """By target, as token ids."""
        prompts: dict[str, list[list[int]]] = self._content["prompts"]
        return prompts

    def add(self, name: str, numbers: list[list[float]], seconds: float) -> None:
        self.cell(name).extend(numbers)
        self._content["seconds"][name] = self.seconds(name) + seconds

    def save(self) -> None:
        part = self._place.with_suffix(".part")
        part.write_text(json.dumps(self._content), encoding="utf-8")
        part.replace(self._place)


def run_of(pair: str, setting: str, asked: Asked, *words: str) -> RunConf:
    """Returns the pair's run, in fp32; published models sample in bf16, as people run them.

    Greedy texts need fp32: a pass over a whole text and steps of a few tokens round differently, which in
    bf16 can change which of two nearly equal tokens is the likeliest.
    """
    dtype = "fp32" if pair in SHIPPED or setting == "greedy" else "bf16"
    formats = [f"model.dtype={dtype}", *([] if pair in OWN_DTYPE else [f"draft.dtype={dtype}"])]
    own = [*USUAL, *PAIRS[pair], *formats, *SETTINGS[setting]]
    run = composed([*own, *words, f"task.max_new_tokens={asked.new}"])
    return replace(run, model=replace(GEMMA, dtype=run.model.dtype)) if pair == "gemma" else run


def opened(run: RunConf, rows: int, slots: int) -> PairSession:
    return PairSession(pair_specs(run, [], 1)[0]).load(rows, slots)


def prompts_of(pair: str, asked: Asked, kept: Kept) -> list[Prompt]:
    """As many prompts as there may be texts; those that were made before stay."""
    target = GEMMA.name if pair == "gemma" else PAIRS[pair][0]
    made = kept.prompts.setdefault(target, [])
    if len(made) < asked.most:
        run = run_of(pair, "plain", replace(asked, new=SHORTEST + VARIED), "speculation=none")
        session = opened(replace(run, draft=None), asked.rows, 128)
        beginnings = [session.tokens.encode(text) for text in (*SENTENCES, *SHORT)]
        while len(made) < asked.most:
            numbers = range(len(made), len(made) + asked.rows)
            begun = [Prompt(f"{n}", tuple(beginnings[n % len(beginnings)])) for n in numbers]
            for place, (tokens, _) in enumerate(written(session, begun, seed=len(made))):
                made.append([*begun[place].token_ids, *tokens[: SHORTEST + (7 * len(made)) % VARIED]])
        kept.save()
    return [Prompt(str(number), tuple(ids)) for number, ids in enumerate(made[: asked.most])]


def written(session: PairSession, prompts: list[Prompt], seed: int) -> Iterator[tuple[list[int], int]]:
    """Of each prompt, in order: the tokens that the pair writes after it, and its rounds."""
    text_run = Run(session.engine(seed), session.requests(prompts), session.run_settings(len(prompts)))
    rounds = defaultdict[int, int](int)
    for step in text_run.rounds():
        for row in step.rows:
            rounds[row.row] += 1
    for number in range(len(prompts)):
        yield text_run.replies[number].token_ids, rounds[number]


def standard_error(numbers: list[list[float]]) -> tuple[float, float]:
    """Tokens a round, and the standard error of its logarithm; 0 and infinity without texts."""
    if len(numbers) < 2:
        return 0.0, math.inf
    tokens, rounds = ([one[place] for one in numbers] for place in (0, 1))
    estimate = ratio_of_sums(over=[tokens], under=[rounds])
    return estimate.value, math.log(estimate.high / estimate.value) / QUANTILE


def is_enough(cells: list[list[list[float]]], asked: Asked) -> bool:
    fewest = min(map(len, cells))
    worst = max(standard_error(cell)[1] for cell in cells)
    return fewest >= asked.most or (fewest >= asked.least and worst <= asked.error / 100)


def replay_cells(pair: str, setting: str, ks: list[int]) -> dict[tuple[Verification, int], str]:
    return {(rule, k): f"replay {pair} {setting} {rule.value} {k}" for rule in Verification for k in ks}


def replay(pair: str, setting: str, asked: Asked, kept: Kept, until: float) -> bool:
    """Writes texts with the target alone, and replays them; whether there are enough."""
    ks = [int(k) for k in asked.ks.split(",")]
    names = replay_cells(pair, setting, ks)
    prompts = prompts_of(pair, asked, kept)
    longest = max(len(prompt.token_ids) for prompt in prompts) + asked.new
    run = run_of(pair, setting, asked)
    alone = replace(run, draft=None, speculation=replace(run.speculation, k=0, adaptive=False))
    session: PairSession | None = None
    spec = pair_specs(run, [], 1)[0]
    while not is_enough([kept.cell(name) for name in names.values()], asked):
        if time.monotonic() > until:
            return False
        session = session or opened(alone, asked.rows, longest)
        done = len(kept.cell(next(iter(names.values()))))
        # Several batches at a time, as each model is loaded for them.
        batch = prompts[done : done + 4 * asked.rows]
        texts = []
        for first in range(0, len(batch), asked.rows):
            part = batch[first : first + asked.rows]
            replies = written(session, part, seed=1)
            texts += [TokenText(one, tuple(ids)) for one, (ids, _) in zip(part, replies, strict=True)]

        began = time.perf_counter()
        target = target_laws(spec, session.tokens, texts, ALONE)
        drafts = draft_laws(spec, session.tokens, texts, max(ks), ALONE)
        numbers: dict[str, list[list[float]]] = {name: [] for name in names.values()}
        for of_target, of_draft, text in zip(target, drafts, texts, strict=True):
            target_T = np.array([law.logprob for law in of_target])
            ratio_TK = ratios(windows(target_T, max(ks)), of_draft.logprob_TK)
            for (rule, k), name in names.items():
                chance_TK = kept_chances(ratio_TK, rule)[:, :k]
                found = expected_rounds(chance_TK, counts_of(k, of_draft.reach_T, asked.new))
                numbers[name].append([len(text.token_ids), float(found.rounds)])
        seconds = (time.perf_counter() - began) / len(names)
        for name, of_cell in numbers.items():
            kept.add(name, of_cell, seconds)
        kept.save()
        print(f"replay {pair} {setting}: {done + len(batch)} texts", file=sys.stderr, flush=True)
    return True


def speculate(pair: str, setting: str, asked: Asked, kept: Kept, until: float) -> bool:
    """Writes texts with drafts, a cell for each K and rule; whether there are enough of each."""
    prompts = prompts_of(pair, asked, kept)
    longest = max(len(prompt.token_ids) for prompt in prompts) + asked.new
    for number, k in enumerate(int(k) for k in asked.ks.split(",")):
        for place, rule in enumerate(Verification):
            name = f"run {pair} {setting} {rule.value} {k}"
            session: PairSession | None = None
            while not is_enough([kept.cell(name)], asked):
                if time.monotonic() > until:
                    return False
                if session is None:
                    words = (f"speculation.k={k}", f"speculation.verification={rule.value}")
                    run = run_of(pair, setting, asked, *words)
                    session = opened(run, asked.rows, longest)
                done = len(kept.cell(name))
                batch = prompts[done : done + asked.rows]
                began = time.perf_counter()
                seed = PLACES * (2 * number + place + 2)
                found = [[float(len(ids)), float(rounds)] for ids, rounds in written(session, batch, seed)]
                kept.add(name, found, time.perf_counter() - began)
                kept.save()
            print(f"{name}: {len(kept.cell(name))} texts", file=sys.stderr, flush=True)
    return True


def rows_of(pair: str, setting: str, ks: list[int], kept: Kept) -> Iterator[list[str]]:
    """A row for each K and rule; of those of which nothing has been run, none."""
    for (rule, k), replay_name in replay_cells(pair, setting, ks).items():
        run_name = f"run {pair} {setting} {rule.value} {k}"
        if not kept.cell(run_name):
            continue
        here, here_error = standard_error(kept.cell(replay_name))
        there, there_error = standard_error(kept.cell(run_name))
        cells = [f"{pair}, {IN_WORDS[setting]}", rule.value, str(k)]
        for value, error, name in ((here, here_error, replay_name), (there, there_error, run_name)):
            texts = len(kept.cell(name))
            cells += [f"{value:.3f}", f"{100 * error:.2f}", str(texts)] if texts > 1 else ["-", "-", "-"]
        away = errors_apart(kept, replay_name, run_name)
        yield [*cells, "-" if away is None else f"{away:+.1f}"]


def errors_apart(kept: Kept, replay_name: str, run_name: str) -> float | None:
    """How many standard errors lie between a replay and runs; None where one of them has no texts yet."""
    here, here_error = standard_error(kept.cell(replay_name))
    there, there_error = standard_error(kept.cell(run_name))
    if not (here and there):
        return None
    whole = math.hypot(here_error, there_error)
    return math.log(here / there) / whole if whole else 0.0


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    torch.set_num_threads(asked.threads)
    until = time.monotonic() + 60 * asked.minutes
    kept = Kept(Path(asked.state))
    ks = [int(k) for k in asked.ks.split(",")]
    chosen = [(pair, setting) for pair in asked.pairs.split(",") for setting in asked.settings.split(",")]
    steps = [(step, pair, setting) for pair, setting in chosen for step in (replay, speculate)]
    is_whole = all(step(pair, setting, asked, kept, until) for step, pair, setting in steps)

    rows = [row for pair, setting in chosen for row in rows_of(pair, setting, ks, kept)]
    head = ["pair", "rule", "K", "replay", "error, %", "texts", "runs", "error, %", "texts", "apart"]
    apart = [
        errors_apart(kept, name, f"run {pair} {setting} {rule.value} {k}")
        for pair, setting in chosen
        for (rule, k), name in replay_cells(pair, setting, ks).items()
    ]
    known = [abs(value) for value in apart if value is not None]
    times = []
    for pair, setting in chosen:
        names = replay_cells(pair, setting, ks).values()
        reading = sum(kept.seconds(name) for name in names)
        writing = sum(kept.seconds(name.replace("replay", "run", 1)) for name in names)
        if writing:
            times.append([f"{pair}, {IN_WORDS[setting]}", f"{reading:.0f}", f"{writing:.0f}"])
    state = "" if is_whole else "; the others, or further texts of these, are still to be run"
    report(
        asked.write, "Acceptance by replay, against speculative runs",
        {"all": f"cpu, {asked.threads} threads, fp32; sampled texts of published models bf16"},
        f"Texts of up to {asked.new} tokens, {asked.rows} at a time. Tokens a round; `error` is the standard",
        "error over texts, `apart` the difference in standard errors of both.", "",
        f"{len(known)} of {len(apart)} cells have been run{state}.",
        f"{sum(value <= 2 for value in known)} of these are within two standard errors;",
        f"the largest difference is {max(known, default=0.0):.1f}.", "",
        "```", *aligned([head, *rows], words=2), "```", "",
        "Seconds of a replay, for all K and both rules, without writing the texts; and of the runs:", "",
        "```", *aligned([["pair", "replay", "runs"], *times], words=1), "```",
    )  # fmt: skip


if __name__ == "__main__":
    main()
