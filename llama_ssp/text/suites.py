"""The formats of published question files: the keys of a line's object tell which one it is. No torch."""

from __future__ import annotations

from typing import Any

from llama_ssp.errors import DataError

FORMATS = (
    "Spec-Bench or MT-bench (question_id, category, turns), HumanEval (task_id, prompt) "
    "or GSM8K (question, answer)"
)
# MT-bench's categories, which are one of Spec-Bench's subtasks.
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def question_of(record: dict[str, Any], usual_id: str, where: str) -> tuple[Any, str, list[str]]:
    """The id, the category and the turns of a line's question. Raises DataError for other formats."""
    match record:
        case {"turns": [_, *_] as turns}:
            found = record.get("question_id", usual_id), record.get("category", "all"), turns
        case {"task_id": own_id, "prompt": prompt}:
            found = own_id, "humaneval", [prompt]
        case {"question": question, "answer": _}:
            found = usual_id, "gsm8k", [question]
        case _:
            what, fix = "the line is not a known suite's question", "other prompts go into task.prompt_file"
            raise DataError(what, where, ", ".join(record), FORMATS, fix)
    if not all(isinstance(text, str) for text in [found[1], *found[2]]):
        what, fix = "a question's turns or category are not text", "use the published file as it is"
        raise DataError(what, where, fix=fix)
    return found


def subtask(category: str, every: set[str]) -> str:
    """The row of Spec-Bench's table that a category belongs to; `every` has all categories of the file.

    Spec-Bench takes MT-bench's categories as one; a file of MT-bench alone keeps them apart.
    """
    return "mt_bench" if category in MT_BENCH and not every <= {*MT_BENCH} else category
