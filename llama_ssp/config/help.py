"""What --help prints, and docs/keys.md: made of the configuration's own descriptions. No torch.

`python -m llama_ssp.config.help > docs/keys.md` writes the page anew.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from enum import EnumType
from typing import Any, get_type_hints

from llama_ssp.config.presets import CONF, GROUPS, nearest, options
from llama_ssp.config.run import RunConf, kinds_of
from llama_ssp.config.schema import ModelConf
from llama_ssp.config.tasks import TASKS
from llama_ssp.errors import UsageError

USAGE = "llama-ssp {task} [TARGET [DRAFT]] [KEY=VALUE ...]"
SHOWN = ("sampling", "speculation")  # groups whose keys a task's help shows, too
# Columns.
MARGIN = 28
WIDTH = 80
NAMES_MARGIN = 16
TYPED_GPUS = "Or a GPU, of which the plan has one, or as many as you say: h200, A100-80, 8xH100, 4x rtx4090."
OVERVIEW = """\
llama-ssp: a large language model, faster with a small draft, same distribution.

  {usage}
  llama-ssp TASK ... ranks=N       over N GPUs; --dry-run shows what would start

{tasks}
  also: report RUN.  Files that stay: outputs/, ~/.cache/llama-ssp

TARGET, DRAFT: a preset, a folder, a GGUF file, or ORG/NAME on the hub
  llama-ssp compare prompt="def hello"             the pair that ships with it
  llama-ssp plan 65B 7B cluster=p4d                does it fit, how fast?
  llama-ssp generate /models/70b /models/1b prompt_file=prompts.txt
Help:  llama-ssp TASK --help (its keys), llama-ssp model --help (presets)
Flags: --KEY VALUE, -p PROMPT, -n TOKENS, -q, -v, --version; and --hydra-help
"""
PAGE = """\
# All keys

Made by `python -m llama_ssp.config.help > docs/keys.md`.

A key of a task, of sampling or of speculation needs no group: `llama-ssp measure repeats=3 k=4`.
A key of a text or a path takes its value as it is; `--KEY VALUE` is `KEY=VALUE`.
"""


def help_for(arguments: Sequence[str]) -> str:
    """Returns the help for the first task or group among the arguments; the overview without one.

    Raises UsageError if the first argument is no task, no group, no setting and no flag.
    """
    for word in (word.removeprefix("task=") for word in arguments):
        if word in TASKS or word in GROUPS:
            return "\n".join([*(_of_task(word) if word in TASKS else _of_group(word)), ""])
    first = arguments[0] if arguments else "-"
    if "=" in first or first.startswith("-"):
        return overview()
    names = [*TASKS, *GROUPS]
    near = nearest(first, names)
    raise UsageError(
        "there is no help for this word",
        found=repr(first),
        allowed=", ".join(names),
        fix=f"did you mean {near}?" if near else "llama-ssp --help has the overview",
    )


def overview() -> str:
    """One screen of 24 lines and 80 columns."""
    width = max(map(len, TASKS))
    tasks = "\n".join(f"  {name:{width}}  {intro(schema)[0]}" for name, schema in TASKS.items())
    return OVERVIEW.format(usage=USAGE.format(task="TASK"), tasks=tasks)


def _of_task(name: str) -> list[str]:
    schema = TASKS[name]
    run = descriptions(RunConf)
    lines = [USAGE.format(task=name), "", *_wrapped(" ".join(intro(schema)))]
    lines += ["", "Keys of the task", *_table(keys_of_task(name))]
    lines += ["", "Keys of the run", *_table(keys_of_run())]
    groups = schema.groups.split()
    for group in (group for group in groups if group in SHOWN):
        choices = _wrapped(f"{group}={'|'.join(options(group))}", 2)
        lines += ["", run[group], *choices, *_table(keys_of_group(group))]
    others = [Key(group, "NAME", run[group]) for group in groups if group not in SHOWN]
    return [*lines, "", "Further groups: llama-ssp GROUP --help", *_table(others)]


def _of_group(name: str) -> list[str]:
    about = descriptions(RunConf).get(name, "Settings of several groups.")
    keys = keys_of_group(name)
    lines = [f"{name}=NAME", "", *_wrapped(about), "", "Names"]
    if name == "cluster":
        for option in options(name):
            first, *rest = _wrapped(_first_comment(name, option), NAMES_MARGIN)
            lines += [f"  {option:<{NAMES_MARGIN - 3}} {first.strip()}", *rest]
        lines += ["", *_wrapped(TYPED_GPUS, 2)]
    else:
        lines += _wrapped(", ".join(options(name)), 2)
    return [*lines, "", "Keys", *_table(keys)] if keys else lines


def _first_comment(group: str, option: str) -> str:
    """Returns what the file of a preset says of it in its first sentence."""
    line = (CONF / group / f"{option}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    return line.removeprefix("#").partition(". ")[0].strip()


def _table(keys: Sequence[Key]) -> list[str]:
    """Returns a key with its default, and its description next to it."""
    lines = list[str]()
    for key in keys:
        head = f"  {key.name}={key.default}"
        first, *rest = _wrapped(key.text, MARGIN)
        lines += [head + first[len(head) :]] if len(head) <= MARGIN - 2 else [head, first]
        lines += rest
    return lines


def _wrapped(text: str, margin: int = 0) -> list[str]:
    indent = " " * margin
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)


def markdown() -> str:
    """docs/keys.md: every key."""
    run = descriptions(RunConf)
    groups = [group for group in GROUPS if group in run and group not in ("draft", "task")]
    sections = [("Keys of the run", "", keys_of_run())]
    sections += [(f"task={name}", " ".join(intro(TASKS[name])), keys_of_task(name)) for name in TASKS]
    sections += [(f"{name}.KEY", run[name], keys_of_group(name)) for name in groups]
    parts = [PAGE]
    for title, text, keys in sections:
        parts += [f"## {title}", "", *([text, ""] if text else [])]
        parts += ["| key | default | meaning |", "|---|---|---|"]
        for key in keys:
            default = f"`{key.default}`" if key.default else ""
            meaning = key.text.replace("|", "\\|")
            parts.append(f"| `{key.name}` | {default} | {meaning} |")
        parts.append("")
    return "\n".join(parts)


@dataclass(frozen=True)
class Key:
    """A key with its default as it is written, and its description with what it may be."""

    name: str
    default: str
    text: str


def intro(schema: type) -> list[str]:
    """Returns the description of a schema: its first line, and the rest in one."""
    first, _, rest = inspect.cleandoc(schema.__doc__ or "").partition("\n\n")
    return [" ".join(part.split()) for part in (first, rest) if part]


def descriptions(schema: type) -> dict[str, str]:
    """Returns the description of each key."""
    return {entry.name: entry.metadata["about"] for entry in fields(schema)}


def keys_of(schema: type, prefix: str = "") -> Iterator[Key]:
    """Yields the keys of a schema and of the schemas in it, except the name of a model or task."""
    hints = get_type_hints(schema)
    for entry in fields(schema):
        inner = entry.default_factory
        if isinstance(inner, type) and is_dataclass(inner):
            yield from keys_of(inner, f"{prefix}{entry.name}.")
        elif entry.name != "name":
            text = f"{entry.metadata['about']} {_allowed(hints[entry.name], entry)}".strip()
            yield Key(prefix + entry.name, _default(entry), text)


def keys_of_group(group: str) -> list[Key]:
    """Returns the keys of a group of the run, such as sampling."""
    known = keys_of(ModelConf, "draft.") if group == "draft" else keys_of(RunConf)
    return [key for key in known if key.name.startswith(f"{group}.")]


def keys_of_task(task: str) -> list[Key]:
    """The keys of a task, as they are written after its name: with task. where the run has the same key."""
    of_run = {entry.name for entry in fields(RunConf)}
    keys = keys_of(TASKS[task])
    return [replace(key, name=f"task.{key.name}") if key.name in of_run else key for key in keys]


def keys_of_run() -> list[Key]:
    """Returns the keys that are in no group of presets."""
    keys = [key for key in keys_of(RunConf) if "." not in key.name and key.name != "draft"]
    return [*keys, *keys_of_group("plan")]


def _default(entry: Field[Any]) -> str:
    factory = entry.default_factory
    value = entry.default if factory is MISSING else factory()
    return str(value) if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _allowed(hint: Any, entry: Field[Any]) -> str:
    """Returns the choices of a key, or the range of its numbers; empty where the type says enough."""
    kind = kinds_of(hint)[0]
    if isinstance(kind, EnumType):
        return f"[{'|'.join(kind)}]"
    if entry.metadata["range"] is not None:
        low, high, above = entry.metadata["range"]
        if high >= 2**20:
            return f"[{'above' if above else 'from'} {low:g}]"
        return f"[above {low:g}, up to {high:g}]" if above else f"[{low:g}..{high:g}]"
    return ""


if __name__ == "__main__":
    print(markdown(), end="")
