"""n-gram drafts: the time of a round's look-up, and how many drafts the shipped target accepts.

    python bench/ngram.py [lengths=512,1024,4096,32768] [turns=50] [new=200] [temperatures=0,0.5,1]
                          [threads=1] [write=FILE.md]

Times: one row of random tokens of a vocabulary of 32,000, in which long contexts are new, and one that
repeats every 500 tokens. A turn appends four tokens and looks eight drafts up; the median counts. The first
look-up of a text indexes its prompt, and is given apart.

Acceptance: the target regularly writes texts, and at each of their positions its probability of the draft is
summed: of the latest follower of the longest known context, of the most frequent one (which is drafted), and
the sum of minima with the followers' shares, if a draft were drawn from these.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from surroundings import report  # noqa: E402

from bench.words import changed  # noqa: E402
from llama_ssp.config.compose import composed  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.placing.pairs import pair_specs  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402
from llama_ssp.speculative.draft_length import FixedDraftLength  # noqa: E402
from llama_ssp.speculative.drafters.ngram import NgramIndex  # noqa: E402
from llama_ssp.speculative.engine import Observer  # noqa: E402
from llama_ssp.speculative.generate import Limits, generate  # noqa: E402
from llama_ssp.speculative.state import Prompt  # noqa: E402
from llama_ssp.tasks.arithmetic import questions  # noqa: E402
from llama_ssp.text.prompts import SENTENCES, SHORT  # noqa: E402

SHORTEST, LONGEST, K, APPENDED, PERIOD = 1, 4, 8, 4, 500
TEXTS = {"random": 10**9, "repeats": PERIOD}


def main() -> None:
    own = {"lengths": "512,1024,4096,32768", "turns": "50", "new": "200", "temperatures": "0,0.5,1"}
    own = changed(own | {"threads": "1", "write": ""}, sys.argv[1:])
    torch.set_num_threads(int(own["threads"]))
    times = [
        look_up(name, int(length), int(own["turns"]))
        for name in TEXTS
        for length in own["lengths"].split(",")
    ]
    accepted = acceptance([float(heat) for heat in own["temperatures"].split(",")], int(own["new"]))
    report(
        own["write"], "n-gram drafts", {"look-up": f"cpu, {own['threads']} threads"}, "",
        "Milliseconds of a look-up, a row and round:", "", "```", *table(times), "```", "",
        "Probability that the target accepts the first draft:", "", "```", *table(accepted), "```",
    )  # fmt: skip
    print(json.dumps({"times": times, "accepted": accepted}))


def look_up(name: str, length: int, turns: int) -> dict:
    """The median round, and the first one, of a text of this length."""
    draw = random.Random(length)
    tokens = [draw.randrange(32000) for _ in range(min(length + APPENDED * turns, TEXTS[name]))]
    text = [tokens[i % len(tokens)] for i in range(length)]
    index, taken = NgramIndex(text, SHORTEST, LONGEST), []
    for turn in range(turns + 1):
        began = time.perf_counter()
        index.update()
        index.drafts(K)
        taken.append(1000 * (time.perf_counter() - began))
        text += [tokens[(length + APPENDED * turn + i) % len(tokens)] for i in range(APPENDED)]
    return {"text": name, "tokens": length, "round_ms": median(taken[1:]), "first_ms": taken[0]}


@dataclass
class Before(Observer):
    """Keeps each text before a commit, and the target's distribution there."""

    rows: list[tuple[list[int], torch.Tensor]]

    def decided(self, state: Any, _: Any, __: Any, probs_BWV: Any, ___: Any) -> None:
        self.rows.append((list(state.texts[0]), probs_BWV[0, 0].clone()))


def acceptance(temperatures: list[float], new: int) -> list[dict]:
    """For each temperature, by three ways to draft; means over all positions of all texts."""
    words = ["model=demo", "draft=none", "speculation=none", "out=null"]
    found = []
    for heat in temperatures:
        run = composed([*words, f"sampling.temperature={heat}"])
        pair = PairSession(pair_specs(run, [], 1)[0]).load(1, 768)
        sums, positions = Counter[str](), 0
        texts = [*SENTENCES[::3], *SHORT, *(question.text for question in questions(0, 2, 8))]
        for number, text in enumerate(texts):
            engine = pair.engine(number)
            # The target's distribution at the end of the text, before each commit.
            rows: list[tuple[list[int], torch.Tensor]] = []
            engine.observer = Before(rows)
            state = engine.prefill([Prompt(str(number), tuple(pair.tokens.encode(text)))], new)
            for _ in generate(engine, state, Limits(new, pair.end_ids), FixedDraftLength(0, 1)):
                pass
            for before, probs_V in rows:
                sums.update(drafted(before, probs_V))
            positions += len(rows)
        found.append({"temperature": heat, "positions": positions})
        found[-1].update({name: sums[name] / positions for name in ("latest", "most_frequent", "drawn")})
    return found


def drafted(text: list[int], probs_V: torch.Tensor) -> dict[str, float]:
    """The target's chance to accept a draft behind this text, by three ways to draft; empty without one."""
    for size in range(min(LONGEST, len(text) - 1), SHORTEST - 1, -1):
        ends = [i for i in range(size, len(text)) if text[i - size : i] == text[-size:]]
        if ends:
            followers = Counter(text[i] for i in reversed(ends))  # of equals, the latest comes first
            chance = {token: float(probs_V[token]) for token in followers}
            shared = sum(min(chance[token], count / len(ends)) for token, count in followers.items())
            frequent = chance[followers.most_common(1)[0][0]]
            return {"latest": chance[text[ends[-1]]], "most_frequent": frequent, "drawn": shared}
    return {}


def table(rows: list[dict]) -> list[str]:
    cells = [[f"{one:.4g}" if isinstance(one, float) else str(one) for one in row.values()] for row in rows]
    return aligned([[name.replace("_", " ") for name in rows[0]], *cells], 1)


if __name__ == "__main__":
    main()
