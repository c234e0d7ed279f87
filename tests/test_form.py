"""Fields and arguments go by name, tables are literals, an `if` is an `if`: what of it a syntax tree shows.

Each rule is a function that yields the offending nodes of a module. Controls: every rule has small sources
that it must refuse, and others, as near to them as can be, that it must let pass.
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain

import pytest

from tests.test_layers import MODULES, PACKAGE, Module

# Folders (without those inside them) and loose files where some rule does not hold yet. It can only shrink:
# a place that keeps all rules must leave it, and no place may be added.
ROOMS_TO_DO: set[str] = set()

MAX_UNNAMED = 5  # fields of a class that may be given by position

# What may offend, by module and by the function that is defined or the class that is built, and the reason.
EXCEPTIONS = {
    ("models.causal_lm", "mask"): "takes the place of a function of transformers, with its arguments",
    ("models.causal_lm", "update"): "transformers gives a cache's update further arguments",
    ("models.hub", "__init__"): "takes the place of a class of the library, with its arguments",
    ("models.kept_files", "place_of"): "a file's name is made of any facts",
    ("pair.api", "__exit__"): "Python gives the error, its class and its traceback",
    ("report.console", "__exit__"): "Python gives the error, its class and its traceback",
    ("tasks.harness_model", "__init__"): "lm-eval gives what the user wrote in model_args",
    ("tasks.harness_model", "_loglikelihood_tokens"): "lm-eval gives further arguments",
    ("tasks.harness_model", "tok_encode"): "lm-eval gives further arguments",
}

# Classes of libraries that take any number of equal arguments, so that a list of them is the plain way.
TAKE_MANY = {"Group", "Path"}

Node = ast.AST
Rule = Callable[[ast.AST], Iterator[Node]]


@cache
def nodes(tree: Node) -> list[Node]:
    """All nodes of a tree; kept, as every rule walks every module."""
    return list(ast.walk(tree))


def last_name(node: Node) -> str:
    """The name that an expression ends with: `c` of `a.b.c`; empty where it ends with none."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def name_of(node: Node) -> str:
    """The function or class that a node defines, or the class that it builds."""
    return last_name(node.func) if isinstance(node, ast.Call) else str(getattr(node, "name", ""))


def calls(tree: Node) -> Iterator[ast.Call]:
    return (node for node in nodes(tree) if isinstance(node, ast.Call))


def classes(trees: Iterable[Node]) -> Iterator[ast.ClassDef]:
    return (node for tree in trees for node in nodes(tree) if isinstance(node, ast.ClassDef))


def count_of_fields(node: ast.ClassDef) -> int:
    """How many fields a class body declares. Inherited ones are not counted."""
    declared = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    return sum("ClassVar" not in ast.unparse(item.annotation) for item in declared)


def is_dataclass(node: ast.ClassDef) -> bool:
    return any(
        last_name(item.func if isinstance(item, ast.Call) else item) == "dataclass"
        for item in node.decorator_list
    )


def has_keyword_only(node: ast.ClassDef) -> bool:
    arguments = (item.keywords for item in node.decorator_list if isinstance(item, ast.Call))
    return any(ast.unparse(item) == "kw_only=True" for item in chain(*arguments))


def wide_tuples(trees: Iterable[Node]) -> set[str]:
    """The NamedTuples of many fields."""
    return {
        node.name
        for node in classes(trees)
        if any(last_name(base) == "NamedTuple" for base in node.bases) and count_of_fields(node) > MAX_UNNAMED
    }


def error_classes(trees: Iterable[Node], known: Iterable[str] = ("RunError",)) -> set[str]:
    """The names of our own errors: those that are known, and what inherits from one of them."""
    bases = {node.name: {last_name(base) for base in node.bases} for node in classes(trees)}
    result = set(known)
    while new := {name for name, above in bases.items() if above & result} - result:
        result |= new
    return result


ALL_TREES = [module.tree for module in MODULES]
ERRORS = error_classes(ALL_TREES)
WIDE_TUPLES = wide_tuples(ALL_TREES)


def many_fields_go_by_name(tree: Node) -> Iterator[Node]:
    """A dataclass of six fields is keyword-only, and a NamedTuple of six is built by keywords."""
    for node in classes([tree]):
        if is_dataclass(node) and count_of_fields(node) > MAX_UNNAMED and not has_keyword_only(node):
            yield node
    tuples = WIDE_TUPLES | wide_tuples([tree])
    for call in calls(tree):
        if last_name(call.func) in tuples and call.args:
            yield call


def no_class_is_built_by_splatting(tree: Node) -> Iterator[Node]:
    """No `Class(*values)`; no `Class(**values)` unless `values` are the keywords that a function was given.

    A class is what begins with a capital letter and has a small one (`Class`, not `TABLE`), and `cls`. Not
    seen: classes under another name (`super().__init__(*values)`, `build = Class`, a class from a table),
    what `replace` and `partial` are given, and tuples splatted into functions.
    """
    for call, given in calls_with_keywords(tree, frozenset()):
        name = last_name(call.func).lstrip("_")
        is_class = name[:1].isupper() and not name.isupper()
        if not (is_class or name == "cls") or name in TAKE_MANY:
            continue
        splats = any(isinstance(item, ast.Starred) for item in call.args)
        made = any(item.arg is None and ast.unparse(item.value) not in given for item in call.keywords)
        if splats or made:
            yield call


def calls_with_keywords(tree: Node, given: frozenset[str]) -> Iterator[tuple[ast.Call, frozenset[str]]]:
    """Yields calls, each with the names of the `**keywords` of the functions around it."""
    for node in ast.iter_child_nodes(tree):
        inside = given
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and node.args.kwarg:
            inside = given | {node.args.kwarg.arg}
        if isinstance(node, ast.Call):
            yield node, given
        yield from calls_with_keywords(node, inside)


def arguments_have_names_and_types(tree: Node) -> Iterator[Node]:
    """No parameter `*others: Any` or `**what: Any`. A lambda's have no types, and are not seen."""
    for node in nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        rest = [item for item in (node.args.vararg, node.args.kwarg) if item and item.annotation]
        if any(ast.unparse(item.annotation) in ("Any", "object") for item in rest if item.annotation):
            yield node


def tables_are_literals(tree: Node) -> Iterator[Node]:
    """No `+=` or `|=` when a module is imported, whether or not inside an `if`, `for` or `with`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.AugAssign):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from tables_are_literals(node)


def facts_of_errors_have_names(tree: Node) -> Iterator[Node]:
    """Everything that an error of ours is given goes by keyword, except what happened, which is first."""
    names = error_classes([tree], known=ERRORS)
    for call in calls(tree):
        is_splat = any(isinstance(item, ast.Starred) for item in call.args)
        if last_name(call.func) in names and (len(call.args) > 1 or is_splat):
            yield call


def each_value_has_its_assignment(tree: Node) -> Iterator[Node]:
    """No `a, b = x, y`, unless it swaps. A call's result, or any other one thing, may be unpacked.

    Not seen: a tuple that an `if` chooses (`a, b = (x, y) if c else (z, w)`), or a comprehension makes.
    """
    for node in nodes(tree):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.List)):
            continue
        values = sorted(map(ast.unparse, node.value.elts))
        for target in node.targets:
            if isinstance(target, ast.Tuple | ast.List) and sorted(map(ast.unparse, target.elts)) != values:
                yield node


def nothing_is_chosen_by_multiplying(tree: Node) -> Iterator[Node]:
    """No product with what is true or false, as far as its form shows."""
    for node in nodes(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            factors = [node.left, node.right]
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
            factors = [node.value]
        else:
            continue
        if any(map(is_truth, factors)):
            yield node


def no_choice_is_inside_another(tree: Node) -> Iterator[Node]:
    """No `a if x else b if y else c`, and no conditional expression inside another: an `if` says it."""
    for node in nodes(tree):
        if isinstance(node, ast.IfExp):
            inner = [item for item in nodes(node) if isinstance(item, ast.IfExp)]
            if len(inner) > 1:
                yield node


def is_truth(node: Node) -> bool:
    """Whether it is a comparison, a `not`, `bool(...)`, `isinstance(...)`, or named like a bool."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("bool", "isinstance")
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    return isinstance(node, ast.Compare) or last_name(node).lstrip("_").startswith(("is_", "has_"))


RULES: tuple[Rule, ...] = (
    many_fields_go_by_name,
    no_class_is_built_by_splatting,
    arguments_have_names_and_types,
    tables_are_literals,
    facts_of_errors_have_names,
    each_value_has_its_assignment,
    nothing_is_chosen_by_multiplying,
    no_choice_is_inside_another,
)
BY_RULE = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)


@cache
def offending(rule: Rule) -> list[tuple[Module, Node]]:
    """Each node of the package that offends, with its module."""
    return [(module, node) for module in MODULES for node in rule(module.tree)]


def offences(rule: Rule) -> Iterator[tuple[str, str]]:
    """Yields the place and the line of each node that offends, without the exceptions."""
    for module, node in offending(rule):
        if (module.name, name_of(node)) in EXCEPTIONS:
            continue
        path = module.path.relative_to(PACKAGE)
        place = path.name if path.parent.name == "" else path.parent.as_posix()
        yield place, f"{path}:{node.lineno}: {ast.unparse(node).splitlines()[0]}"


@BY_RULE
def test_the_rule_holds_outside_the_rooms_to_do(rule):
    broken = [line for place, line in offences(rule) if place not in ROOMS_TO_DO]
    assert not broken, "\n".join([str(rule.__doc__), *broken])


def test_a_room_to_do_still_has_an_offence():
    left = {place for rule in RULES for place, _ in offences(rule)}
    assert left >= ROOMS_TO_DO, f"these keep all rules, and must leave the list: {ROOMS_TO_DO - left}"


def test_an_exception_still_offends():
    left = {(module.name, name_of(node)) for rule in RULES for module, node in offending(rule)}
    assert left >= EXCEPTIONS.keys(), f"these are no exceptions any more: {EXCEPTIONS.keys() - left}"


SIX = "; ".join(f"{name}: int" for name in "abcdef")
REFUSED = {
    many_fields_go_by_name: [
        f"@dataclass\nclass Wide:\n    {SIX}",
        f"@dataclass(frozen=True)\nclass Wide:\n    {SIX}",
        f"@dataclasses.dataclass(kw_only=False)\nclass Wide:\n    {SIX}",
        f"class Wide(NamedTuple):\n    {SIX}\nwide = Wide(1, b=2, c=3, d=4, e=5, f=6)",
    ],
    no_class_is_built_by_splatting: [
        "Plan(*sizes)",
        "Plan(1, *sizes[:3])",
        "models.Plan(*(a, b))",
        "cls(*sizes)",
        "_Plan(*sizes)",
        "Plan(**{'a': 1})",
        "how = {'a': 1}\nPlan(**how)",
        "def f(**how: int): ...\ndef g():\n    how = {'a': 1}\n    return Plan(**how)",
        "def f(**how: int): return Plan(**self.how)",
    ],
    arguments_have_names_and_types: [
        "def f(first: int, *others: Any) -> None: ...",
        "def f(**what: Any) -> None: ...",
        "class A:\n    async def f(self, *others: object) -> None: ...",
    ],
    tables_are_literals: [
        "TABLE = [1]\nTABLE += [2]",
        "NAMES |= {'a'}",
        "if LINUX:\n    TABLE += [2]",
        "for name in NAMES:\n    COUNT += 1",
        "class A:\n    TABLE = [1]\n    TABLE += [2]",
    ],
    facts_of_errors_have_names: [
        "raise ModelError('it is broken', path)",
        "return errors.UsageError('it is broken', path, fix='mend it')",
        "ModelError(*facts)",
        "class Own(DataError): ...\nraise Own('it is broken', path)",
    ],
    each_value_has_its_assignment: [
        "a, b = x, y",
        "a, b = 0, 0",
        "self.a, b = f(), 1",
        "a, *b = x, *y",
        "(a, b), c = f(), d",
        "[a, b] = [x, y]",
        "a, b = b, a + b",
    ],
    nothing_is_chosen_by_multiplying: [
        "text * (n > 1)",
        "(not n) * text",
        "'s' * is_many",
        "[1] * self._has_more",
        "number * isinstance(error, OSError)",
        "number * bool(error)",
        "number *= n > 1",
    ],
    no_choice_is_inside_another: [
        "a = x if p else y if q else z",
        "a = (x if p else y) if q else z",
        "a = f(x if p else y) if q else z",
    ],
}
ALLOWED = {
    many_fields_go_by_name: [
        f"@dataclass(frozen=True, kw_only=True)\nclass Wide:\n    {SIX}",
        "@dataclass\nclass Narrow:\n    a: int; b: int; c: int; d: int; e: int; f: ClassVar[int] = 0",
        f"class Plain:\n    {SIX}",
        f"class Wide(NamedTuple):\n    {SIX}\nwide = Wide(a=1, b=2, c=3, d=4, e=5, f=6)",
    ],
    no_class_is_built_by_splatting: [
        "Plan(sizes)",
        "build(*sizes)",
        "TABLE(*sizes)",
        "Path(*parts)",
        "rich.console.Group(*lines)",
        "def f(**how: int): return Plan(**how)",
    ],
    arguments_have_names_and_types: [
        "def f(*others: int, **what: str) -> None: ...",
        "def f(others: Any) -> None: ...",
    ],
    tables_are_literals: ["def f():\n    a = 0\n    a += 1", "TABLE = [1, 2]"],
    facts_of_errors_have_names: [
        "raise ModelError('it is broken', where=path, fix='mend it')",
        "raise ValueError(1, 2)",
    ],
    each_value_has_its_assignment: [
        "a, b = b, a",
        "a, b = f()",
        "a = b = 0",
        "a = x, y",
        "for a, b in pairs: ...",
    ],
    nothing_is_chosen_by_multiplying: ["text * n", "text if n > 1 else ''", "has_more(n) * 2", "n > 1 * m"],
    no_choice_is_inside_another: ["a = x if p else y", "a = [x if p else y, z if q else w]"],
}


def planted(sources: dict[Rule, list[str]]) -> list[object]:
    return [
        pytest.param(rule, source, id=f"{rule.__name__}-{number}")
        for rule, items in sources.items()
        for number, source in enumerate(items)
    ]


@pytest.mark.parametrize(("rule", "source"), planted(REFUSED))
def test_a_rule_refuses_what_offends(rule, source):
    assert [*rule(ast.parse(source))], source


@pytest.mark.parametrize(("rule", "source"), planted(ALLOWED))
def test_a_rule_lets_pass_what_does_not_offend(rule, source):
    assert not [*rule(ast.parse(source))], source


@BY_RULE
def test_every_rule_has_its_controls(rule):
    assert REFUSED[rule]
    assert ALLOWED[rule]
