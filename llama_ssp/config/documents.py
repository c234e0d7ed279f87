"""The published write-ups that conf/experiment makes anew, with the figures that they give. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

Figures = dict[str, float]
REGULAR, SPECULATIVE = "regular", "speculative"


@dataclass(frozen=True)
class Document:
    """A write-up: where its figures were measured, and its rows, named as this program's tables name them.

    A row has `ms_per_token`, `speedup`, `acceptance_rate` and `score` as far as they are given. `overlap` is
    the dial of synthetic drafts that stand in for its own.
    """

    title: str
    machine: str
    overlap: float
    rows: dict[str, Figures] = field(default_factory=dict)


def _speeds(**ms_per_token: float) -> dict[str, Figures]:
    return {name.removeprefix("_"): {"ms_per_token": value} for name, value in ms_per_token.items()}


DOCUMENTS = {
    "amd2024": Document(
        "Speculative decoding of GPT-NeoX-20B with GPT-Neo-1.3B (ROCm blog, October 2024)",
        "one AMD GPU, K = 4, 50 tokens", 0.7,
        {
            REGULAR: {"ms_per_token": 77.2},
            SPECULATIVE: {"ms_per_token": 57.0, "speedup": 1.35},
        },
    ),
    "clay2024": Document(
        "SmolLM2-1.7B-Instruct with SmolLM2-135M-Instruct (implementation note, November 2024)",
        "one GPU, K = 10, 100 tokens", 0.83,
        {
            "target alone": {"ms_per_token": 35.8},
            "draft alone": {"ms_per_token": 10.7},
            "pair": {"ms_per_token": 28.4, "speedup": 1.26, "acceptance_rate": 0.41},
        },
    ),
    "llamassp2023": Document(
        "llama-ssp of 2023: LLaMA-1, regular and with 7B as the draft",
        "p4d.24xlarge (8 A100-40GB), K = 4, 64 tokens, temperature 0.5", 0.8,
        {
            **_speeds(_7B_8bit=215, _7B=70, _13B=125, _30B=330, _65B=610),
            "13B/7B": {"ms_per_token": 114, "speedup": 1.1},
            "30B/7B": {"ms_per_token": 180, "speedup": 1.8},
            "65B/7B": {"ms_per_token": 270, "speedup": 2.25},
        },
    ),
    "llamassp2023_g5": Document(
        "llama-ssp of 2023: LLaMA-1 in 8 bit, regular and with 7B as the draft",
        "g5.12xlarge (4 A10G), K = 4, 64 tokens, temperature 0.5", 0.8,
        {
            **_speeds(_7B=86, _7B_8bit=210, _13B_8bit=270, _30B_8bit=405, _65B_8bit=530),
            "13B_8bit/7B_8bit": {"ms_per_token": 330, "speedup": 0.82},
            "30B_8bit/7B_8bit": {"ms_per_token": 370, "speedup": 1.09},
        },
    ),
    "llamassp2023_score": Document(
        "llama-ssp of 2023: multiplications, regular and with 7B as the draft",
        "4000 prompts a row, intervals of +-1.5 points", 0.8,
        {
            "7B": {"score": 0.284}, "13B": {"score": 0.429}, "30B": {"score": 0.501},
            "7B/7B": {"score": 0.281}, "13B/7B": {"score": 0.431}, "30B/7B": {"score": 0.496},
        },
    ),
    "guha": Document(
        "Llama-3.1-8B with Llama-3.2-1B, greedy: how far do they agree (course notebook)",
        "one GPU; it gives no figures to compare with", 0.97,
    ),
}  # fmt: skip
