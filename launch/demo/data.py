"""Training text made on the spot: the standard library's sources, and worked multiplications.

Nothing is downloaded, so the models can be made again on any machine that has Python.
"""

import ast
import hashlib
import inspect
import random
import re
import sysconfig
import textwrap
from dataclasses import dataclass
from pathlib import Path

# Folders that are tests, other people's packages, or tables that a program wrote.
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "lib2to3",
    "__pycache__",
    "lib-dynload",
    "pydoc_data",
    "_bundled",
}
TABLE_FOLDERS = {"encodings", "curses"}
TABLE_FILES = re.compile(r"(entities|_sysconfigdata.*|(cp|mac_|iso|koi|hp|ptcp|kz).*|mathsymb)\.py")
LONGEST_DOCUMENT = 3600  # characters: about the models' context of 1024 tokens
SHORTEST_DOCUMENT = 40
HELD_OUT_ONE_IN = 20
LARGEST_NUMBER = 98


@dataclass(frozen=True)
class Documents:
    """Texts to learn from, and texts of other files that are never trained on."""

    train: list[str]
    held_out: list[str]

    def digest(self) -> str:
        """Tell two machines' data apart: each Python version has its own library."""
        joined = "\0".join([*self.train, "\x01", *self.held_out])
        return hashlib.sha256(joined.encode("utf-8", "surrogatepass")).hexdigest()


def one_in(text: str, n: int) -> bool:
    """Choose about one text of n, the same ones on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % n == 0


def library_files(root: Path | None = None) -> list[Path]:
    """The library's hand-written modules, relative to its root, in a fixed order."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS & set(name.parts[:-1]) or name.parts[0].startswith("config-"):
            continue
        if TABLE_FILES.fullmatch(name.name) and (
            len(name.parts) == 1 or name.parts[0] in TABLE_FOLDERS | {"html"}
        ):
            continue
        files.append(name)
    return files


def library_documents(seed: int, limit: int | None = None) -> Documents:
    """Cut the library into shuffled documents; whole files are held out, not single functions."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = library_files(root)
    if limit is not None:
        files = random.Random(seed).sample(files, min(limit, len(files)))
    train: list[str] = []
    held_out: list[str] = []
    for name in files:
        try:
            source = (root / name).read_text(encoding="utf-8")
            documents = cut_module(source)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        (held_out if one_in(name.as_posix(), HELD_OUT_ONE_IN) else train).extend(documents)
    if limit is None:
        train.extend(reference_prose(root))
    seen = set(train)
    held_out = [text for text in dict.fromkeys(held_out) if text not in seen]
    train = list(dict.fromkeys(train))
    random.Random(seed).shuffle(train)
    random.Random(seed).shuffle(held_out)
    return Documents(train, held_out)


def cut_module(source: str) -> list[str]:
    """Cut a module into its functions, classes, opening lines and docstrings."""
    tree = ast.parse(source)
    lines = source.splitlines()
    texts = [opening(tree, lines)]
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        texts.append(cut_node(node, lines))
        prose = ast.get_docstring(node, clean=True)
        if prose and len(prose) > 120:
            texts.append(prose)
    prose = ast.get_docstring(tree, clean=True)
    if prose:
        texts.extend(pieces(prose))
    return [text for text in map(tidy, texts) if len(text) >= SHORTEST_DOCUMENT]


def opening(tree: ast.Module, lines: list[str]) -> str:
    """A module's first lines, up to its first function or class."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            return "\n".join(lines[: node.lineno - 1])[:LONGEST_DOCUMENT]
    return "\n".join(lines)[:LONGEST_DOCUMENT]


def cut_node(node: ast.AST, lines: list[str]) -> str:
    """One definition, moved to the left margin; too long a one is cut before a line."""
    first = min([node.lineno] + [item.lineno for item in node.decorator_list])
    text = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))
    if len(text) <= LONGEST_DOCUMENT:
        return text
    cut = text.rfind("\n\n", 0, LONGEST_DOCUMENT)
    return text[: cut if cut > 0 else LONGEST_DOCUMENT]


def reference_prose(root: Path) -> list[str]:
    """The language reference behind `help()`: the one longer prose that every Python has."""
    path = root / "pydoc_data" / "topics.py"
    if not path.exists():
        return []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            topics = ast.literal_eval(node.value)
            return [tidy(piece) for text in topics.values() for piece in pieces(text)]
    return []


def pieces(prose: str, longest: int = 1500) -> list[str]:
    """Cut long prose between paragraphs."""
    found, current = [], ""
    for paragraph in inspect.cleandoc(prose).split("\n\n"):
        if current and len(current) + len(paragraph) > longest:
            found.append(current)
            current = ""
        current = f"{current}\n\n{paragraph}" if current else paragraph
    return [*found, current]


def tidy(text: str) -> str:
    """Drop what would teach nothing: blanks at line ends and around the text."""
    return "\n".join(line.rstrip() for line in text.expandtabs(4).splitlines()).strip("\n")


def is_held_out_pair(a: int, b: int) -> bool:
    """About 5 % of the multiplications, in both orders, are never trained on."""
    return one_in(f"{min(a, b)}*{max(a, b)}", HELD_OUT_ONE_IN)


def random_pair(rng: random.Random, held_out: bool | None = None) -> tuple[int, int]:
    """Two numbers; `held_out` restricts them to one side of the split."""
    while True:
        a, b = rng.randint(1, LARGEST_NUMBER), rng.randint(1, LARGEST_NUMBER)
        if held_out is None or is_held_out_pair(a, b) == held_out:
            return a, b


def training_multiplications(rng: random.Random, fewest: int = 3, most: int = 8) -> str:
    """A few worked lines and one more, none of them of the held-out pairs."""
    pairs = [random_pair(rng, held_out=False) for _ in range(rng.randint(fewest, most) + 1)]
    return "\n".join(f"{a} * {b} = {a * b}" for a, b in pairs)


def multiplication_prompt(rng: random.Random, held_out: bool | None = None) -> tuple[str, str]:
    """Fresh worked lines and an open one, with the answer that it wants."""
    a, b = random_pair(rng, held_out)
    shots = [random_pair(rng) for _ in range(rng.randint(3, 8))]
    shots = [(x, y) for x, y in shots if {x, y} != {a, b}]
    lines = [f"{x} * {y} = {x * y}" for x, y in shots]
    return "\n".join([*lines, f"{a} * {b} = "]), str(a * b)
