"""Every planted fault is caught: the proofs can fail, each for the reason it exists."""

from __future__ import annotations

import pytest

from tests.proofs.mutants import MUTANTS, healthy, strict_draws, verdict


@pytest.mark.few(6)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_fault_is_caught(mutant):
    assert healthy(mutant.caught_by) is None, "the proof fails without the fault"
    assert verdict(mutant), f"the planted fault lives: {mutant.name}"


def test_enough_faults():
    assert len(MUTANTS) >= 16


def test_the_healthy_draws_are_strict():
    assert strict_draws() is None
