"""Imports point down, torch stays out of the command line, and what design forbids is nowhere."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.warm import ROOT

PACKAGE = ROOT / "llama_ssp"

# A folder or loose file imports from itself and from what stands behind it; those of one set never meet.
ORDER = [
    {"__main__"}, {"cli"}, {"tasks"}, {"batch"}, {"pair"}, {"placing"}, {"planner", "report"},
    {"speculative"}, {"text"}, {"models"}, {"distributed"}, {"config"}, {"errors"}, {"llama_ssp"},
]  # fmt: skip
PLACE = {name: place for place, names in enumerate(ORDER) for name in names}
# What answers before torch is loaded: whole folders, and modules of others.
WITHOUT_TORCH = {
    "__main__", "llama_ssp", "cli", "errors", "config", "placing", "planner", "report", "batch", "text",
    "distributed.board", "distributed.bounded", "distributed.control_groups", "distributed.cores",
    "distributed.gpus", "distributed.interfaces", "distributed.launcher", "distributed.nodes",
    "distributed.placement",
    "distributed.signals",
    "models.adapter", "models.checkpoint", "models.folder", "models.families", "models.graph_sizes",
    "models.host_cores",
    "models.host_memory", "models.hub", "models.library_log", "models.formats.quantised_config",
    "models.kept_files", "models.kernels.kernel_sizes", "models.ownership", "models.sharding",
    "models.staged",
    "speculative.draft_length", "speculative.replay", "speculative.stats",
    "tasks.arithmetic", "tasks.inputs", "tasks.machine.driver",
    "tasks.machine.facts", "tasks.machine.finding", "tasks.machine.gpu_checks", "tasks.machine.host",
    "tasks.machine.host_checks",
    "tasks.plan",
}  # fmt: skip
LIBRARIES = {"transformers", "accelerate", "bitsandbytes", "deepspeed"}
KNOWS_LIBRARIES = {"models", "text.gguf_tokenizer", "text.tokenizer"}
FORBIDDEN_IMPORTS = {"pickle", "marshal", "shelve", "dill"}
FORBIDDEN_CALLS = {
    "eval", "exec", "instantiate", "manual_seed_all", "broadcast_object_list", "all_gather_object",
    "gather_object", "scatter_object_list", "send_object_list", "recv_object_list",
}  # fmt: skip
FORBIDDEN_OF = {
    "torch.load", "torch.manual_seed", "random.seed", "os.system", "yaml.load", "importlib.import_module",
}  # fmt: skip
# Assertions of our own order, not of anything that comes from outside: all that may be one, beside narrowing.
OWN_ORDER = {("kernels/linear.py", "inputs % word == 0")}


@dataclass(frozen=True)
class Module:
    path: Path
    name: str  # without the package's own
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]

    @property
    def imports(self) -> list[str]:
        """What it imports: of the package's own __init__ what it does not import when it is first used."""
        names = []
        for node in self.tree.body if self.name == "llama_ssp" else ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, "relative imports hide the room they come from"
                names += [f"{node.module}.{alias.name}" for alias in node.names]
        return names


def modules() -> Iterator[Module]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "llama_ssp"
        yield Module(path, name, ast.parse(path.read_text(encoding="utf-8")))


MODULES = list(modules())
NAMES = {module.name for module in MODULES}


def within(name: str) -> str | None:
    inner = name.removeprefix("llama_ssp.")
    options = (inner, inner.rpartition(".")[0]) if inner != name else ()
    return next((option for option in options if option in NAMES), None)


def test_imports_go_one_way():
    """No modules import each other, not even by way of others."""
    assert {module.room for module in MODULES} == PLACE.keys()
    for module in MODULES:
        for room in {other.partition(".")[0] for name in module.imports if (other := within(name))}:
            right = PLACE[room] > PLACE[module.room] or room == module.room
            assert right, f"{module.name} imports {room}"
    inner = {module.name: {*map(within, module.imports)} - {None, module.name} for module in MODULES}
    while leaves := [name for name, others in inner.items() if not others]:
        inner = {name: others - set(leaves) for name, others in inner.items() if name not in leaves}
    assert not inner, f"a circle among {sorted(inner)}"


def test_no_two_classes_have_one_name():
    """A reader who meets the name knows the class."""
    places = dict[str, str]()
    for module in MODULES:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                first = places.setdefault(node.name, module.name)
                assert first == module.name, f"{node.name} is a class of {first} and of {module.name}"


DECIDE_K = {"placing.draft_length", "placing.decision", "placing.request", "placing.prediction"}
READ_K = {"k", "k_max", "adaptive"}


def test_k_is_decided_in_one_place():
    """Nobody else reads what the user says of K: others take `fixed_k`, `longest` or a length of drafts."""
    readers = set()
    for module in MODULES:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and node.attr in READ_K:
                owner = ast.unparse(node.value)
                if owner.rpartition(".")[2] in ("spec", "speculation"):
                    readers.add(module.name)
    allowed = {name for name in readers if name.startswith("config.")}
    assert readers == allowed | DECIDE_K | {"speculative.draft_length"}


SPOKEN_TO = {"models.interface", "models.passes", "models.graph_sizes"}


def test_the_algorithm_knows_models_by_their_interface():
    """What speculative/ imports of models/ when it is imported; names for the type checker do not count."""
    for module in MODULES:
        if module.room != "speculative":
            continue
        for node in module.tree.body:
            if isinstance(node, ast.ImportFrom):
                name = within(str(node.module))
                is_model = name is not None and name.partition(".")[0] == "models"
                assert not is_model or name in SPOKEN_TO, f"{module.name} imports {name}"


def test_the_loop_imports_no_decoder_and_no_kernel():
    code = """
import sys
import llama_ssp.speculative.generate
models = [name for name in sys.modules if name.startswith("llama_ssp.models.")]
allowed = {"llama_ssp.models.interface", "llama_ssp.models.passes", "llama_ssp.models.graph_sizes"}
assert set(models) <= allowed, models
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_start_looks_for_no_toolkit_of_cuda():
    """torch's C++ extensions do, and print a line of their own where there is one and no GPU."""
    code = "import sys, llama_ssp.tasks.runner; sys.exit('torch.utils.cpp_extension' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_what_answers_without_torch():
    """Nor does anything that it imports, as it is imported."""
    light = [name for name in sorted(NAMES) if {name, name.split(".")[0]} & WITHOUT_TORCH]
    code = f"""
import importlib, sys
for name in {light}:
    importlib.import_module("llama_ssp." + name if name != "llama_ssp" else name)
    heavy = {{"torch", "transformers", "accelerate"}} & sys.modules.keys()
    assert not heavy, f"{{name}} imports {{heavy}}"
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_libraries_are_known_where_they_belong():
    """Transformers to models and tokenizers, torch.distributed to one folder, pickle to none."""
    for module in MODULES:
        roots = {name.partition(".")[0] for name in module.imports}
        assert not roots & FORBIDDEN_IMPORTS, module.name
        assert not roots & LIBRARIES or {module.room, module.name} & KNOWS_LIBRARIES, module.name
        named = {ast.unparse(node) for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)}
        named.update(module.imports)
        assert not named & FORBIDDEN_OF, module.name
        distributed = any(name.startswith("torch.distributed") for name in named)
        assert not distributed or module.room == "distributed", module.name


def test_forbidden_calls():
    """No code from data, no objects between ranks, no global seed; `trust_remote_code` is only ever False."""
    for module in MODULES:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")
                assert name[2] not in FORBIDDEN_CALLS or (name[1] and name[2] == "eval"), module.name
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert ast.unparse(node.value) == "False", module.name


def narrows(test: ast.expr) -> bool:
    """Whether an assertion says to the type checker what is known: that something is there, or of a class."""
    if isinstance(test, ast.BoolOp):
        return all(map(narrows, test.values))
    if isinstance(test, ast.Call):
        return ast.unparse(test.func) == "isinstance"
    return isinstance(test, ast.Compare) and [type(sign) for sign in test.ops] == [ast.IsNot]


def test_nothing_is_refused_by_an_assertion():
    """`python -O` takes assertions away: they tell the type checker something, and refuse nothing."""
    asserted = {
        ("/".join(module.path.parts[-2:]), ast.unparse(node.test))
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Assert) and not narrows(node.test)
    }
    assert asserted == OWN_ORDER
