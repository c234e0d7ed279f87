"""Every planted fault is caught: the tests that its row names fail with it, and pass without it."""

import pytest

from tests.proofs.mutants import every, is_sound


@pytest.mark.parametrize("mutant", list(every().values())[::14], ids=lambda mutant: mutant.name)
def test_fault_is_caught(mutant):
    assert all(map(is_sound, mutant.proofs)), "the proof fails without the fault"
    assert mutant.is_caught(), f"the planted fault lives: {mutant.name}"


@pytest.mark.long
@pytest.mark.slow
def test_every_fault_is_caught():
    """In one process, which shows once that a proof is sound."""
    living = [
        mutant.name
        for mutant in every().values()
        if not (all(map(is_sound, mutant.proofs)) and mutant.is_caught())
    ]
    assert not living


def test_faults_are_planted_through_public_names():
    """So that no fault is lost when a private name changes."""
    names = [name for mutant in every().values() for name in mutant.places.replace(":", ".").split(".")]
    assert not [name for name in names if name.startswith("_") and not name.endswith("__")]
    assert len(every()) > 70
