"""Imports point down, torch stays out of the command line, and what design forbids is nowhere."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "llama_ssp"

# A folder or loose file imports from itself and from what stands behind it; those of one set never meet.
ORDER = [
    {"__main__"}, {"cli"}, {"tasks"}, {"batch"}, {"pair"}, {"planner", "report"}, {"speculative"},
    {"text"}, {"models"}, {"distributed"}, {"config"}, {"errors"}, {"llama_ssp"},
]  # fmt: skip
PLACE = {name: place for place, names in enumerate(ORDER) for name in names}
# What answers before torch is loaded: whole folders, and modules of others.
WITHOUT_TORCH = {
    "__main__", "llama_ssp", "cli", "errors", "config", "planner", "report", "batch", "text",
    "distributed.placement", "distributed.signals", "models.checkpoint", "models.folder",
    "models.families", "models.graph_sizes", "models.host_memory", "models.hub",
    "models.formats.quantised_config", "models.sharding", "speculative.draft_length", "speculative.stats",
    "tasks.arithmetic", "tasks.inputs", "tasks.plan",
}  # fmt: skip
WITH_TORCH = {"batch.continuous_batching"}
KNOWS_TRANSFORMERS = {"models", "text.gguf_tokenizer", "text.tokenizer"}
FORBIDDEN_CALLS = {
    "eval", "exec", "instantiate", "manual_seed_all", "broadcast_object_list", "all_gather_object",
    "gather_object", "scatter_object_list", "send_object_list", "recv_object_list",
}  # fmt: skip
FORBIDDEN_OF = {
    ("torch", "load"), ("torch", "manual_seed"), ("pickle", "load"), ("pickle", "loads"),
    ("marshal", "loads"), ("random", "seed"), ("os", "system"), ("yaml", "load"),
    ("importlib", "import_module"),
}  # fmt: skip
# Assertions of our own order, not of anything that comes from outside: all that may be one, beside narrowing.
OWN_ORDER = {("models/kernels/linear.py", "inputs % word == 0")}


@cache
def modules() -> list[tuple[str, ast.Module, Path]]:
    return [
        (_room(path), ast.parse(path.read_text(encoding="utf-8")), path)
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


def _room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return "llama_ssp" if first == "__init__.py" else first.removesuffix(".py")


def imports(tree: ast.Module, top_level_only: bool = False) -> list[str]:
    found = []
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the room they come from"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_every_folder_has_its_place():
    assert {room for room, _, _ in modules()} == PLACE.keys()


def test_imports_go_one_way():
    """The package's own __init__ opens the API's doors, when they are first used."""
    for room, tree, path in modules():
        for name in imports(tree, top_level_only=room == "llama_ssp"):
            if name.startswith("llama_ssp."):
                other = name.split(".")[1]
                other = other if other in PLACE else "llama_ssp"
                right = PLACE[other] > PLACE[room] or other == room
                assert right, f"{path.name} ({room}) imports {name}"


def test_no_modules_import_each_other():
    """Not even by way of others."""
    inner = {name: _within(tree) - {name, "llama_ssp"} for name, tree in _trees().items()}
    while leaves := [name for name, others in inner.items() if not others]:
        inner = {name: others - set(leaves) for name, others in inner.items() if name not in leaves}
    assert not inner, f"a circle among {sorted(inner)}"


def _within(tree: ast.Module) -> set[str]:
    """The modules of the package that it names, as deep as they go."""
    found = {name if name in _trees() else name.rpartition(".")[0] for name in imports(tree)}
    return found & _trees().keys()


@cache
def _trees() -> dict[str, ast.Module]:
    return {_dotted(path): tree for _, tree, path in modules()}


def needs_no_torch(dotted: str) -> bool:
    """Whether this module may not bring torch along."""
    name = dotted.removeprefix("llama_ssp.")
    return name not in WITH_TORCH and bool({name, name.split(".")[0]} & WITHOUT_TORCH)


def test_what_answers_without_torch():
    """Nor does anything that it imports, as it is imported."""
    trees = _trees()

    def first_heavy(name: str, seen: set[str]) -> str | None:
        """The first import of torch that importing this module brings."""
        seen.add(name)
        for other in imports(ast.Module(at_import(trees[name].body), []), top_level_only=True):
            if other.partition(".")[0] in {"torch", "transformers", "accelerate"}:
                return f"{name} imports {other}"
            inner = [one for one in (other, other.rpartition(".")[0]) if one in trees and one not in seen]
            found = [heavy for one in inner if (heavy := first_heavy(one, seen))]
            if found:
                return found[0]
        return None

    for name in trees:
        if needs_no_torch(name):
            assert first_heavy(name, set()) is None, name


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def at_import(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements that run when a module is imported; what is imported for the type checker does not."""
    found = []
    for node in body:
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.If | ast.Try | ast.With):
            parts = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
            parts += [handler.body for handler in getattr(node, "handlers", [])]
            found += [one for part in parts for one in at_import(part)]
        else:
            found.append(node)
    return found


def test_transformers_is_known_to_models_and_tokenizers_only():
    for room, tree, path in modules():
        names = {name.split(".")[0] for name in imports(tree)}
        own = {room, _dotted(path).removeprefix("llama_ssp.")}
        assert own & KNOWS_TRANSFORMERS or not names & {
            "transformers",
            "accelerate",
            "bitsandbytes",
            "deepspeed",
        }, path


def test_one_folder_knows_torch_distributed():
    for room, tree, path in modules():
        names = imports(tree)
        assert room == "distributed" or not any(n.startswith("torch.distributed") for n in names), path
        used = {
            n.attr
            for n in ast.walk(tree)
            if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "torch"
        }
        assert "distributed" not in used, path


def test_forbidden_calls():
    """No code from data, no pickle, no global seed; `trust_remote_code` is only ever False."""
    for _, tree, path in modules():
        names = set(imports(tree))
        assert not {name.split(".")[0] for name in names} & {"pickle", "marshal", "shelve", "dill"}, path
        assert not names & {f"{owner}.{name}" for owner, name in FORBIDDEN_OF}, path
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                is_method = isinstance(node.func, ast.Attribute)
                name = node.func.attr if is_method else getattr(node.func, "id", "")
                assert (is_method and name in ("eval",)) or name not in FORBIDDEN_CALLS, f"{path}: {name}"
                owner = getattr(getattr(node.func, "value", None), "id", "")
                assert (owner, name) not in FORBIDDEN_OF, path
                for keyword in node.keywords:
                    if keyword.arg == "trust_remote_code":
                        assert isinstance(keyword.value, ast.Constant) and keyword.value.value is False, path


def _narrows(test: ast.expr) -> bool:
    """Says to the type checker what is known: that something is there, or of a class."""
    if isinstance(test, ast.BoolOp):
        return all(map(_narrows, test.values))
    if isinstance(test, ast.Call):
        return getattr(test.func, "id", "") == "isinstance"
    return isinstance(test, ast.Compare) and [type(sign) for sign in test.ops] == [ast.IsNot]


def test_nothing_is_refused_by_an_assertion():
    """`python -O` takes assertions away: they tell the type checker something, and refuse nothing."""
    found = {
        (path.relative_to(PACKAGE).as_posix(), ast.unparse(node.test))
        for _, tree, path in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert) and not _narrows(node.test)
    }
    assert found == OWN_ORDER


def test_the_command_line_does_not_import_torch():
    """Importing it, in a process of its own."""
    code = "import sys, llama_ssp.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
