"""Turns GGUF's blocks of bytes into codes and scales: (rows, blocks, bytes of a block) in, a `Coded` out.

The formats are those of ggml-quants. A weight is code * scale, less a shift in some; all is computed in fp32,
so that `Coded.decoded` gives the numbers of `gguf.quants.dequantize`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llama_ssp.models.formats.coded import Coded, Codes, packed
from llama_ssp.models.formats.gguf_header import KEPT

Parts = tuple[Tensor, Tensor, Tensor | None]  # codes, one in a byte; scales; shifts
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def coded(name: str, byte_NBS: Tensor) -> Coded:
    """The rows of a matrix in this format."""
    kind = Codes(KEPT[name].table, KEPT[name].group)
    code_NK, scale_NG, shift_NG = (
        None if part is None else part.flatten(1) for part in BLOCKS[name](byte_NBS)
    )
    assert code_NK is not None and scale_NG is not None
    codes_NC = packed(code_NK) if kind.bits == 4 else code_NK
    return Coded(kind, code_NK.shape[1], codes_NC, scale_NG, shift_NG=shift_NG)


def _half(byte: Tensor) -> Tensor:
    """Pairs of bytes as fp16 numbers, in fp32."""
    return byte.contiguous().view(torch.float16).float()


def _fields(byte: Tensor, bits: int, run: int) -> Tensor:
    """Fields of `bits` bits: of each `run` bytes all first fields, then all second ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    byte_NBP1R = byte.reshape(*byte.shape[:-1], -1, 1, run)
    return ((byte_NBP1R >> shifts) & ((1 << bits) - 1)).flatten(-3)


def _q4_0(byte: Tensor) -> Parts:
    return _fields(byte[..., 2:], 4, 16), _half(byte[..., :2]), None


def _q4_1(byte: Tensor) -> Parts:
    return _fields(byte[..., 4:], 4, 16), _half(byte[..., :2]), -_half(byte[..., 2:4])


def _q5_0(byte: Tensor) -> Parts:
    fifth = _fields(byte[..., 2:6], 1, 1)
    return (_fields(byte[..., 6:], 4, 16) | fifth << 4) - 16, _half(byte[..., :2]), None


def _q5_1(byte: Tensor) -> Parts:
    fifth = _fields(byte[..., 4:8], 1, 1)
    return _fields(byte[..., 8:], 4, 16) | fifth << 4, _half(byte[..., :2]), -_half(byte[..., 2:4])


def _q8_0(byte: Tensor) -> Parts:
    return byte[..., 2:], _half(byte[..., :2]), None


def _q2_k(byte: Tensor) -> Parts:
    scales, codes = byte[..., :16], _fields(byte[..., 16:80], 2, 32)
    return codes, _half(byte[..., 80:82]) * (scales & 15), _half(byte[..., 82:]) * (scales >> 4)


def _q3_k(byte: Tensor) -> Parts:
    """Codes of 3 bits, 4 to 11 of the table; scales of 6 bits: first the lower 4 of all, then the rest."""
    codes = _fields(byte[..., 32:96], 2, 32) + 4 * _fields(byte[..., :32], 1, 32) + 4
    scales = _fields(byte[..., 96:104], 4, 8) | _fields(byte[..., 104:108], 2, 4) << 4
    return codes, _half(byte[..., 108:]) * (scales.float() - 32), None


def _of_eight(byte: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and shifts of Q4_K and Q5_K: eight of 6 bits each, in the first 16 bytes of a block."""
    first, second, last = byte[..., 4:8], byte[..., 8:12], byte[..., 12:16]
    scales = torch.cat([first & 63, last & 15 | first >> 2 & 48], -1)
    shifts = torch.cat([second & 63, last >> 4 | second >> 2 & 48], -1)
    return _half(byte[..., :2]) * scales, _half(byte[..., 2:4]) * shifts


def _q4_k(byte: Tensor) -> Parts:
    return _fields(byte[..., 16:], 4, 32), *_of_eight(byte)


def _q5_k(byte: Tensor) -> Parts:
    return _fields(byte[..., 48:], 4, 32) | _fields(byte[..., 16:48], 1, 32) << 4, *_of_eight(byte)


def _q6_k(byte: Tensor) -> Parts:
    codes = _fields(byte[..., :128], 4, 64) | _fields(byte[..., 128:192], 2, 32) << 4
    scales = byte[..., 192:208].contiguous().view(torch.int8)
    return codes - 32, _half(byte[..., 208:]) * scales, None


# By format, how codes, scales and shifts are found.
BLOCKS: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
