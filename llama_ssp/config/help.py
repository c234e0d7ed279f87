"""What --help prints, and docs/keys.md: made of the configuration's own descriptions. No torch.

`python -m llama_ssp.config.help > docs/keys.md` writes the page anew.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from llama_ssp.config.describe import Key, descriptions, intro, keys_of_group, keys_of_run, keys_of_task
from llama_ssp.config.presets import GROUPS, nearest, options
from llama_ssp.config.run import RunConf
from llama_ssp.config.tasks import TASKS
from llama_ssp.errors import UsageError

USAGE = "llama-ssp {task} [TARGET [DRAFT]] [KEY=VALUE ...]"
SHOWN = ("sampling", "speculation")  # groups whose keys a task's help shows, too
MARGIN, WIDTH = 28, 80  # columns
OVERVIEW = """\
llama-ssp: a large language model, faster with a small draft, same distribution.

  {usage}
  torchrun --nproc-per-node N launch/run.py TASK ...     over N GPUs

{tasks}
  also: report RUN

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
    """The help for the first task or group among the arguments; the overview without one.

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
    fix = f"did you mean {near}?" if near else "llama-ssp --help has the overview"
    raise UsageError("there is no help for this word", "", repr(first), ", ".join(names), fix)


def overview() -> str:
    """One screen of 24 lines and 80 columns."""
    width = max(map(len, TASKS))
    tasks = "\n".join(f"  {name:{width}}  {intro(schema)[0]}" for name, schema in TASKS.items())
    return OVERVIEW.format(usage=USAGE.format(task="TASK"), tasks=tasks)


def _of_task(name: str) -> list[str]:
    schema, run = TASKS[name], descriptions(RunConf)
    lines = [USAGE.format(task=name), "", *_wrapped(" ".join(intro(schema)))]
    lines += [
        "",
        "Keys of the task",
        *_table(keys_of_task(name)),
        "",
        "Keys of the run",
        *_table(keys_of_run()),
    ]
    groups = schema.groups.split()
    for group in (group for group in groups if group in SHOWN):
        choices = _wrapped(f"{group}={'|'.join(options(group))}", "  ")
        lines += ["", run[group], *choices, *_table(keys_of_group(group))]
    others = [Key(group, "NAME", run[group]) for group in groups if group not in SHOWN]
    return [*lines, "", "Further groups: llama-ssp GROUP --help", *_table(others)]


def _of_group(name: str) -> list[str]:
    about, keys = descriptions(RunConf).get(name, "Settings of several groups."), keys_of_group(name)
    lines = [f"{name}=NAME", "", *_wrapped(about), "", "Names", *_wrapped(", ".join(options(name)), "  ")]
    return [*lines, "", "Keys", *_table(keys)] if keys else lines


def _table(keys: Sequence[Key]) -> list[str]:
    """A key with its default, and its description next to it."""
    lines = list[str]()
    for key in keys:
        head = f"  {key.name}={key.default}"
        if len(head) > MARGIN - 2:
            lines.append(head)
            head = ""
        lines += _wrapped(key.text, " " * MARGIN, head.ljust(MARGIN))
    return lines


def _wrapped(text: str, margin: str = "", head: str | None = None) -> list[str]:
    head = margin if head is None else head
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=margin)


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
            default, meaning = f"`{key.default}`" if key.default else "", key.text.replace("|", "\\|")
            parts.append(f"| `{key.name}` | {default} | {meaning} |")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    print(markdown(), end="")
