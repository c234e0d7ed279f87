"""The cost of one text for each seed: acceptance by the token rule, the block rule and the coupled rule.

    python bench/coupling.py [repeats=10] [new=64] [ks=1,4,8] [samplings=default,nucleus] [write=FILE.md]

demo with demo_draft in fp32, on the same prompts by every rule, another seed in each repeat. `accepted` is a
share of the decided drafts; `over the best` is this share over the sum of min(target, draft), which no rule
that looks at one position exceeds. The coupled texts of a repeat must be the same at every K and without a
draft; else the exit code is 1.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hydra import compose, initialize_config_dir  # noqa: E402

from bench.side_by_side import PROMPTS  # noqa: E402
from bench.surroundings import surroundings, write  # noqa: E402
from bench.words import Words  # noqa: E402
from llama_ssp.config import Drafting, RunConf, Verification, register  # noqa: E402
from llama_ssp.config.validation import to_run  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.planner.resolve import pair_specs  # noqa: E402
from llama_ssp.report.run_folder import versions  # noqa: E402
from llama_ssp.speculative.draft_length import FixedDraftLength  # noqa: E402
from llama_ssp.speculative.generate import Limits, generate  # noqa: E402
from llama_ssp.speculative.state import Prompt  # noqa: E402
from llama_ssp.speculative.stats import Counts  # noqa: E402


@dataclass
class Asked(Words):
    """The command line."""

    repeats: int = 10
    new: int = 64
    ks: str = "1,4,8"
    samplings: str = "default,nucleus"
    write: str = ""


@dataclass
class Found:
    """The figures of one rule at one K, over all repeats."""

    counts: Counts = field(default_factory=Counts)
    seconds: float = 0.0
    texts: list[list[list[int]]] = field(default_factory=list)  # of each repeat

    def row(self, sampling: str, rule: str, k: int) -> dict[str, Any]:
        summary = self.counts.summary()
        return {
            "sampling": sampling, "rule": rule, "k": k,
            "tokens_committed": summary["tokens_committed"],
            "acceptance_rate_decided": summary["acceptance_rate_decided"],
            "accepted_over_expected": summary["accepted_over_expected"],
            "tokens_per_target_forward": summary["tokens_per_target_forward"],
            "ms_per_token": 1000 * self.seconds / summary["tokens_committed"],
        }  # fmt: skip


def opened(sampling: str, new: int) -> PairSession:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        run = to_run(
            compose("run", [f"sampling={sampling}", "model.dtype=fp32", "draft.dtype=fp32", "placement=cpu"])
        )
    entry = pair_specs(run, [], 1)[0]
    return PairSession(entry).load(len(PROMPTS), 256 + new)


def once(pair: PairSession, run: RunConf, new: int, seed: int, into: Found) -> None:
    """All prompts as one batch."""
    k = run.speculation.k
    engine = pair.engine(seed, run, frozenset())
    prompts = [Prompt(str(n), tuple(pair.tokens.encode(text))) for n, text in enumerate(PROMPTS)]
    state = engine.prefill(prompts, new)
    began = time.perf_counter()
    for step in generate(engine, state, Limits(new), FixedDraftLength(k, state.rows)):
        for row in step.rows:
            into.counts.add(row)
    into.seconds += time.perf_counter() - began
    into.texts.append([state.generated(row) for row in range(state.rows)])


def rows_of(sampling: str, ks: list[int], repeats: int, new: int) -> tuple[list[dict[str, Any]], bool]:
    """The table, and whether all coupled texts were the same."""
    pair = opened(sampling, new)
    run = pair.run
    found: dict[tuple[str, int], Found] = {}
    for seed in range(repeats):
        for rule in Verification:
            for k in (0, *ks) if rule is Verification.coupled else ks:
                drafter = Drafting.model if k else Drafting.none
                spec = replace(run.speculation, verification=rule, k=k, drafter=drafter)
                into = found.setdefault((rule.value, k), Found())
                once(pair, replace(run, speculation=spec), new, seed, into)
    alike = all(
        one.texts == found["coupled", 0].texts for (rule, _), one in found.items() if rule == "coupled"
    )
    rows = [found[rule.value, k].row(sampling, rule.value, k) for k in ks for rule in Verification]
    return rows, alike


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    register()
    ks = [int(k) for k in asked.ks.split(",")]
    rows, alike = [], True
    for sampling in asked.samplings.split(","):
        more, same = rows_of(sampling, ks, asked.repeats, asked.new)
        rows += more
        alike = alike and same
    text = page(rows, alike, asked.repeats, asked.new)
    print(text)
    print(json.dumps({"rows": rows, "coupled_texts_alike": alike, "versions": versions()}))
    write(asked.write, text)
    sys.exit(0 if alike else 1)


def page(rows: list[dict[str, Any]], alike: bool, repeats: int, new: int) -> str:
    """A complete results file."""
    lines = [
        "# demo with demo_draft: what stands by each rule",
        "",
        *surroundings({"model": "cpu", "draft": "cpu"}),
        f"fp32, one batch of {len(PROMPTS)} prompts, {new} tokens each, {repeats} seeds.",
        f"Coupled texts the same at every K and without a draft: {'yes' if alike else 'NO'}.",
        "",
        "| sampling | K | rule | tokens | accepted | over the best | tokens/forward | ms/token |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['sampling']} | {row['k']} | {row['rule']} | {row['tokens_committed']} | "
            f"{row['acceptance_rate_decided']:.3f} | {row['accepted_over_expected']:.3f} | "
            f"{row['tokens_per_target_forward']:.3f} | {row['ms_per_token']:.2f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
