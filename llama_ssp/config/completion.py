"""Tab completion: the script for a shell, and the words that may complete a line. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llama_ssp.config.describe import Key, keys_of_group, keys_of_run, keys_of_task
from llama_ssp.config.overrides import FLAGS
from llama_ssp.config.presets import GROUPS, ROLES, options
from llama_ssp.config.short_forms import COMMANDS, PROMPT
from llama_ssp.config.tasks import TASKS, PromptedConf
from llama_ssp.errors import UsageError

# bash breaks words at = and :, and replaces what follows the last break. The program sees whole words.
BASH = """\
# Tab completion of llama-ssp for bash: source <(llama-ssp completion bash)
_llama_ssp() {
    local line="${COMP_LINE:0:COMP_POINT}" words word
    read -ra words <<< "$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    word="${words[-1]}"
    local typed=""
    [[ "$word" == *[=:]* ]] && typed="${word%"${word##*[=:]}"}"
    mapfile -t COMPREPLY < <(llama-ssp completion words "${words[@]:1}" 2> /dev/null)
    COMPREPLY=("${COMPREPLY[@]#"$typed"}")
    if [[ ${#COMPREPLY[@]} -eq 0 ]]; then
        mapfile -t COMPREPLY < <(compgen -f -- "${word##*=}")
        compopt -o filenames 2> /dev/null
    fi
    [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *= ]] && compopt -o nospace 2> /dev/null
}
complete -F _llama_ssp llama-ssp
"""
ZSH = """\
# Tab completion of llama-ssp for zsh: source <(llama-ssp completion zsh)
_llama_ssp_zsh() {
    local -a found
    found=("${(@f)$(llama-ssp completion words "${(@)words[2,CURRENT]}" 2> /dev/null)}")
    if [[ -n "${found[1]}" ]]; then compadd -Q -S '' -- "${found[@]}"; else _files; fi
}
compdef _llama_ssp_zsh llama-ssp
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH}


def completion(arguments: Sequence[str]) -> str:
    """The script for a shell; after `words` the completions of the last argument, a line each."""
    kind, words = (arguments[0] if arguments else ""), arguments[1:]
    if kind == "words":
        return "".join(f"{word}\n" for word in candidates(words or [""]))
    if kind not in SCRIPTS:
        fix = "write source <(llama-ssp completion bash) into ~/.bashrc"
        raise UsageError("completion is for a shell", "", repr(kind), ", ".join(SCRIPTS), fix)
    return SCRIPTS[kind]


def candidates(words: Sequence[str]) -> list[str]:
    """What the last word may become; nothing where it is the name of a file."""
    *before, word = words
    bare = [other for other in before if "=" not in other and not other.startswith("-")]
    named = [other.removeprefix("task=") for other in before if other.startswith("task=")]
    task = next((name for name in [*bare[:1], *named] if name in TASKS), "generate")
    key, equals, _ = word.partition("=")
    if equals:
        found = [f"{key}={value}" for value in _values(key, task)]
    elif word.startswith("-"):
        found = sorted(FLAGS)
    else:
        names = options(ROLES[0]) if 1 <= len(bare) <= len(ROLES) else []
        found = names if bare or named else sorted({*TASKS, *COMMANDS})
        found += [f"{name}=" for name in _keys(word, task)]
    return [one for one in found if one.startswith(word)]


def _keys(word: str, task: str) -> list[str]:
    """The keys to offer: those of a group after its name and a point, else the task's and the run's."""
    group = word.partition(".")[0]
    if "." in word and group in GROUPS:
        return [key.name for key in _of_group(group, task)]
    prompt = [PROMPT] if issubclass(TASKS[task], PromptedConf) else []
    own = [key.name for key in (*keys_of_task(task), *keys_of_run())]
    return [*prompt, *own, *(group for group in GROUPS if group != "task")]


def _values(key: str, task: str) -> list[str]:
    if key in GROUPS:
        return options(key)
    group = key.partition(".")[0]
    of_group = _of_group(group, task) if "." in key and group in GROUPS else []
    for found in (*of_group, *keys_of_task(task), *keys_of_run()):
        if found.name == key:
            return found.allowed.split("|") if "|" in found.allowed else _bools(found)
    return []


def _bools(key: Key) -> list[str]:
    return ["true", "false"] if key.default in ("true", "false") else []


def _of_group(group: str, task: str) -> list[Key]:
    if group == "task":
        return [replace(key, name=f"task.{key.name.removeprefix('task.')}") for key in keys_of_task(task)]
    return [] if group == "experiment" else keys_of_group(group)
