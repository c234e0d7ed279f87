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
    """Returns a row for each category of the questions that both have answered, then one for all of them.

    Intervals are over questions: 95 % for other questions of the same kind.
    """
    answered = [question for question in questions if question.id in regular and question.id in pair]
    categories = {question.category for question in questions}
    groups: dict[str, list[str]] = {}
    for question in answered:
        groups.setdefault(subtask(question.category, categories), []).append(question.id)
    if len(groups) > 1:
        groups[OVERALL] = [question.id for question in answered]
    return [_row(name, [(regular[key], pair[key]) for key in keys]) for name, keys in groups.items()]


def _row(category: str, answers: list[tuple[list[Answer], list[Answer]]]) -> dict[str, Any]:
    plain, fast = (
        [Counts.sum(answer.counts for answer in repeats) for repeats in side]
        for side in zip(*answers, strict=True)
    )
    (before_s, before), (after_s, after) = (
        ([counts.decode_s for counts in side], [counts.committed.total() for counts in side])
        for side in (plain, fast)
    )
    kept = ("acceptance_rate", "acceptance_by_position", "tokens_committed", "ms_per_token")
    return {
        "category": category,
        "questions": len(answers),
        **ratio_of_sums([after], [[counts.row_rounds for counts in fast]]).figures("tokens_per_round"),
        **ratio_of_sums([before_s, after], [after_s, before]).figures("speedup"),
        **{name: value for name, value in Counts.sum(fast).figures().items() if name in kept},
    }


def answer_lines(model_id: str, questions: Sequence[TextPrompt], answers: Answers) -> str:
    """Returns lines of Spec-Bench's answer files, which its speed.py scores; a repeat is a choice."""
    kept = ("turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths")
    lines = []
    for question in questions:
        if question.id in answers:
            record = {
                "question_id": int(question.id) if question.id.isdecimal() else question.id,
                "category": question.category,
                "answer_id": hashlib.sha256(f"{model_id} {question.id}".encode()).hexdigest()[:22],
                "model_id": model_id,
                "choices": [
                    {"index": n, **{name: getattr(answer, name) for name in kept}}
                    for n, answer in enumerate(answers[question.id])
                ],
                "tstamp": time.time(),
            }
            lines.append(json.dumps(record) + "\n")
    return "".join(lines)
