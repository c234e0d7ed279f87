"""The shipped head beside the shipped draft model, n-grams and regular decoding, in one interleaved run.

    python bench/heads.py [head=demo_head] [temperatures=0,0.5,1] [ks=2,4,6] [trees=4x1] [new=96] [repeats=5]
                          [threads=2] [write=FILE.md]

Every repeat runs each contender once, in turn, on the same prompts; the first repeat does not count. `trees`
are drafts x siblings of the head. Times are decoding only, as of bench/side_by_side.py.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from side_by_side import HEAD, PROMPTS, REGULAR, Turn, by_us, line, measured  # noqa: E402
from surroundings import surroundings, write  # noqa: E402
from words import Words  # noqa: E402

from llama_ssp.config import register  # noqa: E402
from llama_ssp.config.presets import CONF  # noqa: E402
from llama_ssp.config.short_forms import in_full  # noqa: E402
from llama_ssp.config.validation import to_run  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.planner.resolve import pair_specs  # noqa: E402
from llama_ssp.report.run_folder import versions  # noqa: E402

USUAL = ["model=demo", "engine=compiled", "placement=cpu", "speculation.adaptive=true"]  # measures the costs


@dataclass
class Asked(Words):
    """The command line."""

    head: str = "demo_head"
    temperatures: str = "0,0.5,1"
    ks: str = "2,4,6"
    trees: str = "4x1"
    new: int = 96
    repeats: int = 5
    threads: int = 2
    write: str = ""


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    torch.set_num_threads(asked.threads)
    register()
    new, ks = asked.new, [int(k) for k in asked.ks.split(",")]
    trees = [tuple(map(int, tree.split("x"))) for tree in asked.trees.split(",") if tree]
    room = max([0, *(siblings for _, siblings in trees)])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        pairs = {
            "head": opened([f"draft={asked.head}", f"speculation.siblings={room}"], new),
            "draft model": opened(["draft=demo_draft"], new),
            "n-grams": opened(["draft=none", "speculation=ngram"], new),
        }
    works = {
        float(heat): contenders(pairs, float(heat), new, ks, trees) for heat in asked.temperatures.split(",")
    }
    found = measured(works, asked.repeats)
    shares = [
        f"{name} {pair.costs.draft / pair.costs.verify[0]:.3f}" for name, pair in pairs.items() if pair.costs
    ]
    rows = [(heat, row) for heat, each in found.items() for row in each]
    text = "\n".join([
        "# The shipped head beside the shipped draft model and n-grams", "",
        *surroundings(pairs["head"].models.devices),
        f"Batch 1, {len(PROMPTS)} prompts, {new} new tokens, {asked.threads} threads, {asked.repeats} "
        "interleaved repeats. Ratios are medians, with the least and the most; tokens/forward: a round's.",
        f"A draft step over a target step: {', '.join(shares)}. s: siblings of each draft.",
        "", *HEAD, *(line(heat, row) for heat, row in rows), "",
    ])  # fmt: skip
    print(text)
    print(json.dumps({"rows": [{"temperature": heat, **row} for heat, row in rows], "versions": versions()}))
    if asked.write:
        write(asked.write, text)


def opened(words: list[str], new: int) -> PairSession:
    """The demo model with these drafts, ready."""
    run = to_run(compose("run", in_full([*USUAL, *words])))
    return PairSession(pair_specs(run, [], 1)[0]).load(1, 256 + new)


def contenders(
    pairs: dict[str, PairSession], heat: float, new: int, ks: list[int], trees: list[tuple[int, ...]]
) -> dict[str, Turn]:
    """All contenders at a temperature."""
    kinds = [(name, k, 0) for k in ks for name in pairs] + [("head", k, s) for k, s in trees]
    found: dict[str, Turn] = {REGULAR: turn(pairs["draft model"], heat, new, 0, 0)}
    for name, k, siblings in kinds:
        words = f"{name}, K = {k}{f', s = {siblings}' if siblings else ''}"
        found[words] = turn(pairs[name], heat, new, k, siblings)
    return found


def turn(pair: PairSession, heat: float, new: int, k: int, siblings: int) -> Turn:
    sampling = replace(pair.run.sampling, temperature=heat)
    run = replace(pair.run, sampling=sampling, speculation=replace(pair.run.speculation, adaptive=False))
    return lambda seed: by_us(pair, run, new, seed, k, siblings)


if __name__ == "__main__":
    main()
