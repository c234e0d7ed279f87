"""Drafts of other tokenizers against a draft of the target's own: possible proposals, acceptance, cost.

    python bench/bridges.py [repeats=3] [new=48] [ks=1,4] [temperatures=0,1] [write=FILE.md]

The target is `demo`. `demo_draft` has its tokens; so has a copy with other ids, which a bridge must find out;
`demo_bytes` has bytes. Every repeat runs each contender once, in turn, on the same prompts; ratios are
computed within a repeat. The ceiling is the share of the target's distribution, at the positions of its own
texts, that is on tokens which the draft has, too: no more of them can be accepted one for one. The text
bridge has none.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402

from bench.contenders import text_logits  # noqa: E402
from bench.side_by_side import PROMPTS, by_us, measured  # noqa: E402
from bench.surroundings import surroundings, write  # noqa: E402
from bench.words import Words  # noqa: E402
from llama_ssp.config import RunConf, register  # noqa: E402
from llama_ssp.config.short_forms import in_full  # noqa: E402
from llama_ssp.config.validation import to_run  # noqa: E402
from llama_ssp.models.checkpoint import SHIPPED_FOLDER  # noqa: E402
from llama_ssp.pair.session import PairSession, regular  # noqa: E402
from llama_ssp.planner.resolve import pair_specs  # noqa: E402
from llama_ssp.report.run_folder import versions  # noqa: E402
from llama_ssp.speculative.sampling import one_hot  # noqa: E402
from llama_ssp.speculative.state import Prompt  # noqa: E402
from llama_ssp.speculative.stats import Counts  # noqa: E402
from llama_ssp.text.translation import NONE, Intersection  # noqa: E402
from tests.renumbered import renumber  # noqa: E402
from tests.rig import drive  # noqa: E402

REGULAR = "regular (K = 0)"


@dataclass
class Asked(Words):
    """The command line."""

    repeats: int = 3
    new: int = 48
    ks: str = "1,4"
    temperatures: str = "0,1"
    write: str = ""


@dataclass(frozen=True)
class Opened:
    """A pair in memory."""

    name: str
    pair: PairSession

    @property
    def run(self) -> RunConf:
        return self.pair.run


def opened(name: str, overrides: list[str], new: int) -> Opened:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        run = to_run(compose("run", in_full(["seed=1", *overrides])))
    return Opened(name, PairSession(pair_specs(run, [], 1)[0]).load(1, 256 + new))


def drafts(heat: float, new: int, scratch: Path) -> list[Opened]:
    """Each draft with each of its bridges."""
    other = scratch / "renumbered"
    if not other.exists():
        renumber(SHIPPED_FOLDER / "demo_draft", other)
    asked = {
        "demo_draft, the same tokens": ["draft=demo_draft"],
        "demo_draft with other ids, intersection": [
            f"draft={other}", "speculation.bridge=intersection",
        ],
        "demo_bytes, intersection": ["draft=demo_bytes", "speculation.bridge=intersection"],
        "demo_bytes, text": ["draft=demo_bytes", "speculation.bridge=text"],
    }  # fmt: skip
    return [
        opened(name, [*overrides, f"sampling.temperature={heat}"], new) for name, overrides in asked.items()
    ]


def ceiling(one: Opened, new: int) -> float | None:
    """The share of the target's distribution that the draft can propose, over texts by regular sampling."""
    tokens, target = one.pair.tokens, one.pair.models.target
    if tokens.paired is None or not isinstance(tokens.paired.bridge, Intersection):
        return None
    match, heat = tokens.paired.match, one.run.sampling.temperature
    shared = torch.tensor([i != NONE for i in match.draft_of], dtype=torch.float32)
    shares: list[float] = []
    for number, text in enumerate(PROMPTS):
        ids = tokens.encode(text)
        engine = one.pair.engine(0, regular(one.run), frozenset())
        (written,) = drive(engine, [Prompt(str(number), tuple(ids))], k=0, max_new=new).texts
        logits = text_logits(target, (*ids, *written))[len(ids) - 1 : -1]
        logits = logits[:, : len(shared)].float()
        probs = (logits / heat).softmax(-1) if heat else one_hot(logits.argmax(-1), logits)
        shares += (probs @ shared).tolist()
    return sum(shares) / len(shares)


def rows_of(heat: float, ks: list[int], repeats: int, new: int, scratch: Path) -> list[dict]:
    found = drafts(heat, new, scratch)
    kept: dict[str, Counts] = {}

    def contender(one: Opened, k: int, name: str, repeat: int) -> tuple[float, Counts]:
        ms, counts = by_us(one.pair, one.run, new, repeat, k)
        kept.setdefault(name, Counts()).merge(counts)
        return ms, counts

    contenders = {REGULAR: partial(contender, found[0], 0, REGULAR)}
    ceilings: dict[str, float | None] = {REGULAR: None}
    for one in found:
        most = ceiling(one, new)
        for k in ks:
            name = f"{one.name}, K = {k}"
            contenders[name], ceilings[name] = partial(contender, one, k, name), most
    rows = measured({heat: contenders}, repeats)[heat]
    for row in rows:
        summary = kept[row["name"]].summary()
        row["temperature"], row["ceiling"] = heat, ceilings[row["name"]]
        for key in ("acceptance_rate_decided", "accepted_over_expected", "tokens_per_target_forward"):
            row[key] = summary[key]
    return rows


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    register()
    ks = [int(k) for k in asked.ks.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        tables = {
            heat: rows_of(heat, ks, asked.repeats, asked.new, Path(scratch))
            for heat in map(float, asked.temperatures.split(","))
        }
    text = page(tables, asked.repeats, asked.new)
    print(text)
    print(json.dumps({"rows": [row for rows in tables.values() for row in rows], "versions": versions()}))
    write(asked.write, text)


def page(tables: dict[float, list[dict]], repeats: int, new: int) -> str:
    """A complete results file."""
    lines = [
        "# demo with drafts of its own tokenizer, of other ids, and of bytes",
        "",
        *surroundings({"model": "cpu", "draft": "cpu"}),
        f"Batch 1, {len(PROMPTS)} prompts, {new} tokens each, {repeats} interleaved repeats; ratios are",
        "medians with the least and the most. `accepted` counts the drafts that were decided on.",
    ]
    for heat, rows in tables.items():
        lines += [
            "",
            f"Temperature {heat:g}:",
            "",
            "| contender | ceiling | accepted | over expected | tokens/forward | ms/token | faster |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            keys = (
                "ceiling",
                "acceptance_rate_decided",
                "accepted_over_expected",
                "tokens_per_target_forward",
            )
            cells = " | ".join("" if row[key] is None else f"{row[key]:.2f}" for key in keys)
            lines.append(
                f"| {row['name']} | {cells} | {row['ms_per_token']:.2f} | {row['faster_than_regular']:.2f}x, "
                f"{row['least']:.2f}..{row['most']:.2f} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
