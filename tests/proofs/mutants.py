"""Planted faults: the proofs can fail, each for the reason it exists. `make mutants` prints the table.

A fault takes the place of one public method, function or property of the code that ships (of a `Rule`, a
`Drafter`, `Draws`, a cache, a pass, the state, ...) and is called with the original first. Those of the rules
and of drafts are in wrong_rules.py, all others in wrong_runs.py. Each stands under its row: what is wrong,
where it is planted, and the tests that must fail, exact ones by a total variation above 0 (fractions) or
above 1e-12 (fp64), others by their own comparison. Without a fault all of them must pass.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import import_module
from pkgutil import resolve_name
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch


@dataclass(frozen=True)
class Proof:
    """A test, called with these arguments."""

    module: str
    test: str
    given: tuple[Any, ...]

    def fails(self) -> bool:
        try:
            getattr(import_module(f"tests.{self.module}"), self.test)(*self.given)
        except AssertionError:
            return True
        return False


@cache
def is_sound(proof: Proof) -> bool:
    """Whether the test passes without a fault; faults that share a test share this."""
    return not proof.fails()


@dataclass(frozen=True)
class Mutant:
    """A fault, the places of the package where it is planted, and the tests that must fail."""

    name: str
    places: str
    proofs: tuple[Proof, ...]
    wrong: Callable[..., Any]

    @contextmanager
    def planted(self) -> Iterator[None]:
        with ExitStack() as stack:
            for place in self.places.split():
                module, _, names = place.partition(":")
                owner, _, name = names.rpartition(".")
                owner = resolve_name(f"llama_ssp.{module}:{owner}")
                stack.enter_context(patch.object(owner, name, self._instead_of(owner, name)))
            yield

    def _instead_of(self, owner: Any, name: str) -> Any:
        original = inspect.getattr_static(owner, name)
        if isinstance(original, property | cached_property):
            getter = original.fget if isinstance(original, property) else original.func
            return property(lambda own: self.wrong(getter, own))
        if isinstance(original, ModuleType):
            return self.wrong(original)
        return lambda *given, **how: self.wrong(original, *given, **how)

    def is_caught(self) -> bool:
        with self.planted():
            return all(proof.fails() for proof in self.proofs)


MUTANTS: dict[str, Mutant] = {}


def fault(name: str, places: str, *proofs: Proof) -> Callable[[Any], Any]:
    """Lists the fault that follows."""

    def listed(wrong: Any) -> Any:
        assert name not in MUTANTS
        MUTANTS[name] = Mutant(name, places, proofs, wrong)
        return wrong

    return listed


def chosen(wrong: Any) -> Callable[[Any], Any]:
    """Makes faults of a function that is told, before the original, what to do."""
    return partial(partial, wrong)


def proof(module: str, test: str, *given: Any) -> Proof:
    return Proof(module, test, given)


def walked(name: str, rule: str = "block") -> Proof:
    return proof("proofs.test_loop_exact", "test_joint_distribution_of_whole_texts", name, rule)


def every() -> dict[str, Mutant]:
    for part in ("rules", "runs"):
        import_module(f"tests.proofs.wrong_{part}")
    return MUTANTS


def main() -> int:
    torch.set_num_threads(1)
    lived = 0
    for number, mutant in enumerate(every().values(), start=1):
        sound = all(map(is_sound, mutant.proofs))  # first: it imports the tests without the fault
        caught = mutant.is_caught()
        lived += not (caught and sound)
        said = "caught" if caught and sound else "LIVES" if sound else "ITS TEST FAILS WITHOUT IT"
        tests = ", ".join(f"{proof.test}({', '.join(map(str, proof.given))})" for proof in mutant.proofs)
        print(f"{number:2}  {mutant.name:60}  {said}  {tests}", flush=True)
    print(f"{len(MUTANTS) - lived} of {len(MUTANTS)} planted faults caught")
    return 1 if lived else 0


if __name__ == "__main__":
    from tests.proofs import mutants  # under its own name: what the faults are listed in

    sys.exit(mutants.main())
