"""A share of the inputs through the whole command, in a process of its own: what is taken must also run."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

from llama_ssp import cli
from tests.fuzz import overrides, prompts
from tests.fuzz.files import BAD_LINES
from tests.fuzz.trial import LIMIT_S, Said, Trial, command, ill_said

SMALL = ("model=tiny", "draft=tiny_draft", "seed=1")
BOUNDED = {
    "generate": (*SMALL, "task.max_new_tokens=2", 'task.prompts=["a"]'),
    "plan": ("model=7B", "draft=7B", "cluster=p4d"),
}
PATHS = (
    "out=",
    "task.plot",
    "offload_folder",
    "task.prompt_file",
    "download=",
    "cluster.",
    "-m",
    "nodes",
)
MEMORY_BYTES = 4 * 2**30
COMPILING_S = 50.0  # for a pair, in a home without compiled steps
PATIENCE_S = 60.0  # by the clock, on a machine that may have other work


@dataclass(frozen=True)
class Whole:
    """A command line and its standard input. `nonsense` must be refused with 2."""

    words: tuple[str, ...]
    stdin: bytes = b""
    nonsense: str = ""


def made(random: Random) -> Whole:
    return _of_overrides(random) if random.random() < 0.6 else _of_prompts(random)


def _of_overrides(random: Random) -> Whole:
    while True:
        drawn = overrides.made(random, tuple(BOUNDED))
        if not any(
            path in word for word in drawn.words for path in PATHS
        ):  # nothing outside of the trial's folder
            break
    task = "plan" if "task=plan" in drawn.words else "generate"
    keys = {word.partition("=")[0] for word in drawn.words}
    first = [word for word in BOUNDED[task] if word.partition("=")[0] not in keys]
    return Whole((*first, *drawn.words), b"", drawn.nonsense)


def _of_prompts(random: Random) -> Whole:
    """Prompts by standard input, text or JSONL, some of them bad."""
    texts = [prompts.made(random).text.replace("\n", " ") or "a" for _ in range(random.randrange(1, 24))]
    if random.random() < 0.5:
        lines = [text.encode() for text in texts]
    else:
        lines = [json.dumps({"prompt": text, "id": number}).encode() for number, text in enumerate(texts)]
        lines = [b'{"prompt": "first"}', *lines]
        bad = [line if isinstance(line, bytes) else line.encode() for line in BAD_LINES]
        lines[1:1] = random.sample(bad, random.randrange(3))
    content = b"\n".join(lines)
    if random.random() < 0.3:
        content += random.randbytes(20)
    model = random.choice((SMALL, ("seed=1",)))
    words = (
        *model,
        "task.max_new_tokens=3",
        "task.on_bad_row=skip",
        f"task.batch_size={random.choice((1, 3, 8))}",
    )
    more = random.choice(
        ((), ("sampling=greedy",), ("speculation=token",), ('task.stop=["a"," "]',), ("output=json",))
    )
    return Whole((*words, *more), content)


def tried(folder: Path, made: Whole) -> Trial:
    said, seconds, busy = _run(made, folder)
    wrong = ill_said(said)
    if made.nonsense and said.code not in ((2, 4) if overrides.names_a_folder(made.words) else (2,)):
        wrong.append(f"exit code {said.code}, though {made.nonsense}")
    limit_s = COMPILING_S if "engine=compiled" in made.words else LIMIT_S
    if busy > limit_s or seconds > PATIENCE_S:
        wrong.append(f"took {busy:.0f} s of a processor, {seconds:.0f} s in all")
    wrong += [f"said: {said.err[-300:]!r}"] if wrong else []
    return Trial(f"exit code {said.code}", tuple(wrong), repr(made)[:1000] if wrong else "")


def _run(made: Whole, folder: Path) -> tuple[Said, float, float]:
    """What was said, and how long it took: by the clock, and of a processor."""
    folder.mkdir(parents=True, exist_ok=True)
    answer, began = folder / "said", time.monotonic()
    answer.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        try:
            _serve(made, folder, answer)
        finally:
            os._exit(70)
    while not (ended := os.wait4(child, os.WNOHANG))[0]:
        if time.monotonic() - began > PATIENCE_S:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    seconds, busy = time.monotonic() - began, ended[2].ru_utime + ended[2].ru_stime
    if not answer.exists():
        return Said(-1, "", "gone without a word"), seconds, busy
    return Said(*json.loads(answer.read_text())), seconds, busy


def _serve(made: Whole, folder: Path, answer: Path) -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES,) * 2)
    os.environ["HOME"] = str(folder)
    os.chdir(folder)
    said = command(cli.main, list(made.words), made.stdin)
    answer.write_text(json.dumps([said.code, said.out[-500:], said.err]))
    os._exit(0)
