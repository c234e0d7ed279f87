"""How far a reader walks: the package's frames from `generate` to a forward, and what takes part in a run.

    python bench/frames.py

Prints the frames of a round's forwards, drafts' and target's: of eager steps; of compiled steps, whose
programs run as they are traced; and of CUDA graphs, which tests/test_graphs.py captures without a GPU. Frames
are those of named functions: a comprehension, a generator expression or a lambda is part of the function that
it stands in. Then prints how many modules `speculative.generate` imports, in how many a function runs while
one `generate` runs on two ranks, and the functions that one process enters before its first forward.
"""

import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = f"{ROOT / 'llama_ssp'}{os.sep}"
LOOP = f"{PACKAGE}speculative{os.sep}generate.py"
FIRST_FORWARD = f"models{os.sep}decoder.py", "Decoder.forward"
ENGINES = ("eager", "compiled", "graphs")
RUN = "generate demo draft=demo_draft engine=eager prompt=Once task.max_new_tokens=8 out=null"
SITE = f"import sys; sys.path.insert(0, {str(ROOT / 'bench')!r}); from frames import note; note()"

Frames = tuple[str, ...]


def frames_now() -> Frames:
    """Returns the package's named functions on the stack, from `generate` down; none outside of it."""
    names: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            names.append(code.co_name)
        if code.co_filename == LOOP and code.co_name == "generate":
            return tuple(reversed(names))
        frame = frame.f_back
    return ()


def frames_of(engine: str) -> set[Frames]:
    """Returns the frames from `generate` to each kind of forward, of a small target with a draft model."""
    from llama_ssp.models import steps
    from llama_ssp.models.decoder import Decoder
    from llama_ssp.models.decoder_model import DecoderModel
    from llama_ssp.models.programs import ProgramSpec
    from llama_ssp.models.steps import SteppedModel
    from tests.families import PROMPTS, model_of
    from tests.rig import speculate
    from tests.test_graphs import Replayed, one_by_one

    seen: set[Frames] = set()

    def watched(forward: Callable[..., Any], *names: str) -> Callable[..., Any]:
        """Returns the function; before it runs, the frames that lead to it are noted, and these names."""

        def noting(*given: Any) -> Any:
            frames = frames_now()
            if frames:
                seen.add((*frames, *names))
            return forward(*given)

        return noting

    def traced(_model: Any, spec: ProgramSpec, _loaded: Any) -> Callable[..., Any]:
        """Takes the place of compiling: returns the function that torch traces."""
        return watched(spec.function)

    class Graphed(Replayed):
        def _captured(self, step: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
            launch, result = super()._captured(step)
            return watched(launch), result

    kind = {"eager": DecoderModel, "compiled": SteppedModel, "graphs": Graphed}[engine]
    with ExitStack() as patches:
        # An eager forward is a function of the package. A program and the launch of a graph are torch's.
        eager = watched(Decoder.forward, "forward")
        patches.enter_context(patch.object(Decoder, "forward", eager))
        patches.enter_context(patch.object(steps, "load_or_compile", traced))
        patches.enter_context(patch.object(steps.attention_kernel, "attend", one_by_one))

        draft = model_of("llama-gqa", kind, noise=0.3)
        speculate(model_of("llama-gqa", kind), PROMPTS[:1], draft, k=4, max_new=8)
    return seen


def note() -> None:
    """Makes this process note what it runs, in the folder NOTES.

    There it touches a file for each module in which a function runs. At its first forward it writes the
    functions that it has entered until then.
    """
    notes = Path(os.environ["NOTES"])
    modules: set[str] = set()
    functions: set[tuple[str, str]] = set()
    has_forwarded = False

    def called(frame: FrameType, event: str, _: Any) -> None:
        nonlocal has_forwarded
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # not the body of a module or of a class
        if event != "call" or not is_function or not code.co_filename.startswith(PACKAGE):
            return

        module = code.co_filename.removeprefix(PACKAGE)
        if module not in modules:
            modules.add(module)
            (notes / module.replace(os.sep, ".")).touch()

        if has_forwarded or code.co_name.startswith("<"):
            return
        if (module, code.co_qualname) == FIRST_FORWARD:
            has_forwarded = True
            (notes / f"{os.getpid()}.json").write_text(json.dumps(sorted(functions)))
        functions.add((module, code.co_qualname))

    threading.setprofile(called)
    sys.setprofile(called)


def noted(command: str) -> tuple[int, list[tuple[str, str]]]:
    """Runs the command; returns how many modules took part, and the functions before its first forward."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes")
        notes.mkdir()
        Path(folder, "sitecustomize.py").write_text(SITE)
        of_run = {"PYTHONPATH": folder, "NOTES": str(notes), "LLAMA_SSP_MEASURED": "0"}
        words = [sys.executable, "-m", "llama_ssp", *command.split()]
        subprocess.run(words, env=os.environ | of_run, cwd=ROOT, check=True, capture_output=True)

        functions = {
            (module, function)
            for path in notes.glob("*.json")
            for module, function in json.loads(path.read_text())
        }
        return len([*notes.glob("*.py")]), sorted(functions)


def by_folder(functions: list[tuple[str, str]]) -> list[str]:
    """Returns a line a folder: how many functions, and how many of each of its files."""
    folders: dict[str, Counter[str]] = {}
    for module, _ in functions:
        path = Path(module)
        folders.setdefault(str(path.parent), Counter())[path.name] += 1

    lines = []
    for folder, counts in sorted(folders.items(), key=lambda item: -item[1].total()):
        files = ", ".join(f"{name} {count}" for name, count in counts.most_common())
        lines.append(f"{counts.total():5} {'llama_ssp' if folder == '.' else folder}: {files}")
    return lines


def main() -> None:
    sys.path.insert(0, str(ROOT))
    import llama_ssp.speculative.generate  # noqa: F401

    imported = sum(name.startswith("llama_ssp.") for name in sys.modules)
    for engine in ENGINES:
        for names in sorted(frames_of(engine)):
            print(f"{len(names):3} frames, {engine}: {' > '.join(names)}")
    print(f"{imported:3} modules are imported by llama_ssp.speculative.generate")

    modules, _ = noted(f"{RUN} ranks=2")
    print(f"{modules:3} modules took part in one generate over two ranks")
    _, functions = noted(RUN)
    files = len({module for module, _ in functions})
    print(f"{len(functions):3} functions of {files} files are entered before the first forward of a generate")
    print(*by_folder(functions), sep="\n")


if __name__ == "__main__":
    main()
