"""What each round drafted, accepted and drew, in a line for people. No torch."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from llama_ssp.report.live_view import style_of

REJECTED = "red strike"
EXPLAINED = (
    "prompt at the place of the round's first token: 'accepted' and ~'rejected'~ drafts, each with its "
    "siblings in brackets (how many drafts were accepted), sibling taken in a draft's place, and the "
    "target's token: corrected after a rejected draft, bonus after the last draft, sampled without drafts"
)


def trace_line(record: dict[str, Any], is_plain: bool = False) -> Text:
    """A round of rounds.jsonl; `is_plain` marks without colours."""
    line = Text(f"{record['id']} at {record['position']}: ")
    accepted, origin = record["accepted"], record["last_origin"]
    for number, text in enumerate(record["drafted_text"]):
        is_kept = number < accepted
        word, style = (f"{text!r}", style_of("drafted", is_plain)) if is_kept else (f"~{text!r}~", REJECTED)
        line.append(word, style).append(" ")
        if number < len(record["siblings_text"]) and (siblings := record["siblings_text"][number]):
            line.append(f"[{' '.join(map(repr, siblings))}] ", "dim")
    line.append(f"({accepted} of {len(record['drafted'])}), " if record["drafted"] else "")
    if record["sibling_text"] is not None:
        line.append("sibling ").append(repr(record["sibling_text"]), style_of("sibling", is_plain))
        line.append(", ")
    return line.append(f"{origin} ").append(repr(record["last_text"]), style_of(origin or "", is_plain))
