"""Tokens/s of a batch job with one row and several, refilled at once or not, on prompts of mixed length.

    python bench/batch_rows.py [prompts=256] [rows=8] [repeats=3] [write=FILE.md] [any override]

One process, one pair, the same seed: every contender answers the same prompts. Contenders take turns, so
other load on the machine affects all of them; ratios are computed within a turn. The exit code is 1 if rows
bring less than 2.5x, or refilling less than 1.3x of waiting for each batch's last text.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hydra import compose, initialize_config_dir  # noqa: E402
from surroundings import surroundings, write  # noqa: E402

from llama_ssp.batch.continuous_batching import ContinuousBatch, TokenRequest  # noqa: E402
from llama_ssp.config import RunConf, register  # noqa: E402
from llama_ssp.config.presets import CONF  # noqa: E402
from llama_ssp.config.validation import to_run  # noqa: E402
from llama_ssp.pair.assembly import engine_for, lookahead_for  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.planner.resolve import pair_specs  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402
from llama_ssp.speculative.state import Prompt  # noqa: E402
from llama_ssp.text.tokenizer import Tokens  # noqa: E402

WORDS = [
    "def", "class", "import", "return", "for", "while", "if", "else", "try", "with", "lambda", "print",
    "range", "len", "self", "None", "True", "False", "x", "y", "z", "data", "items", "value", "index",
]  # fmt: skip
PROMPT_WORDS = (2, 4, 8, 16, 32, 64, 120)
NEW_TOKENS = (4, 8, 16, 24, 32, 64, 128)
OWN = {"prompts": "256", "rows": "8", "repeats": "3", "write": ""}
ROWS_BAR, REFILL_BAR = 2.5, 1.3


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    own = {key: given.pop(key, default) for key, default in OWN.items()}
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        run = to_run(compose("run", [f"{key}={value}" for key, value in given.items()]))
    entry = pair_specs(run, [], 1)[0]
    pair, run, rows = PairSession(entry), entry.run, int(own["rows"])
    works = mixed(int(own["prompts"]), pair.tokens, run)
    pair.load(rows, max(work.longest for work in works))
    longest_first = sorted(works, key=lambda work: -work.longest)
    contenders: dict[str, Callable[[], float]] = {
        "1 row": partial(pace, pair, [longest_first], 1),
        f"{rows} rows, refilled": partial(pace, pair, [longest_first], rows),
        f"{rows} rows, each batch waits, in input order": partial(pace, pair, dealt(works, rows), rows),
        f"{rows} rows, each batch waits, longest first": partial(
            pace, pair, dealt(longest_first, rows), rows
        ),
    }
    turns = [
        {name: contender() for name, contender in contenders.items()} for _ in range(int(own["repeats"]))
    ]
    one, refilled, waiting, _ = contenders
    by_rows = median(turn[refilled] / turn[one] for turn in turns)
    by_refill = median(turn[refilled] / turn[waiting] for turn in turns)
    met = by_rows >= ROWS_BAR and by_refill >= REFILL_BAR
    text = "\n".join(
        [
            f"# Rows of a batch job: {len(works)} prompts of mixed length", "",
            *surroundings(pair.models.devices),
            f"{run.model.name} with {run.draft.name if run.draft else 'no draft'}, K = {run.speculation.k}; "
            f"prompts of {PROMPT_WORDS[0]} to {PROMPT_WORDS[-1]} words, {NEW_TOKENS[0]} to {NEW_TOKENS[-1]} "
            "new tokens; texts end by themselves, too.",
            f"Medians of {len(turns)} turns. {rows} rows over one: {by_rows:.2f}x (asked for: {ROWS_BAR}x); "
            f"refilled over waiting, in input order: {by_refill:.2f}x (asked for: {REFILL_BAR}x).", "",
            "```", *table(turns, refilled), "```", "",
        ]
    )  # fmt: skip
    print(text)
    if own["write"]:
        write(own["write"], text)
    sys.exit(0 if met else 1)


def mixed(count: int, tokens: Tokens, run: RunConf) -> list[TokenRequest]:
    """Prompts and lengths drawn with a fixed seed."""
    drawn = random.Random(0)
    works = []
    for index in range(count):
        text = " ".join(drawn.choice(WORDS) for _ in range(drawn.choice(PROMPT_WORDS)))
        prompt = Prompt(str(index), tuple(tokens.encode(text)))
        works.append(TokenRequest(index, prompt, run.sampling, drawn.choice(NEW_TOKENS), ()))
    return works


def dealt(works: list[TokenRequest], rows: int) -> list[list[TokenRequest]]:
    return [works[first : first + rows] for first in range(0, len(works), rows)]


def pace(pair: PairSession, batches: list[list[TokenRequest]], rows: int) -> float:
    """Tokens a second, prefill included."""
    run, tokens = pair.run, pair.tokens
    engine = engine_for(pair.models, run, tokens, tokens.end_ids, 1, 512)
    lookahead = partial(lookahead_for, run)
    writer = ContinuousBatch(engine, tokens.decode, lookahead, tokens.end_ids)
    began, written = time.perf_counter(), 0
    for batch in batches:
        written += sum(len(text.token_ids) for text in writer.write(batch, rows, lambda _: None))
    return written / (time.perf_counter() - began)


def table(turns: list[dict[str, float]], of: str) -> list[str]:
    """Medians, and ratios to the main contender."""
    lines = [["contender", "tokens/s", "refilled is faster by", "least..most"]]
    for name in turns[0]:
        ratios = [turn[of] / turn[name] for turn in turns]
        lines.append(
            [name, f"{median(turn[name] for turn in turns):.0f}", f"{median(ratios):.2f}x",
             f"{min(ratios):.2f}..{max(ratios):.2f}"]
        )  # fmt: skip
    return aligned(lines, 1)


if __name__ == "__main__":
    main()
