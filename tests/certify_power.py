"""How small a fault task=certify sees: its checks of rounds on recorded rounds of the pair that ships.

    python -m tests.certify_power [repeats=100] [write=FILE.md]

A run of the default size with sampling=nucleus is stopped once its 64 rounds are recorded. Faults of several
sizes are then put into what the checks look at, drawn anew each repeat, as much as a default run has of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from bench.surroundings import surroundings, write
from llama_ssp.config import CertifyConf
from llama_ssp.speculative.rng import heat, inverse_cdf
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.verification import RULES, DraftBlock
from llama_ssp.tasks.certify import task as certify
from llama_ssp.tasks.certify.checks import RANDOM_CHECKS
from llama_ssp.tasks.certify.first_tokens import PREFIXES, ROUNDS, FirstTokens, check_first
from llama_ssp.tasks.certify.plain_filters import SLACK, distance
from llama_ssp.tasks.certify.recorder import Round
from llama_ssp.tasks.certify.replay import Decisions, check_numbers
from llama_ssp.tasks.certify.verdict import Outcome
from llama_ssp.text.prompts import SHORT
from tests.certify_faults import certified

DECISIONS = 28_276  # of a default run: 3700 of texts, 24,576 of first tokens
LEVEL = CertifyConf().false_alarm / RANDOM_CHECKS


def recorded(*overrides: str) -> tuple[list[Round], SamplingTransform]:
    """The rounds that a default run records, and the controls they were drawn with."""
    found: list[Any] = []

    def kept(rounds: list[Round], transform: SamplingTransform) -> None:
        found.extend((list(rounds), transform))
        raise KeyboardInterrupt

    with patch.object(certify, "check_filters", kept):
        certified("seed=1", *overrides)
    return found[0], found[1]


def block_of(rounds: list[Round], drafted_BK: torch.Tensor | None = None) -> DraftBlock:
    """Rounds of one length as a block, with other drafts if they are given."""
    own = torch.tensor([seen.drafted for seen in rounds])
    target_BWV, draft_BKV = (
        torch.stack([seen.target_WV for seen in rounds]), torch.stack([seen.draft_KV for seen in rounds])
    )  # fmt: skip
    count_B = torch.full((len(rounds),), own.shape[1])
    return DraftBlock(target_BWV, draft_BKV, own if drafted_BK is None else drafted_BK, count_B)


def filters(rounds: list[Round], transform: SamplingTransform) -> Iterator[tuple[str, str, str]]:
    for off in (0.01, 0.001, 0.0003):
        other = SamplingTransform(
            replace(transform.controls, top_p=transform.controls.top_p - off),
            transform.end_ids,
            transform.vocab,
        )
        gaps = [
            distance(r.logit_WV[at], r.target_WV[at], other, r, at) for r in rounds for at in range(r.count)
        ]
        yield (
            "filters",
            f"top-p {off:g} wider",
            f"at {sum(gap > SLACK for gap in gaps)} of {len(gaps)} positions",
        )


def decisions(block: DraftBlock, random: np.random.Generator, repeats: int) -> Iterator[tuple[str, str, str]]:
    """The share of decisions that are others, and the chance that a run has one."""
    rule = RULES["block"]
    chance_BK = rule.accept_chances(block)
    for lenience in (0.02, 0.005, 0.002, 0.001):
        coins = [torch.from_numpy(random.random(chance_BK.shape)) for _ in range(repeats)]
        more = [rule.accepted(c < (1 + lenience) * chance_BK) != rule.accepted(c < chance_BK) for c in coins]
        share = float(torch.stack(more).double().mean())
        seen = 1 - (1 - share) ** DECISIONS
        yield (
            "decisions",
            f"acceptance {lenience:.1%} too lenient",
            f"{share:.2%} of decisions, {seen:.0%} of runs",
        )


def numbers(rounds: list[Round], random: np.random.Generator, repeats: int) -> Iterator[tuple[str, str, str]]:
    """A share of all coins are the uniforms of their drafts."""
    like = block_of(rounds)
    shape, clocks = like.drafted_BK.shape, 2 * heat(like.target_BWV.shape[-1])
    for share in (0.0, 0.1, 0.2, 0.3, 1.0):
        failed = 0
        for repeat in range(repeats):
            seen = Decisions(RULES["block"], repeat)
            for _ in range(DECISIONS // len(rounds)):
                uniform_BK = torch.from_numpy(random.random(shape))
                drafted = [inverse_cdf(like.draft_BKV[:, i], uniform_BK[:, i, None]) for i in range(shape[1])]
                coin_BK = np.where(random.random(shape) < share, uniform_BK.numpy(), random.random(shape))
                exponentials = random.exponential(size=(len(rounds), clocks))
                block = block_of(rounds, torch.stack(drafted, 1))
                seen._collect(list(range(len(rounds))), block, coin_BK[..., None], exponentials)
            failed += check_numbers(seen, LEVEL).outcome is Outcome.failed
        yield "numbers", f"{share:.0%} of coins are their drafts' uniforms", f"{failed} of {repeats} runs"


def first(rounds: list[Round], random: np.random.Generator, repeats: int) -> Iterator[tuple[str, str, str]]:
    """First tokens of another distribution, at total variation `off`, or as far as there is room."""
    each = ROUNDS * CertifyConf().samples * len(SHORT) // PREFIXES
    for towards in ("the draft", "one token that is not the likeliest"):
        for off in (0.0, 0.01, 0.015, 0.02, 0.03):
            failed = 0
            for repeat in range(repeats):
                seen = FirstTokens(repeat)
                for number in random.choice(len(rounds), PREFIXES, replace=False):
                    target, draft = rounds[number].target_WV[0].numpy(), rounds[number].draft_KV[0].numpy()
                    aim = draft if towards == "the draft" else np.eye(len(target))[np.argsort(-target)[1]]
                    far = np.abs(target - aim).sum() / 2
                    wrong = target + min(1.0, off / far) * (aim - target)
                    seen.see(random.choice(len(target), each, p=wrong / wrong.sum()), target, draft)
                failed += check_first(seen, LEVEL).outcome is Outcome.failed
            yield "first token", f"total variation {off:g} towards {towards}", f"{failed} of {repeats} runs"


def main() -> None:
    torch.set_num_threads(1)
    asked = dict(word.split("=", 1) for word in sys.argv[1:])
    repeats, random = int(asked.get("repeats", "100")), np.random.default_rng(1)
    head = ["| check | fault | seen in |", "|---|---|---|"]
    print(*head, sep="\n", flush=True)
    rounds, transform = recorded("sampling=nucleus")
    plain, _ = recorded()
    alike = [seen for seen in plain if seen.count == max(one.count for one in plain)]
    lines = []
    for found in (
        filters(rounds, transform),
        decisions(block_of(alike), random, repeats),
        first(alike, random, repeats),
        numbers(alike[:32], random, max(1, repeats // 20)),
    ):
        for row in found:
            lines.append(f"| {' | '.join(row)} |")
            print(lines[-1], flush=True)
    if "write" in asked:
        about = surroundings({"device": "cpu, one thread"})
        write(
            asked["write"],
            "\n".join(["# certify: how small a fault it sees", "", *about, "", *head, *lines, ""]),
        )


if __name__ == "__main__":
    main()
