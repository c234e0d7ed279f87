"""What drafts lose if they come from the draft's likeliest tokens alone: acceptance of real models.

    python bench/draft_top.py [pairs=int4,gemma,shipped] [settings=plain,filtered] [tops=16,64,256,1024]
                              [texts=24] [new=20] [threads=1] [state=FILE.json] [write=FILE.md]

The target writes texts (bench/replay.py has the pairs and settings). At each of their tokens p is the
target's distribution and q the draft's, and the chance that a draft is kept is sum(min(p, q)): with q of all
tokens, and with q of the N likeliest, renormalised, for each N of `tops` (`speculation.draft_top`). These are
sums, not samples, at the same places: so a loss is known better than what it is a loss of. `+-` is the 95 %
interval of the loss, over texts. The state file keeps the prompts, which the target samples.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from bench import replay  # noqa: E402
from bench.surroundings import report  # noqa: E402
from bench.words import Words  # noqa: E402
from llama_ssp.distributed.comm import ALONE  # noqa: E402
from llama_ssp.pair import replay as passes  # noqa: E402
from llama_ssp.pair.replay import TokenText  # noqa: E402
from llama_ssp.placing.pairs import PairSpec, pair_specs  # noqa: E402
from llama_ssp.report.statistics import ratio_of_sums  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402
from llama_ssp.speculative.sampling import Prefix, likeliest  # noqa: E402
from llama_ssp.text.tokenizer import Tokens  # noqa: E402

ALLOWED = 1.0  # per cent of acceptance that a default may lose
Chances = dict[int | None, dict[tuple[int, ...], list[float]]]  # by N, then by prompt, of each token
Place = tuple[tuple[int, ...], int]  # a text up to a token, and how much of it is the prompt


@dataclass
class Asked(Words):
    """The command line."""

    pairs: str = "int4,gemma,shipped"
    settings: str = "plain,filtered"
    tops: str = "16,64,256,1024"
    texts: int = 24
    new: int = 20
    threads: int = 1
    state: str = "draft_top_state.json"
    write: str = ""

    @property
    def of_replay(self) -> replay.Asked:
        return replay.Asked(most=self.texts, new=self.new, rows=self.texts, threads=self.threads)


@dataclass
class Recorder:
    """A transform that keeps the distributions that it makes, by the text that they continue."""

    transform: Callable[[Tensor, Prefix], Tensor]
    laws: dict[Place, Tensor] = field(default_factory=dict)

    def __call__(self, logit_BWV: Tensor, prefix: Prefix) -> Tensor:
        probs_BWV = self.transform(logit_BWV, prefix)
        lengths, prompts = prefix.length_BW[:, 0].tolist(), prefix.prompt_B.tolist()
        for row, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
            self.laws[tuple(prefix.token_BS[row, :length].tolist()), prompt] = probs_BWV[row, 0].clone()
        return probs_BWV

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transform, name)


def laws_of(read: Callable[[], Any]) -> dict[Place, Tensor]:
    """The distributions of a model at each token of the texts that `read` has it read."""
    recorders = list[Recorder]()
    made = passes.transform_of

    def recorded(spec: PairSpec, tokens: Tokens) -> Any:
        recorders.append(Recorder(made(spec, tokens)))
        return recorders[-1]

    with patch.object(passes, "transform_of", recorded):
        read()
    return {place: law for recorder in recorders for place, law in recorder.laws.items()}


def written_texts(pair: str, setting: str, asked: Asked, kept: replay.Kept) -> tuple[PairSpec, Tokens, Any]:
    """The pair, the target's tokenizer, and what the target writes alone."""
    prompts = replay.prompts_of(pair, asked.of_replay, kept)
    run = replay.run_of(pair, asked.of_replay, *replay.SETTINGS[setting])
    alone = replace(run, draft=None, speculation=replace(run.speculation, k=0, adaptive=False))
    longest = max(len(prompt.token_ids) for prompt in prompts) + asked.new
    session = replay.opened(alone, asked.texts, longest)
    replies = replay.written(session, prompts, seed=1)
    texts = [TokenText(prompt, tuple(ids)) for prompt, (ids, _) in zip(prompts, replies, strict=True)]
    return pair_specs(run, [], 1)[0], session.tokens, texts


def kept_of_texts(pair: str, setting: str, asked: Asked, kept: replay.Kept) -> Chances:
    """The chances that a draft is kept, by N and text; None is all tokens."""
    spec, tokens, texts = written_texts(pair, setting, asked, kept)
    target = laws_of(lambda: passes.target_laws(spec, tokens, texts, ALONE))
    draft = laws_of(lambda: passes.draft_laws(spec, tokens, texts, 1, ALONE))
    result: Chances = {}
    for top in (None, *map(int, asked.tops.split(","))):
        by_text = result[top] = defaultdict(list)
        for (text, prompt), law_V in draft.items():
            target_V = target[text, prompt].double()
            chance = torch.minimum(target_V, likeliest(law_V.double(), top)).sum()
            by_text[text[:prompt]].append(float(chance))
    return result


def rows_of(name: str, chances: Chances) -> Iterator[list[str]]:
    """A row for each N, the first of all tokens."""
    whole = chances[None]
    places = sum(map(len, whole.values()))
    for top, by_text in chances.items():
        mean = sum(map(sum, by_text.values())) / places
        if top is None:
            yield [name, str(places), "all", f"{mean:.4f}", "", ""]
            continue
        few, every = ([sum(of_prompt[prompt]) for prompt in whole] for of_prompt in (by_text, whole))
        share = ratio_of_sums(over=[few], under=[every])
        loss, reach = 100 * (1 - share.value), 50 * (share.high - share.low)
        yield ["", "", str(top), f"{mean:.4f}", f"{loss:.2f}", f"{reach:.2f}"]


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    torch.set_num_threads(asked.threads)
    kept = replay.Kept(Path(asked.state))
    rows = [["pair", "tokens", "N", "kept", "loss, %", "+-"]]
    for pair in asked.pairs.split(","):
        for setting in asked.settings.split(","):
            began = time.monotonic()
            name = f"{pair}, {replay.IN_WORDS[setting]}"
            found = [*rows_of(name, kept_of_texts(pair, setting, asked, kept))]
            rows += found
            print(f"{time.monotonic() - began:.0f} s: {found}", file=sys.stderr, flush=True)
    report(
        asked.write, "Drafts from the likeliest tokens alone", {"all": f"cpu, {asked.threads} threads, fp32"},
        f"{asked.texts} texts of up to {asked.new} tokens a pair and setting; `kept` is a draft's chance,",
        f"of which a default may lose {ALLOWED:g} %.", "", "```", *aligned(rows, words=1), "```",
    )  # fmt: skip


if __name__ == "__main__":
    main()
