"""Reads what a run says was accepted of a pair's drafts, for plans (report/accepted.py writes it). No
torch."""

import json
import logging
from itertools import count
from pathlib import Path
from typing import Any

from llama_ssp.config import RunConf, home_expanded
from llama_ssp.errors import DataError
from llama_ssp.speculative.draft_length import AcceptanceCurve
from llama_ssp.text.prompts import reading

log = logging.getLogger(__name__)

KEY = "task.acceptance_from"
SUMMARY = "summary.json"


def curve_of(run: RunConf, name: str, k: int | None) -> AcceptanceCurve:
    """Returns what the run in the folder `name` says of this run's pair, for K up to `k` at least.

    Raises DataError, or StorageError.
    """
    path = home_expanded(name) / SUMMARY
    with reading(KEY, path):
        text = path.read_bytes()
    try:
        summary = json.loads(text)
        entries = list[dict[str, Any]](summary["acceptance"])
        known = {(entry["drafter"], entry["rule"]): entry["curve"] for entry in entries}
        drawn_by = {(entry["drafter"], entry["rule"]): entry.get("sampling") or {} for entry in entries}
        tops = {(entry["drafter"], entry["rule"]): entry.get("draft_top") for entry in entries}
        target = summary["target"]
        is_theirs = (summary.get("replay") or {}).get("drawn_from_target")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _useless(path, "a run that says nothing of drafts") from None

    rule = run.speculation.verification.value
    if target != run.model.name or (run.drafter_name, rule) not in known:
        pairs = ", ".join(f"{target}/{drafter} by the rule {of_rule}" for drafter, of_rule in known)
        raise DataError(
            "the run is of another pair",
            where=path,
            found=pairs or "no drafts",
            allowed=f"{run.model.name}/{run.drafter_name} by the rule {rule}",
            fix="plan that pair, or measure this one: llama-ssp measure replay=TEXTS drafts=[NAME]",
        )
    if is_theirs is False:
        raise _useless(path, "texts that were not drawn from this target under these settings")
    used = drawn_by[run.drafter_name, rule]
    for setting, value in run.sampling.named.items():
        if setting in used and used[setting] != value:
            log.warning(
                "what is accepted was measured with %s=%s, and this plan is of %s",
                setting,
                used[setting],
                value,
            )
    top = tops[run.drafter_name, rule]
    if top != run.speculation.draft_top:
        log.warning(
            "what is accepted was measured with speculation.draft_top=%s, and this plan is of %s",
            "null" if top is None else top,
            "null" if run.speculation.draft_top is None else run.speculation.draft_top,
        )
    curve = AcceptanceCurve((1.0, *_tokens(known[run.drafter_name, rule], path)), name)
    if k is not None and k > curve.k_max:
        raise DataError(
            "the run says nothing of so many drafts",
            where=path,
            found=f"speculation.k={k}",
            allowed=f"0..{curve.k_max}",
            fix=f"measure them: llama-ssp measure replay=TEXTS ks=[{k}]",
        )
    return curve


def _tokens(points: Any, path: Path) -> list[float]:
    """Returns the tokens a round at K = 1, 2, ... Raises DataError."""
    if not isinstance(points, list) or not points:
        raise _useless(path, "no curve")
    tokens = list[float]()
    for k, point in zip(count(1), points, strict=False):
        value = point.get("tokens_per_round") if isinstance(point, dict) else None
        if not isinstance(value, int | float) or point.get("k") != k or not 1 <= value <= k + 1:
            raise _useless(path, f"at K = {k}: {point}")
        tokens.append(float(value))
    return tokens


def _useless(path: Path, found: str) -> DataError:
    return DataError(
        "there is no acceptance to plan with",
        where=path,
        found=found,
        allowed="the folder of a run of measure replay=TEXTS, generate or batch that drafted",
        fix="name one, or give a number: acceptance=0.8",
    )
