"""Counters of the answers to a suite's questions, by category. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_ssp.report.statistics import ratio_of_sums
from llama_ssp.speculative.stats import Counts
from llama_ssp.text.prompts import TextPrompt
from llama_ssp.text.suites import subtask

OVERALL = "overall"
Answers = Mapping[str, list[Counts]]  # by question: what its turns took together, one a repeat


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


def _row(category: str, answers: list[tuple[list[Counts], list[Counts]]]) -> dict[str, Any]:
    plain, fast = (list(map(Counts.sum, side)) for side in zip(*answers, strict=True))
    (before_s, before), (after_s, after) = (
        ([counts.decode_s for counts in side], [counts.committed for counts in side])
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
