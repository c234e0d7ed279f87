"""Counts what makes code dense, or keeps it readable: lines, branches, forms, comments, names.

    python bench/form_counts.py [folder] [base=COMMIT]

A row is a measure of the Python files in the folder (`llama_ssp`), with `base` also as they were in that
commit. Widths are of all lines that are not blank; lines of functions include docstrings. Rows per 1,000
lines are per lines of code: those that hold more than comments, and no docstrings.
Rules that tests/test_form.py has are its own. The last rows are of the five core files and of `tests`.
"""

from __future__ import annotations

import ast
import io
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, median
from types import UnionType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.commits import unpack  # noqa: E402
from bench.words import Words  # noqa: E402
from tests import test_form as form  # noqa: E402

CORE = [f"speculative/{name}.py" for name in ("generate", "engine", "decision", "verification", "sampling")]
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSION = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
BRANCH = ast.If | ast.IfExp | ast.For | ast.While | ast.ExceptHandler | ast.Assert | ast.match_case
WIDE = 100  # columns
LONG = 20  # lines of a function
MANY_FACTS = 3  # of an error, by position
MANY_ASSERTS = 10

Row = tuple[str, str]


@dataclass
class Asked(Words):
    """The command line."""

    folder: str = "llama_ssp"
    base: str = ""


@dataclass(frozen=True)
class Source:
    """Holds a file, and what each of its lines is."""

    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def blank(self) -> set[int]:
        return {number for number, line in enumerate(self.lines, 1) if not line.strip()}

    @cached_property
    def comments(self) -> set[int]:
        """Returns the lines that have a comment, alone or after code."""
        return {token.start[0] for token in self._tokens if token.type == tokenize.COMMENT}

    @property
    def own_line_comments(self) -> set[int]:
        return self.comments - self._with_code

    @cached_property
    def docstrings(self) -> set[int]:
        numbers: set[int] = set()
        for node in form.nodes(self.tree):
            if isinstance(node, FUNCTION | ast.ClassDef | ast.Module) and ast.get_docstring(node) is not None:
                numbers |= lines_of(node.body[0])
        return numbers

    @cached_property
    def code(self) -> set[int]:
        return self._with_code - self.docstrings

    @cached_property
    def _tokens(self) -> list[tokenize.TokenInfo]:
        return [*tokenize.generate_tokens(io.StringIO(self.text).readline)]

    @cached_property
    def _with_code(self) -> set[int]:
        numbers: set[int] = set()
        for token in self._tokens:
            if token.type != tokenize.COMMENT and token.type not in LAYOUT:
                numbers |= {*range(token.start[0], token.end[0] + 1)}
        return numbers


def lines_of(*nodes: ast.stmt) -> set[int]:
    """Returns the numbers of the lines from the first node to the last, without decorators."""
    return {*range(nodes[0].lineno, (nodes[-1].end_lineno or 0) + 1)}


def read(folder: Path) -> list[Source]:
    return [Source(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))]


def of_lines(sources: list[Source]) -> Iterator[Row]:
    yield "lines of code", f"{sum(len(source.code) for source in sources):,}"
    lengths = [len(line) for source in sources for line in source.lines if line.strip()]
    yield "mean line", f"{mean(lengths):.1f}"
    yield f"lines >= {WIDE} columns, %", percent(sum(length >= WIDE for length in lengths), len(lengths))


def of_functions(sources: list[Source]) -> Iterator[Row]:
    sizes: list[int] = []
    branches: list[int] = []
    blank = 0
    long_bodies = 0
    unbroken = 0

    for source in sources:
        for node in form.nodes(source.tree):
            if not isinstance(node, FUNCTION):
                continue
            numbers = lines_of(node)
            sizes.append(len(numbers))
            branches.append(complexity(node))
            blank += len(numbers & source.blank)

            body = lines_of(*node.body) - source.docstrings
            if len(body) >= LONG:
                long_bodies += 1
                unbroken += body.isdisjoint(source.blank | source.comments)

    yield "functions", f"{len(sizes):,}"
    yield "function, median lines", f"{median(sizes):g}"
    yield "function, mean complexity", f"{mean(branches):.2f}"
    yield "complexity per 100 function lines", f"{100 * sum(branches) / sum(sizes):.1f}"
    yield f"bodies >= {LONG} lines without blank or comment, %", percent(unbroken, long_bodies)
    yield "blank lines in functions, %", percent(blank, sum(sizes))


def complexity(function: ast.AST) -> int:
    """Returns one more than the branches of a function, those of functions inside it included."""
    result = 1
    for node in ast.walk(function):
        if isinstance(node, BRANCH):
            result += 1
        elif isinstance(node, ast.BoolOp):
            result += len(node.values) - 1
        elif isinstance(node, COMPREHENSION):
            result += sum(1 + len(part.ifs) for part in node.generators)
    return result


def of_forms(sources: list[Source]) -> Iterator[Row]:
    trees = [source.tree for source in sources]
    per_line = 1000 / sum(len(source.code) for source in sources)

    def offences(rule: form.Rule) -> int:
        return sum(1 for tree in trees for _ in rule(tree))

    def nodes_of(kind: type[ast.AST] | UnionType) -> int:
        return sum(isinstance(node, kind) for tree in trees for node in form.nodes(tree))

    yield "`a, b = x, y`, per 1,000", f"{per_line * offences(form.each_value_has_its_assignment):.1f}"
    yield "conditional expressions, per 1,000", f"{per_line * nodes_of(ast.IfExp):.1f}"
    yield "comprehensions, per 1,000", f"{per_line * nodes_of(COMPREHENSION):.1f}"
    yield "nested comprehensions, per 1,000", f"{per_line * offences(nested):.1f}"
    yield "walrus, per 1,000", f"{per_line * nodes_of(ast.NamedExpr):.1f}"
    yield "`Class(*tuple)`", str(offences(splatted))
    yield "module-level `+=`, `|=`", str(offences(form.tables_are_literals))
    yield "`text * condition`", str(offences(form.nothing_is_chosen_by_multiplying))
    yield f"own raises, >= {MANY_FACTS} positional facts, %", many_facts(trees)
    comments = sum(len(source.own_line_comments) for source in sources)
    yield "own-line comments, per 1,000", f"{per_line * comments:.1f}"


def nested(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields comprehensions that stand inside another one."""
    inside: set[ast.AST] = set()
    for node in form.nodes(tree):
        if isinstance(node, COMPREHENSION):
            inside |= {child for child in ast.walk(node) if child is not node}
    return (node for node in inside if isinstance(node, COMPREHENSION))


def splatted(tree: ast.AST) -> Iterator[ast.AST]:
    for node in form.no_class_is_built_by_splatting(tree):
        if isinstance(node, ast.Call) and any(isinstance(item, ast.Starred) for item in node.args):
            yield node


def many_facts(trees: list[ast.Module]) -> str:
    """Returns how many of the raises of the package's own errors give many facts by position."""
    errors = form.error_classes(trees)
    total = 0
    many = 0
    for tree in trees:
        for node in form.nodes(tree):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                continue
            if form.last_name(node.exc.func) in errors:
                total += 1
                many += len(node.exc.args) >= MANY_FACTS
    return percent(many, total)


def of_classes(sources: list[Source]) -> Iterator[Row]:
    classes = [*form.classes(source.tree for source in sources)]
    dataclasses = [node for node in classes if form.is_dataclass(node)]
    by_keyword = sum(map(form.has_keyword_only, dataclasses))
    yield "kw_only dataclasses", f"{by_keyword} of {len(dataclasses)}"

    files: Counter[str] = Counter()
    for source in sources:
        files.update({node.name for node in form.classes([source.tree])})
    yield "class names of two files and more", str(sum(count > 1 for count in files.values()))


def of_core(folder: Path) -> Iterator[Row]:
    paths = [folder / name for name in CORE if (folder / name).exists()]
    if paths:
        core = [Source(path.read_text(encoding="utf-8")) for path in paths]
        lines = sum(len(source.lines) for source in core)
        comments = sum(len(source.own_line_comments) for source in core)
        yield "the five core files: own-line comments, of lines", f"{comments} of {lines:,}"


def of_tests(folder: Path) -> Iterator[Row]:
    functions = [
        node
        for source in read(folder)
        for node in form.nodes(source.tree)
        if isinstance(node, FUNCTION) and node.name.startswith("test_")
    ]
    if not functions:
        return
    joined = sum("_and_" in node.name for node in functions)
    asserts = [sum(isinstance(item, ast.Assert) for item in ast.walk(node)) for node in functions]
    yield "tests", f"{len(functions):,}"
    yield "tests with _and_ in their names, %", percent(joined, len(functions))
    yield f"tests with more than {MANY_ASSERTS} asserts", str(sum(count > MANY_ASSERTS for count in asserts))


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"


def rows(tree: Path, folder: str) -> dict[str, str]:
    """Returns all measures of a folder in a checkout."""
    sources = [source for source in read(tree / folder) if source.code]
    if not sources:
        sys.exit(f"{tree / folder} has no Python code")
    measures: Iterable[Iterable[Row]] = (
        of_lines(sources),
        of_functions(sources),
        of_forms(sources),
        of_classes(sources),
        of_core(tree / folder),
        of_tests(tree / "tests"),
    )
    return dict(row for part in measures for row in part)


def main() -> None:
    words = [word if "=" in word else f"folder={word}" for word in sys.argv[1:]]
    asked = Asked.of(words)
    columns = {"today": rows(ROOT, asked.folder)}
    if asked.base:
        with tempfile.TemporaryDirectory() as folder:
            before = rows(unpack(asked.base, Path(folder)), asked.folder)
        columns = {asked.base: before, **columns}

    names = dict.fromkeys(name for column in columns.values() for name in column)
    width = max(map(len, names))
    print(" " * width, *(f"{title:>12}" for title in columns))
    for name in names:
        print(f"{name:{width}}", *(f"{column.get(name, '-'):>12}" for column in columns.values()))


if __name__ == "__main__":
    main()
