"""What the check of a machine finds: rows, of one rank and of all of them on one screen. No torch."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from llama_ssp.distributed.placement import spans

# note: runs work, slower or with less room than they could; fault: they would end, or a GPU's steps be eager.
Verdict = StrEnum("Verdict", ["ok", "note", "fault"])

UNEVEN = 0.8  # a rank with less than this share of the best rank's bandwidth is named
BANDWIDTH = "gb_s"  # the name of this figure, of a GPU


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found of one thing: its stable `name`, and what to do where it is not well.

    `found` holds each of the `figures` by its name in braces: ranks that differ in figures alone share a row.
    """

    name: str
    found: str
    verdict: Verdict = Verdict.ok
    fix: str = ""
    figures: dict[str, float] = field(default_factory=dict)


Findings = Iterator[Finding]  # of one check


@dataclass(frozen=True)
class Problem:
    """What may be wrong: whether it is, how bad that is, what to do, and what is added to what was found."""

    is_there: bool
    verdict: Verdict
    fix: str
    says: str = ""


def judged(
    name: str, found: str, problems: Sequence[Problem], figures: dict[str, float] | None = None
) -> Finding:
    """Returns what was found, with the first problem that is there."""
    for problem in problems:
        if problem.is_there:
            return Finding(
                name=name,
                found=found + problem.says,
                verdict=problem.verdict,
                fix=problem.fix,
                figures=figures or {},
            )
    return Finding(name=name, found=found, figures=figures or {})


@dataclass(frozen=True, kw_only=True)
class FindingOfRanks:
    """What was found on these ranks; of each figure the values, in the order of the ranks."""

    name: str
    verdict: Verdict
    found: str
    fix: str
    ranks: list[int]
    figures: dict[str, list[float]]

    def record(self) -> dict[str, Any]:
        """Returns the row under the names of the JSON interface."""
        return asdict(self) | {"verdict": self.verdict.value}


@dataclass(frozen=True)
class MachineCheck:
    """What the check of a machine found on all ranks, and in how many seconds."""

    rows: tuple[FindingOfRanks, ...]
    seconds: float

    @property
    def is_fit(self) -> bool:
        return all(row.verdict is not Verdict.fault for row in self.rows)

    def record(self) -> dict[str, Any]:
        """Returns the check under the names of the JSON interface."""
        return {
            "fit": self.is_fit,
            "says": sentence(self.rows),
            "seconds": self.seconds,
            "checks": [row.record() for row in self.rows],
        }


def merged(findings_by_rank: Sequence[Sequence[Finding]]) -> list[FindingOfRanks]:
    """Returns one row for what is the same on all ranks, else one for each kind, which names its ranks.

    Rows are in the order in which the ranks look at things; a rank need not look at all of them.
    """
    names = dict.fromkeys(finding.name for findings in findings_by_rank for finding in findings)
    rows = list[FindingOfRanks]()
    for name in names:
        by_rank = {
            rank: finding
            for rank, findings in enumerate(findings_by_rank)
            for finding in findings
            if finding.name == name
        }
        rows += _rows_of(_with_uneven_ranks(by_rank))
    return rows


def _with_uneven_ranks(by_rank: dict[int, Finding]) -> dict[int, Finding]:
    """Returns the findings; those of ranks with much less bandwidth than the best are notes."""
    values = [finding.figures[BANDWIDTH] for finding in by_rank.values() if BANDWIDTH in finding.figures]
    if len(values) < 2:
        return by_rank

    least = UNEVEN * max(values)
    result = dict(by_rank)
    for rank, finding in by_rank.items():
        if finding.verdict is Verdict.ok and finding.figures.get(BANDWIDTH, least) < least:
            result[rank] = replace(
                finding,
                verdict=Verdict.note,
                fix=f"other ranks have {_short(max(values))} GB/s: look for another program, or a lower "
                "clock or power limit, on this rank's device (nvidia-smi -q -d PERFORMANCE)",
            )
    return result


def _rows_of(by_rank: dict[int, Finding]) -> Iterator[FindingOfRanks]:
    """Yields a row for each kind of finding: those that differ in more than figures."""
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for rank, finding in by_rank.items():
        kinds.setdefault((finding.verdict.value, finding.found, finding.fix), []).append(rank)

    for ranks in kinds.values():
        first = by_rank[ranks[0]]
        figures = {name: [by_rank[rank].figures[name] for rank in ranks] for name in first.figures}
        found = first.found
        for name, values in figures.items():
            found = found.replace(f"{{{name}}}", span(values))
        if len(kinds) > 1:
            found = f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}: {found}"
        yield FindingOfRanks(
            name=first.name,
            verdict=first.verdict,
            found=found,
            fix=first.fix,
            ranks=ranks,
            figures=figures,
        )


def span(values: Sequence[float]) -> str:
    """Returns the least and the largest of the figures, in few digits; one where these are equal."""
    least = _short(min(values))
    largest = _short(max(values))
    return least if least == largest else f"{least} to {largest}"


def _short(value: float) -> str:
    """Returns a figure with three digits, or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def findings_of(text: str) -> list[Finding]:
    """Returns the findings that `text_of_findings` has written."""
    return [
        Finding(
            name=record["name"],
            found=record["found"],
            verdict=Verdict(record["verdict"]),
            fix=record["fix"],
            figures=record["figures"],
        )
        for record in json.loads(text)
    ]


def text_of_findings(findings: Sequence[Finding]) -> str:
    """Returns findings as JSON, for the other ranks."""
    return json.dumps([asdict(finding) for finding in findings])


def sentence(rows: Sequence[FindingOfRanks]) -> str:
    """Returns the verdict on the machine, in a sentence."""
    faults = list(dict.fromkeys(row.name for row in rows if row.verdict is Verdict.fault))
    notes = list(dict.fromkeys(row.name for row in rows if row.verdict is Verdict.note))
    if faults:
        return f"not fit: {_counted(len(faults), 'fault')} ({in_words(faults)})"
    return f"fit, with {_counted(len(notes), 'note')} ({in_words(notes)})" if notes else "fit"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def in_words(names: Sequence[str]) -> str:
    """Returns the names of rows for people."""
    return ", ".join(name.replace("_", " ") for name in names)
