"""Quantised matrices in memory: what their codes mean, and cuts of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llama_ssp.models.formats import coded
from llama_ssp.models.formats.coded import TABLES, Coded, Codes, joined, packed, unpacked, values
from llama_ssp.models.sharding import COLUMNS, ROWS, Cut
from tests.test_coded_linear import held

INPUTS = 160


def made(table: str, group: int, outputs: int = 12, **how: Any) -> Coded:
    """A matrix of random codes, with zeros if its codes are unsigned, else with a shift."""
    return held(outputs, INPUTS, table, group, "zero" if table.startswith("u") else "shift", **how)


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_a_value_for_every_code_and_is_exact_in_16_bit(table: str) -> None:
    found = values(table)
    assert len(found) == 1 << Codes(table).bits
    rounded = found.bfloat16().float()
    assert (table in ("nf4", "fp4")) != torch.equal(rounded.nan_to_num(), found.nan_to_num())


def test_codes_of_4_bit_are_packed_two_in_a_byte() -> None:
    code_NK = torch.tensor([[1, 2, 3]], dtype=torch.uint8)
    assert packed(code_NK).tolist() == [[0x21, 0x03]]
    assert unpacked(packed(code_NK)).tolist() == [[1, 2, 3, 0]]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_matrix_is_decoded_a_weight_at_a_time(table: str, group: int, dtype: torch.dtype) -> None:
    """In the type of the scales, with the last group shorter (160 inputs in groups of 128)."""
    matrix = made(table, group, dtype=dtype, unit=1 / 127)
    weight_NK = matrix.decoded(torch.float32)
    code_NK = unpacked(matrix.codes_NC) if matrix.kind.bits == 4 else matrix.codes_NC
    for n, k in ((0, 0), (3, 31), (5, 127), (5, 128), (11, 159)):
        g = k // group if group else 0
        value = values(table)[int(code_NK[n, k])].to(dtype)
        if matrix.zero_NG is not None:
            value = value - matrix.zero_NG[n, g].to(dtype)
        value = value * matrix.scale_NG[n, g] * (1 / 127)
        if matrix.shift_NG is not None:
            value = value - matrix.shift_NG[n, g]
        torch.testing.assert_close(weight_NK[n, k], value.float(), rtol=0, atol=0, equal_nan=True)


def test_rows_are_decoded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = made("uint4", 32)
    whole = matrix.decoded(torch.float32)
    monkeypatch.setattr(coded, "DECODED_AT_ONCE", 5 * INPUTS)
    assert torch.equal(matrix.decoded(torch.float32), whole)


@pytest.mark.parametrize("table", ["uint4", "int8", "e4m3"])
@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize(
    "cut",
    [
        None,
        Cut(ROWS, ((3, 7),)),
        Cut(ROWS, ((0, 2), (9, 12))),
        Cut(COLUMNS, ((0, 128),)),
        Cut(COLUMNS, ((128, 160),)),
        Cut(COLUMNS, ((64, 130),)),  # from the middle of a group to the middle of the next
        Cut(COLUMNS, ((6, 17),)),
    ],
)
def test_a_part_has_the_weights_of_the_whole(table: str, group: int, cut: Cut | None) -> None:
    matrix = made(table, group)
    part, whole = matrix.cut(cut), matrix.decoded(torch.float32)
    if cut is not None:
        whole = torch.cat([whole.narrow(cut.dim, a, b - a) for a, b in cut.spans], cut.dim)
    assert part.shape == whole.shape
    torch.testing.assert_close(part.decoded(torch.float32), whole, rtol=0, atol=0, equal_nan=True)


def test_a_part_has_memory_of_its_own() -> None:
    """A slice may be a view of a file, and would keep all of it in memory."""
    matrix = made("uint4", 32)
    for cut in (None, Cut(ROWS, ((3, 7),)), Cut(COLUMNS, ((32, 64),))):
        part = matrix.cut(cut)
        held = [part.codes_NC, part.scale_NG, part.zero_NG]
        of_whole = {each.untyped_storage().data_ptr() for each in (matrix.codes_NC, matrix.scale_NG)}
        for each in held:
            assert each is not None and each.is_contiguous()
            assert each.untyped_storage().data_ptr() not in of_whole
            assert each.untyped_storage().nbytes() == each.nbytes
        assert part.nbytes == sum(each.nbytes for each in held if each is not None)


def test_a_byte_of_two_codes_is_not_cut() -> None:
    with pytest.raises(ValueError, match="before input 3"):
        made("uint4", 32).cut(Cut(COLUMNS, ((3, 9),)))


def test_matrices_are_joined_by_their_outputs() -> None:
    parts = [made("uint4", 32, outputs) for outputs in (12, 8, 20)]
    weights = torch.cat([each.decoded(torch.float32) for each in parts])
    assert torch.equal(joined(parts).decoded(torch.float32), weights)
    with pytest.raises(ValueError, match="different codes"):
        joined([made("uint4", 32), made("uint4", 128)])
