"""Records a second of batch jobs: of two commits, and of transformers' generate over padded batches, in turn.

    python bench/jobs.py base=COMMIT [records=200] [rows=1,8,32] [theirs=8,32] [seed=0] [write=FILE.md]

The shipped pair; SmolLM2 with n-grams, and of this checkout also without. Records have prompts of 20 to 600
tokens, short ones more often, and end after 4 to 96 tokens or by themselves. All is as by default but for the
number of rows. Jobs' own figures are taken: prompts count, loading does not. Each job runs once.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from transformers import AutoModelForCausalLM  # noqa: E402

from bench.batch_rows import by_transformers, dealt  # noqa: E402
from bench.commits import unpack  # noqa: E402
from bench.surroundings import report  # noqa: E402
from bench.words import Words  # noqa: E402
from llama_ssp.config import Dtype  # noqa: E402
from llama_ssp.config.compose import composed  # noqa: E402
from llama_ssp.models.devices import TORCH_DTYPES  # noqa: E402
from llama_ssp.models.loader import load_module  # noqa: E402
from llama_ssp.pair.requests import TokenRequest  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.placing.pairs import pair_specs  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402
from llama_ssp.speculative.state import Prompt  # noqa: E402
from llama_ssp.text.prompts import SENTENCES, SHORT  # noqa: E402

SMOLLM2 = ["model=smollm2-135m-instruct-q4", "draft=none", "download=true", "sampling=greedy"]
SHIPPED, NGRAMS, REGULAR = "shipped pair", "SmolLM2, n-grams", "SmolLM2, regular"
OURS = "this checkout"
PAIRS = {
    SHIPPED: ["sampling=greedy"],
    NGRAMS: [*SMOLLM2, "speculation=ngram"],
    REGULAR: SMOLLM2,
}
LEAST, MOST, NEW = 20, 600, (4, 96)
Row = list[str]


@dataclass
class Asked(Words):
    """The command line."""

    base: str = ""
    records: int = 200
    rows: str = "1,8,32"
    theirs: str = "8,32"
    seed: int = 0
    write: str = ""


class Jobs:
    """The records, and what writes them."""

    def __init__(self, asked: Asked, folder: Path) -> None:
        self.asked, self.folder = asked, folder
        self.input = folder / "prompts.jsonl"
        base = folder / "base"
        base.mkdir()
        self.sides = {asked.base[:8]: unpack(asked.base, base), OURS: ROOT}

    def rows(self) -> Iterator[Row]:
        for name, words in PAIRS.items():
            entry = pair_specs(composed(["task=batch", *words]), [], 1)[0]
            pair = PairSession(entry)
            works = self.records(pair)
            for rows in map(int, self.asked.rows.split(",")):
                sides = {OURS: ROOT} if name == REGULAR else self.sides
                paces = {side: self.job(tree, words, rows) for side, tree in sides.items()}
                if name != NGRAMS and str(rows) in self.asked.theirs.split(","):
                    paces["transformers"] = self.padded(pair, works, rows)
                yield from (line_of(name, rows, side, paces) for side in paces)

    def records(self, pair: PairSession) -> list[TokenRequest]:
        """Writes the input, longest last, as drawn with the seed; returns the same as tokens."""
        drawn, words, works = random.Random(self.asked.seed), " ".join([*SENTENCES, *SHORT]).split(), []
        with self.input.open("w", encoding="utf-8") as file:
            for number in range(self.asked.records):
                wanted, new = round(LEAST * (MOST / LEAST) ** drawn.random()), drawn.randint(*NEW)
                begin = drawn.randrange(len(words))
                text = " ".join(words[(begin + i) % len(words)] for i in range(wanted))
                token_ids = pair.tokens.encode(text)[:wanted]
                line = {"prompt": pair.tokens.decode(token_ids), "max_new_tokens": new}
                file.write(json.dumps(line) + "\n")
                prompt = Prompt(str(number), tuple(token_ids))
                works.append(
                    TokenRequest(
                        index=number,
                        prompt=prompt,
                        sampling=pair.run.sampling,
                        max_new_tokens=new,
                        stop=(),
                    )
                )
        return works

    def job(self, tree: Path, words: list[str], rows: int) -> float:
        """Records a second."""
        with tempfile.TemporaryDirectory(dir=self.folder) as out:
            words = [*words, f"task.input={self.input}", f"task.output={out}/answers.jsonl", f"out={out}/run"]
            command = [sys.executable, "-m", "llama_ssp", "task=batch", *words, f"task.batch_size={rows}"]
            subprocess.run(command, cwd=tree, check=True, capture_output=True)
            (summary,) = Path(out, "run").rglob("summary.json")
            said = json.loads(summary.read_text("utf-8"))
            if said["records_finished"] != self.asked.records:
                sys.exit(f"{tree} finished {said['records_finished']} records")
            return float(self.asked.records * said["tokens_per_s"] / said["tokens_committed"])

    def padded(self, pair: PairSession, works: list[TokenRequest], rows: int) -> float:
        """Records a second of transformers' generate, longest first as ours; loading does not count."""
        placed = pair.placements.target
        if placed.path is not None and placed.path.suffix == ".gguf":
            how: Any = {"gguf_file": placed.path.name, "dtype": TORCH_DTYPES[Dtype.fp32]}
            module = AutoModelForCausalLM.from_pretrained(placed.path.parent, **how)
        else:
            module = load_module(placed.model, placed.path, placed.dtype, placed.device, placed.role)
        ordered = sorted(works, key=lambda work: -work.longest)
        by_transformers(module, pair, [ordered[-rows:]])
        began = time.perf_counter()
        by_transformers(module, pair, dealt(ordered, rows))
        return self.asked.records / (time.perf_counter() - began)


def line_of(name: str, rows: int, side: str, paces: dict[str, float]) -> Row:
    ratio = f"{paces[OURS] / paces[side]:.2f}x"
    return [name, str(rows), side, f"{paces[side]:.3f}", ratio]


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    if not asked.base:
        sys.exit("base=COMMIT is missing")
    with tempfile.TemporaryDirectory() as folder:
        rows = list(Jobs(asked, Path(folder)).rows())
    head = ["pair", "rows", "by", "records/s", OURS]
    table = aligned([head, *rows], 3)
    title = f"Records a second of jobs of {asked.records} records"
    what = f"Prompts of {LEAST} to {MOST} tokens, {NEW[0]} to {NEW[1]} new ones, greedy."
    report(asked.write, title, {"model": "cpu"}, what, "", "```", *table, "```")


if __name__ == "__main__":
    main()
