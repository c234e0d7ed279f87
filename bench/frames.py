"""How far a reader walks: the package's frames from `generate` to a forward, and the modules that take part.

    python bench/frames.py

Prints the frames of eager steps of the shipped pair, how many modules `speculative.generate` imports, and in
how many a function ran while one `generate` ran on two ranks.
"""

import inspect
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = f"{ROOT / 'llama_ssp'}{os.sep}"
RUN = "generate demo draft=demo_draft engine=eager ranks=2 prompt=Once task.max_new_tokens=8 out=null"
SITE = f"import sys; sys.path.insert(0, {str(ROOT / 'bench')!r}); from frames import note; note()"


def stack() -> tuple[str, ...]:
    """The package's functions from `generate` down to the caller's caller."""
    names = [frame.function for frame in inspect.stack(0)[2:] if frame.filename.startswith(PACKAGE)]
    return tuple(names[names.index("generate") :: -1]) if "generate" in names else ()


def note() -> None:
    """Makes this process touch a file for each module in which a function runs."""

    def called(frame, event, _):
        path, is_function = frame.f_code.co_filename, frame.f_code.co_flags & inspect.CO_OPTIMIZED
        if event == "call" and is_function and path.startswith(PACKAGE) and path not in seen:
            seen.add(path)
            Path(os.environ["NOTES"], path.removeprefix(PACKAGE).replace(os.sep, ".")).touch()

    seen = set()
    sys.setprofile(called)


def main() -> None:
    sys.path.insert(0, str(ROOT))
    import llama_ssp.speculative.generate

    imported = sum(name.startswith("llama_ssp.") for name in sys.modules)
    from llama_ssp.models.decoder import Decoder

    seen, forward = {}, Decoder.forward
    Decoder.forward = lambda *given: (seen.setdefault((*stack(), "forward")), forward(*given))[1]
    with llama_ssp.load_pair("demo", "demo_draft", overrides=["engine=eager"]) as pair:
        pair.generate(["Once"], max_new_tokens=8)
    for names in sorted(names for names in seen if names[0] == "generate" and "begin" not in names):
        print(f"{len(names):3} frames: {' > '.join(names)}")
    print(f"{imported:3} modules are imported by llama_ssp.speculative.generate")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(SITE)
        Path(folder, "notes").mkdir()
        places = {"PYTHONPATH": folder, "NOTES": f"{folder}/notes"}
        words = [sys.executable, "-m", "llama_ssp", *RUN.split()]
        subprocess.run(words, env={**os.environ, **places}, cwd=ROOT, check=True, capture_output=True)
        print(f"{len(os.listdir(places['NOTES'])):3} modules took part in one generate over two ranks")


if __name__ == "__main__":
    main()
