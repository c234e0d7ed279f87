"""Plants faults into sampling, one at a time, and shows that task=certify says `different` of each.

    python -m tests.certify_faults [only=TEXT,...] [seeds=20] [jobs=1] [write=FILE.md]

Each fault is planted in the code that ships, except one: another library's sampler behind the same
interface. Each run is `llama-ssp certify` of the pair that ships, at its default size. The sound code runs
too, once for each seed. The table of verdicts is printed; the exit code is 1 if a verdict is not due.

    only    run the rows with one of these texts in their name, such as only=coins,sound; without it all
    seeds   how many seeds the sound code is run with: 0, 1, 2, ...
    jobs    how many rows run at the same time, each on one thread
    write   also write the table, with machine and versions, into this file
"""

import copy
import io
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.surroundings import report
from llama_ssp import cli
from llama_ssp.models.checkpoint import SHIPPED_FOLDER
from llama_ssp.speculative.rng import PURPOSES, ROUNDS, Purpose, prompt_key
from llama_ssp.speculative.sampling import one_hot
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks.certify import examination as certify
from tests.checkpoints import renumber
from tests.proofs.mutants import Mutant, every
from tests.proofs.wrong_rules import MODEL, declares
from tests.proofs.wrong_runs import FILTERS, PHILOX, UNIFORMS, named, numbered


@dataclass(frozen=True)
class Fault:
    """One run of the table: what is planted, the check that must fail (none of sound code), and settings."""

    name: str
    check: str = ""
    planted: Callable[[], AbstractContextManager[Any]] = nullcontext
    overrides: tuple[str, ...] = ()

    def certified(self) -> tuple[bool, str]:
        """Runs the command; whether the verdict is the one that is due, and a line of the table."""
        torch.set_num_threads(1)
        began, said = time.process_time(), io.StringIO()
        words = ["task=certify", "out=null", "output=json", *self.overrides]
        with (
            self.planted(),
            patch.object(sys, "argv", ["llama-ssp", *words]),
            redirect_stdout(said),
            suppress(SystemExit),
        ):
            cli.main()
        found = json.loads(said.getvalue().splitlines()[-1])
        failed = [f"{c['name']}: {c['says']}" for c in found["checks"] if c["outcome"] == "failed"]
        told = f"{found['verdict']} | {'; '.join(failed) or '-'} | {time.process_time() - began:.0f}"
        is_right = found["verdict"] == ("different" if self.check else "same")
        return is_right, f"| {self.name} | {' '.join(self.overrides)} | {told} |"


def _shared(raw: Any, _: int, stream: int, base: int, count: int) -> Any:
    """Coins, drafts' uniforms and clocks are the same raw numbers."""
    number = np.arange(count)
    return raw(count, [0, 0, ROUNDS, base])[number // PURPOSES if stream == ROUNDS else number]


def _coins_of_drafts(raw: Any, key: int, stream: int, base: int, count: int) -> Any:
    """In one of a hundred rounds of a row the acceptance coins are the drafts' numbers."""
    numbers = raw(count)
    if stream == ROUNDS and _hashed([key, base], 100):
        numbers[Purpose.ACCEPT :: PURPOSES] = numbers[::PURPOSES][: len(numbers[Purpose.ACCEPT :: PURPOSES])]
    return numbers


def _hashed(numbers: Sequence[int], rounds: int) -> bool:
    return zlib.crc32(repr(list(numbers)).encode()) % rounds == 0


def _reused_where(touched: Callable[[Sequence[int]], bool]) -> Any:
    """The acceptance coins are the drafts' numbers in the rounds of a batch with such lengths."""
    return named(lambda _, slot: {"purpose": Purpose.DRAFT} if touched(slot.bases) else {})


def _mixed_corrections(token: Any, draws: Any, probs_BV: Tensor) -> Any:
    return token(draws, 0.98 * probs_BV + 0.02 * one_hot(probs_BV.argmax(-1), probs_BV))


def _keeps_stale(places: Any, cache: Any, spans: Any, attend: Any) -> Any:
    """Slots that were written once stay as they are: rejected tokens leave their keys behind."""

    def stale(own: Any, query: Tensor, keys: Tensor, values: Tensor, *how: Any) -> Tensor:
        for each in (keys, values):
            if each not in first_written:
                first_written[each] = each.clone(), torch.zeros(each.shape[1], dtype=torch.bool)
            kept, known = first_written[each]
            new = own.slot_T[~known[own.slot_T]]
            kept[:, new], known[new] = each[:, new], True
            each[:, own.slot_T] = kept[:, own.slot_T]
        return attend(own, query, keys, values, *how)

    return places(cache, spans, stale)


first_written = WeakIdKeyDictionary()  # of a cache's tensor: what its slots got first, and which have it
NUCLEUS = ("sampling=nucleus",)  # temperature 0.8, top-p 0.95
PENALTY = ("sampling.repetition_penalty=1.3",)
CACHE, DRAWS = "models.kv_cache:KVCache.places", "speculative.rng:RoundNumbers."


def _listed(name: str, listed: str, check: str, *overrides: str) -> Fault:
    """A fault that the proofs have to show, too."""
    return Fault(name, check, every()[listed].planted, overrides)


def _own(name: str, places: str, check: str, wrong: Any, *overrides: str) -> Fault:
    return Fault(name, check, Mutant(name, places, (), wrong).planted, overrides)


FAULTS = [
    _listed("ratio swapped", "ratio swapped", "law"),
    _listed("correction from the target's whole law", "residual: the target's own distribution", "law"),
    _listed("filters on the draft alone", "filters on the draft's side only", "filters", *NUCLEUS),
    _listed("draft law declared 5 % uniform", "declared distribution is 5 % uniform", "decisions"),
    _own(
        "draft law from a bf16 copy", MODEL, "decisions",
        declares(lambda q: q.to(torch.bfloat16).to(q.dtype)),
    ),
    _own("stale target cache", CACHE, "law", _keeps_stale),
    _listed("coins are the drafts' uniforms", "a coin is its draft's number", "decisions"),
    _own("coins, uniforms and races share counters", PHILOX, "decisions", numbered(_shared)),
    _own(
        "coins are the drafts' uniforms where row 0's length is a multiple of 8", UNIFORMS, "decisions",
        _reused_where(lambda lengths: lengths[0] % 8 == 0),
    ),
    _own(
        "coins are the drafts' uniforms in one round of 8", UNIFORMS, "decisions",
        _reused_where(lambda lengths: _hashed(lengths, 8)),
    ),
    _own("coins are drafts' numbers in 1 % of rounds", PHILOX, "decisions", numbered(_coins_of_drafts)),
    _own(
        "top-p 0.01 wider everywhere", FILTERS, "filters",
        lambda filtered, probs, k, p, least: filtered(probs, k, p + 0.01 if p < 1 else p, least), *NUCLEUS,
    ),
    _listed("penalties ignore the block", "controls see the committed prefix only", "filters", *PENALTY),
    _listed("bonus token from the draft", "bonus token from the draft", "law"),
    _own(
        "coins lenient by 2 %", f"{DRAWS}bernoulli", "decisions", lambda coins, own, p: coins(own, 1.02 * p)
    ),
    _own("corrections: 2 % are the likeliest", f"{DRAWS}categorical", "decisions", _mixed_corrections),
]  # fmt: skip


class TransformersSampler:
    """transformers' `generate` with an assistant of another tokenizer, one text at a time.

    The assistant gets a token that the target lacks, as the draft of a real pair has: without one,
    transformers 5.23 ends in an AttributeError. `generate` changes the assistant, hence the copies.
    """

    name = "transformers"

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as place:
            other = renumber(SHIPPED_FOLDER / "demo_draft", Path(place) / "other", tokens=600)
            folders = SHIPPED_FOLDER / "demo", other
            self._tokens, self._draft_tokens = map(AutoTokenizer.from_pretrained, folders)
            self._target, self._draft = (
                AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders
            )
        self._draft_tokens.add_tokens(["<the draft's alone>"])
        settings = self._draft.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = 3, "constant"

    def texts(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
        return [self._text(prompt, max_new_tokens) for prompt in prompts]

    def _text(self, prompt: Prompt, max_new_tokens: int) -> list[int]:
        torch.manual_seed(prompt_key(prompt.id) >> 1)
        ids = torch.tensor([prompt.token_ids])
        text = self._target.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, max_new_tokens=max_new_tokens, pad_token_id=0,
            assistant_model=copy.deepcopy(self._draft), tokenizer=self._tokens,
            assistant_tokenizer=copy.copy(self._draft_tokens),
        )  # fmt: skip
        return list(text[0, ids.shape[1] :].tolist())


@contextmanager
def _another_library() -> Iterator[None]:
    """The command judges this sampler instead, by its texts alone."""
    sampler, real = TransformersSampler(), certify.check_samples

    def judged(samplers: Any, *others: Any) -> Any:
        return real(samplers._replace(subject=sampler), *others)

    with patch.object(certify, "check_samples", judged):
        yield


def rows(seeds: int) -> list[Fault]:
    """The faults, another library, and the sound code on `seeds` seeds."""
    faults = [*FAULTS, Fault("transformers, another tokenizer", "two samples", _another_library)]
    seeded = [replace(fault, overrides=("seed=1", *fault.overrides)) for fault in faults]
    return [*seeded, *(Fault("sound code", overrides=(f"seed={seed}",)) for seed in range(seeds))]


def _certified(seeds: int, number: int) -> tuple[bool, str]:
    return rows(seeds)[number].certified()


def main() -> int:
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(__doc__)
        return 0
    asked = dict(word.split("=", 1) for word in sys.argv[1:])
    seeds, wanted = int(asked.get("seeds", "20")), asked.get("only", "").split(",")
    numbers = [n for n, row in enumerate(rows(seeds)) if any(word in row.name for word in wanted)]
    right, lines = 0, []
    with get_context("spawn").Pool(int(asked.get("jobs", "1"))) as pool:
        for is_right, line in pool.imap(partial(_certified, seeds), numbers):
            right += is_right
            lines.append(line)
            print(line, file=sys.stderr, flush=True)
    told = f"{right} of {len(lines)} verdicts are those that are due: `different` of a fault, else `same`."
    head = ["| fault | run with | verdict | failed checks | CPU s |", "|---|---|---|---|---|"]
    title, about = "certify: planted faults, and the sound code", {"device": "cpu, one thread a run"}
    report(asked.get("write", ""), title, about, "", told, "", *head, *lines)
    return int(right < len(lines))


if __name__ == "__main__":
    sys.exit(main())
