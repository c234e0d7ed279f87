"""The command on the pair that ships, at its default size: a planted fault, and none.

`python -m tests.certify_faults` runs it on every fault; tests/test_certify.py has them on small models.
"""

from __future__ import annotations

import pytest

from tests.certify_faults import rows

ROWS = {row.name: row for row in rows(seeds=1)}
SOME = ["coins are drafts' numbers in 1 % of rounds", "sound code"]  # the fault that is hardest to see


@pytest.mark.long
@pytest.mark.parametrize("name", SOME)
def test_the_verdict_and_the_check_are_those_that_are_due(name: str) -> None:
    is_right, line = ROWS[name].certified()
    assert is_right and ROWS[name].check in line, line
