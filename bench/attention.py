"""Attention of steps on a CPU against the memory's speed: ours, torch's of grouped heads, and one compiled.

    python bench/attention.py [heads=16] [kv_heads=2] [size=128] [seconds=3] [contexts=1024,4096,16384,32768]
                              [write=FILE.md]

For one token and for five (K = 4), with one thread and with two, milliseconds of one layer: the bytes of its
cache in bf16 at the bandwidth measured here (summing), our kernel's, torch's (scaled_dot_product_attention
with enable_gqa), those of `attend_rows` compiled for this very context, and the ratios to the first. There
are as many layers as no processor's cache holds. All take turns. The least time of each layer counts, as
disturbances only add time; in brackets is the ratio of the medians.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from surroundings import report  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402
from words import Words  # noqa: E402

from llama_ssp.models.attention import Places, Scores, attend_rows  # noqa: E402
from llama_ssp.models.kernels import attention as kernel  # noqa: E402
from llama_ssp.models.kernels import large_pages  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402

CPU = torch.device("cpu")
HELD = 128 * 2**20  # bytes of all layers: several times a processor's cache
BYTES, OURS, TORCH, COMPILED = "bytes", "ours", "torch", "compiled"
Work = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Settings(Words):
    heads: int = 16
    kv_heads: int = 2
    size: int = 128
    seconds: float = 3.0
    contexts: str = "1024,4096,16384,32768"
    write: str = ""


def layers_of(settings: Settings, context: int) -> list[list[Tensor]]:
    """Keys and values of each layer."""
    shape = settings.kv_heads, context, settings.size
    count = max(2, HELD // (4 * settings.kv_heads * settings.size * context))
    return [[large_pages.empty(shape, torch.bfloat16).normal_() for _ in "kv"] for _ in range(count)]


def works(settings: Settings, context: int, tokens: int) -> dict[str, Work]:
    """Every contender's attention, of a layer's keys and values."""
    places = Places.of([(0, context - tokens, tokens)], CPU)
    query_THD = torch.randn(tokens, settings.heads, settings.size).bfloat16()
    scores = Scores(settings.size**-0.5)
    mask_TS = torch.arange(context) <= places.position_T[:, None]

    def by_torch(keys_GND: Tensor, values_GND: Tensor) -> Tensor:
        query, keys, values = query_THD.transpose(0, 1)[None], keys_GND[None], values_GND[None]
        return functional.scaled_dot_product_attention(
            query, keys, values, mask_TS, scale=scores.scale, enable_gqa=True
        )

    return {
        OURS: lambda keys, values: kernel.attend(places, query_THD, keys, values, scores, None),
        TORCH: by_torch,
        COMPILED: torch.compile(
            lambda keys, values: attend_rows(places, query_THD, keys, values, scores, None), dynamic=False
        ),
    }


def timed(todo: dict[str, list[Callable[[], object]]], seconds: float) -> dict[str, Tensor]:
    """By name, milliseconds by turn and piece of work."""
    took: dict[str, list[list[float]]] = {name: [] for name in todo}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(took[BYTES]) < 3:
        for name, pieces in todo.items():
            took[name].append([])
            for piece in pieces:
                began = time.perf_counter()
                piece()
                took[name][-1].append(1000 * (time.perf_counter() - began))
    return {name: torch.tensor(turns) for name, turns in took.items()}


def line(settings: Settings, layers: list[list[Tensor]], summed: Tensor, tokens: int) -> list[str]:
    context = layers[0][0].shape[1]
    todo: dict[str, list[Callable[[], object]]] = {BYTES: [partial(torch.sum, piece) for piece in summed]}
    for name, work in works(settings, context, tokens).items():
        work(*layers[0])  # compiles
        todo[name] = [partial(work, *layer) for layer in layers]
    took = timed(todo, settings.seconds)
    took[BYTES] *= sum(part.nbytes for part in layers[0]) / summed[0].nbytes
    least = {name: float(times.amin(0).mean()) for name, times in took.items()}
    middle = {name: float(times.mean(1).median()) for name, times in took.items()}
    over = [(least[name] / least[BYTES], middle[name] / middle[BYTES]) for name in (OURS, TORCH, COMPILED)]
    ratios = [f"{ratio:.2f} ({of_medians:.2f})" for ratio, of_medians in over]
    return [str(context), str(tokens), *(f"{ms:.3f}" for ms in least.values()), *ratios]


def main() -> None:
    settings = Settings.of(sys.argv[1:])
    kernel.operators()
    names = OURS, TORCH, COMPILED
    table = [["threads", "context", "tokens", BYTES, *names, *(f"{name} / bytes" for name in names)]]
    summed = large_pages.empty((16, HELD // 64), torch.float32).fill_(1)
    with torch.inference_mode():
        for context in map(int, settings.contexts.split(",")):
            layers = layers_of(settings, context)
            for threads, tokens in itertools.product((1, 2), (1, 5)):
                torch.set_num_threads(threads)
                table.append([str(threads), *line(settings, layers, summed, tokens)])
    report(
        settings.write, "Attention of steps on a CPU against the memory's speed", {},
        f"A layer of {settings.heads} heads, {settings.kv_heads} of keys and values, of {settings.size}; "
        "milliseconds.",
        "", "```", *aligned(table, 0), "```",
    )  # fmt: skip


if __name__ == "__main__":
    main()
