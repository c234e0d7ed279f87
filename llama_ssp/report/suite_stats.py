"""Answers to the questions of a suite: figures by category, and Spec-Bench's answer format. No torch."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_ssp.report.statistics import ratio_of_sums
from llama_ssp.speculative.stats import Counts
from llama_ssp.text.prompts import TextPrompt
from llama_ssp.text.suites import subtask

OVERALL = "overall"


@dataclass
class Answer:
    """One contender's answer to one question: what its turns took. Lists have an entry a turn."""

    turns: list[str] = field(default_factory=list)
    decoding_steps: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    wall_time: list[float] = field(default_factory=list)  # with prefill, in seconds
    accept_lengths: list[int] = field(default_factory=list)  # tokens of every round
    counts: Counts = field(default_factory=Counts)

    def take(self, text: str, seconds: float, counts: Counts, accepted: list[int]) -> None:
        """Adds a turn."""
        self.turns.append(text)
        self.decoding_steps.append(len(accepted))
        self.new_tokens.append(sum(accepted))
        self.wall_time.append(seconds)
        self.accept_lengths += accepted
        self.counts.merge(counts)


Answers = Mapping[str, list[Answer]]  # by question, one a repeat


def by_category(questions: Sequence[TextPrompt], regular: Answers, pair: Answers) -> list[dict[str, Any]]:
    """A row for each category of the questions that both have answered, then one for all of them.

    Intervals are over questions: 95 % for other questions of the same kind.
    """
    answered = [one for one in questions if one.id in regular and one.id in pair]
    every = {one.category for one in questions}
    groups: dict[str, list[str]] = {}
    for one in answered:
        groups.setdefault(subtask(one.category, every), []).append(one.id)
    if len(groups) > 1:
        groups[OVERALL] = [one.id for one in answered]
    return [_row(name, [(regular[one], pair[one]) for one in ids]) for name, ids in groups.items()]


def _row(category: str, answers: list[tuple[list[Answer], list[Answer]]]) -> dict[str, Any]:
    plain, fast = (
        [Counts.sum(answer.counts for answer in repeats) for repeats in side]
        for side in zip(*answers, strict=True)
    )
    tokens, rounds = [one.committed.total() for one in fast], [one.row_rounds for one in fast]
    before, after = [one.decode_s for one in plain], [one.decode_s for one in fast]
    figures = {
        "tokens_per_round": ratio_of_sums([tokens], [rounds]),
        "speedup": ratio_of_sums([before, tokens], [after, [one.committed.total() for one in plain]]),
    }
    row: dict[str, Any] = {"category": category, "questions": len(answers)}
    for name, estimate in figures.items():
        row |= estimate.figures(name)
    kept = ("acceptance_rate", "acceptance_by_position", "tokens_committed", "ms_per_token")
    return row | {name: value for name, value in Counts.sum(fast).figures().items() if name in kept}


def answer_lines(model_id: str, questions: Sequence[TextPrompt], answers: Answers) -> str:
    """The answers as lines of Spec-Bench's answer files; a repeat is a choice. Its speed.py scores them."""
    kept = ("turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths")
    lines = []
    for one in questions:
        if one.id in answers:
            record = {
                "question_id": int(one.id) if one.id.isdecimal() else one.id,
                "category": one.category,
                "answer_id": hashlib.sha256(f"{model_id} {one.id}".encode()).hexdigest()[:22],
                "model_id": model_id,
                "choices": [
                    {"index": n, **{name: getattr(answer, name) for name in kept}}
                    for n, answer in enumerate(answers[one.id])
                ],
                "tstamp": time.time(),
            }
            lines.append(json.dumps(record) + "\n")
    return "".join(lines)
