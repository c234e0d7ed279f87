"""What bench/fast.py requires besides texts: steps, prefill, starts, and the pair that ships."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bars import Bar, most
from contenders import alone, in_turn
from start import started

from llama_ssp.pair.session import PairSession, regular
from llama_ssp.speculative.state import Prompt

LENGTH = 64  # of the text before a step
PROMPTS = (64, 512, 2048)  # lengths of texts that are prefilled
COLD_S, WARM_S = 23.5, 3.0  # half of the first start in start_epyc-2-cores_202611.md, and about the second
SHIPPED_OVER_REGULAR = 1.5


def steps_ms(
    pair: PairSession, widths: tuple[int, ...], clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Milliseconds of the target's steps of these numbers of tokens, alone, by the number."""
    return in_turn({str(width): alone(pair.models.target, LENGTH, width) for width in widths}, 25, clock)


def prefill_bars(pair: PairSession, module: Any, turns: int = 3) -> list[Bar]:
    """The target's prefill of one text against transformers' pass over the same tokens, with a cache."""
    found = []
    for length in PROMPTS:
        text = tuple(100 + i % 4000 for i in range(length + 1))  # the last token is not prefilled
        ids = torch.tensor([text[:-1]], device=module.device)

        def ours(text: tuple[int, ...] = text) -> object:
            return pair.engine(0, regular(pair.run), frozenset()).prefill([Prompt("0", text)], 1)

        @torch.inference_mode()
        def theirs(ids: torch.Tensor = ids) -> object:
            return module(ids, use_cache=True, logits_to_keep=1)

        taken = in_turn({"ours": ours, "theirs": theirs}, turns)
        ratios = [their / our for our, their in zip(taken["ours"], taken["theirs"], strict=True)]
        what = f"prefill of {length} tokens, over transformers'"
        found.append(Bar(what, median(ratios), 1.0, note=f"{median(taken['ours']):.0f} ms"))
    return found


def start_bars(threads: int, small: bool) -> list[Bar]:
    """Seconds until the pair is ready: with empty caches, and again."""
    with tempfile.TemporaryDirectory() as caches:
        cold, warm = (started("compiled", threads, small, caches)[0] for _ in range(2))
    return [most("cold start, s", cold, COLD_S), most("warm start, s", warm, WARM_S)]


def shipped_bars(repeats: int, new: int) -> list[Bar]:
    """The pair that ships, with default settings, by bench/side_by_side.py."""
    script = Path(__file__).with_name("side_by_side.py")
    command = [sys.executable, str(script), f"repeats={repeats}", f"new={new}", "ks=2,4,6,8"]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    theirs, _, *speculative = json.loads(said.splitlines()[-1])["rows"]
    best = max(speculative, key=lambda row: row["faster_than_regular"])
    least, middle, top = (1 / theirs[key] for key in ("most", "faster_than_regular", "least"))
    spread = f"{best['least']:.2f}..{best['most']:.2f}"
    return [
        Bar("the pair that ships: regular over transformers'", middle, 1.0, note=f"{least:.2f}..{top:.2f}"),
        Bar(f"{best['name']}, over regular", best["faster_than_regular"], SHIPPED_OVER_REGULAR, note=spread),
    ]
