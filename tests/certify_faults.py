"""Samplers that are wrong, for task=certify to say so, and the sound code on other seeds.

    python -m tests.certify_faults [only=TEXT,...] [seeds=20] [jobs=1] [write=FILE.md]

prints the table (of the rows with one of these texts in their name). Each fault is planted in the code that
ships, or, one of them, is another library's sampler behind the same interface; the pair is the one that
ships, the size that of the default run. The exit code is 1 if a verdict is not the one that is due.
"""

from __future__ import annotations

import copy
import io
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from bench.surroundings import surroundings, write
from llama_ssp import cli
from llama_ssp.models.attention import Pass, attend_rows
from llama_ssp.models.checkpoint import SHIPPED_FOLDER
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.speculative import sampling
from llama_ssp.speculative import verification as verify
from llama_ssp.speculative.decision import StateDraws
from llama_ssp.speculative.drafters import local as drafters
from llama_ssp.speculative.rng import PURPOSES, ROUNDS, CounterDraws, Purpose, Slot, prompt_key
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.tasks.certify import decisions, law
from llama_ssp.tasks.certify import task as certify
from llama_ssp.tasks.certify.decisions import Round
from llama_ssp.tasks.certify.verdict import Outcome
from tests.proofs import mutants
from tests.renumbered import renumber


@dataclass(frozen=True)
class Fault:
    """Where a fault is planted, what else the run needs to show it, and the check that must fail."""

    name: str
    place: Any
    attribute: str
    fault: Any
    check: str
    overrides: tuple[str, ...] = ()

    @contextmanager
    def planted(self) -> Iterator[None]:
        with patch.object(self.place, self.attribute, self.fault):
            yield


def _unfiltered_target(self: SamplingTransform, logits: Any, prefix: Any) -> Any:
    """Filters the draft, not the blocks that the target verifies; a greedy distribution has nothing to
    filter."""
    if self.controls.temperature == 0:
        return mutants.laws_law(self, logits, prefix)
    return mutants._unfiltered_target(self, logits, prefix)


def _reused_coins(self: State, purpose: Purpose, offset: int = 0) -> Slot:
    """The acceptance coin is the uniform that its draft was drawn with."""
    return state_slot(self, Purpose.DRAFT if purpose is Purpose.ACCEPT else purpose, offset)


def _shared_counters(self: CounterDraws, key: int, base: int, width: int, stream: int) -> Any:
    """Coins, drafts' uniforms and clocks are the same raw numbers."""
    of_purpose = np.arange(width) // PURPOSES if stream == ROUNDS else np.arange(width)
    return draws_row(self, key, base, width, ROUNDS)[of_purpose]


def _coins_reused_where(touched: Callable[[Sequence[int]], bool]) -> Callable[..., Slot]:
    """The acceptance coins are the drafts' numbers in the rounds of a batch with such lengths."""

    def slot(self: State, purpose: Purpose, offset: int = 0) -> Slot:
        reused = purpose is Purpose.ACCEPT and touched(self.lengths)
        return state_slot(self, Purpose.DRAFT if reused else purpose, offset)

    return slot


def _hashed(numbers: Sequence[int], rounds: int) -> bool:
    """True in one of so many rounds."""
    return zlib.crc32(repr(list(numbers)).encode()) % rounds == 0


def _coins_of_drafts(self: CounterDraws, key: int, base: int, width: int, stream: int) -> Any:
    """In one of a hundred rounds of a row the acceptance coins are the drafts' numbers."""
    numbers = draws_row(self, key, base, width, stream)
    if stream == ROUNDS and _hashed([key, base], 100):
        numbers[Purpose.ACCEPT :: PURPOSES] = numbers[::PURPOSES][: len(numbers[Purpose.ACCEPT :: PURPOSES])]
    return numbers


def _declares_bf16(self: Any, state: State, count: tuple[int, ...]) -> Any:
    """Declares a copy of the drafts' distributions that was rounded to bf16."""
    proposal = mutants.model_propose(self, state, count)
    if proposal.draft_BKV is None:
        return proposal
    rounded = proposal.draft_BKV.to(torch.bfloat16).to(proposal.draft_BKV.dtype)
    return replace(proposal, draft_BKV=rounded)


def _lenient_coins(self: StateDraws, chance_BK: Tensor) -> Tensor:
    return state_coins(self, 1.02 * chance_BK)


def _mixed_corrections(self: StateDraws, probs_BV: Tensor, *given: Any) -> Tensor:
    return state_token(self, 0.98 * probs_BV + 0.02 * sampling.one_hot(probs_BV.argmax(-1), probs_BV), *given)


def _wider_nucleus(probs: Any, top_p: float) -> Any:
    return nucleus_edge(probs, top_p + 0.01)


state_coins, state_token = StateDraws.coins, StateDraws.token
state_slot, draws_row, nucleus_edge = State.slot, CounterDraws._row, sampling._nucleus_edge
NUCLEUS = ("sampling=nucleus",)  # temperature 0.8, top-p 0.95
PENALTY = ("sampling.repetition_penalty=1.3",)
feed_of = DecoderModel._feed
first_written = WeakIdKeyDictionary()  # of a cache's tensor: what its slots got first, and which have it


def _keeps_stale(self: DecoderModel, *what: Any) -> Pass:
    """Slots that were written once stay as they are: rejected tokens leave their keys behind."""
    feed = feed_of(self, *what)

    def attend(own: Pass, query: Tensor, keys: Tensor, values: Tensor, *how: Any) -> Tensor:
        for each in (keys, values):
            if each not in first_written:
                first_written[each] = each.clone(), torch.zeros(each.shape[1], dtype=torch.bool)
            kept, known = first_written[each]
            new = own.slot_T[~known[own.slot_T]]
            kept[:, new], known[new] = each[:, new], True
            each[:, own.slot_T] = kept[:, own.slot_T]
        return attend_rows(own, query, keys, values, *how)

    feed.attend = attend
    return feed


FAULTS = [
    Fault("ratio swapped", verify, "_ratios", mutants._swapped, "law"),
    Fault("correction from the target's whole law", verify, "_residual_probs", mutants._target_again, "law"),
    Fault("filters on the draft alone", SamplingTransform, "_probs", _unfiltered_target, "filters", NUCLEUS),
    Fault(
        "draft law declared 5 % uniform",
        drafters.ModelDrafter,
        "propose",
        mutants._declares_mixture,
        "decisions",
    ),
    Fault("draft law from a bf16 copy", drafters.ModelDrafter, "propose", _declares_bf16, "decisions"),
    Fault("stale target cache", DecoderModel, "_feed", _keeps_stale, "law"),
    Fault("coins are the drafts' uniforms", State, "slot", _reused_coins, "decisions"),
    Fault("coins, uniforms and races share counters", CounterDraws, "_row", _shared_counters, "decisions"),
    Fault(
        "coins are the drafts' uniforms where row 0's length is a multiple of 8",
        State,
        "slot",
        _coins_reused_where(lambda lengths: lengths[0] % 8 == 0),
        "decisions",
    ),
    Fault(
        "coins are the drafts' uniforms in one round of 8",
        State,
        "slot",
        _coins_reused_where(partial(_hashed, rounds=8)),
        "decisions",
    ),
    Fault("coins are drafts' numbers in 1 % of rounds", CounterDraws, "_row", _coins_of_drafts, "decisions"),
    Fault("top-p 0.01 wider everywhere", sampling, "_nucleus_edge", _wider_nucleus, "filters", NUCLEUS),
    Fault(
        "penalties ignore the block", State, "prefix", mutants._committed_prefix_only, "filters", PENALTY
    ),
    Fault("bonus token from the draft", verify, "_residual_probs", mutants._bonus_from_draft, "law"),
    Fault("coins lenient by 2 %", StateDraws, "coins", _lenient_coins, "decisions"),
    Fault("corrections: 2 % are the likeliest", StateDraws, "token", _mixed_corrections, "decisions"),
]  # fmt: skip


def _by_rule() -> str | None:
    """A rule that is wrong by two thousandths."""
    random = np.random.default_rng(2)
    target, draft = (torch.from_numpy(random.dirichlet([1.0] * 6, size)) for size in (4, 3))
    seen = Round(1, (0, 1, 2, 3), 3, target, draft)
    with patch.object(verify, "_ratios", lambda block: mutants.verify_ratios(block) * 1.002):
        errors = [law.rule_error(verify.RULES["token"], seen, at) for at in range(4)]
    found = law.judge(NOISE, [0.0], [error for error in errors if error is not None])
    return None if found.outcome is Outcome.failed else "a rule 0.2 % too lenient passes"


def _by_departures(departures: list[float]) -> str | None:
    found = law.judge(NOISE, departures, [])
    return None if found.outcome is Outcome.failed else f"{departures[0]} of {len(departures)} passes"


def _by_one_position() -> str | None:
    """One position of a hundred is off by half as much again as rounding explains."""
    return _by_departures([0.03, *[0.0] * 99])


def _by_usual() -> str | None:
    """All positions are off by twelve times what regular passes usually differ by, and within the band."""
    return _by_departures([0.006] * 99)


def _by_places() -> str | None:
    """4 % of 10,000 drafts lie elsewhere."""
    seen = decisions.Decisions(verify.RULES["token"], 0, drafted=10_000)
    seen.places = (0.96 * np.arange(10_000) / 10_000).tolist()
    found = decisions.check_decisions(seen, LEVEL)
    return None if found.outcome is Outcome.failed else "drafts that never lie in the tail of 4 % pass"


def _thrice(band: Callable[..., float]) -> Callable[..., float]:
    return lambda *numbers: 3 * band(*numbers)


LEVEL = 1e-3 / certify.RANDOM_CHECKS
NOISE = law.Noise(0.01, 0.0005)
BLUNTED = [
    mutants.Mutant("tolerance of the rule 1e-2", law, "RULE_TOLERANCE", 1e-2, _by_rule),
    mutants.Mutant("drafts' band x3", decisions, "uniform_band", _thrice(decisions.uniform_band), _by_places),
    mutants.Mutant("rounding's band x3", law, "SAFETY", 3 * law.SAFETY, _by_one_position),
    mutants.Mutant("multiple of rounding x3", law, "MULTIPLE", 3 * law.MULTIPLE, _by_usual),
    mutants.Mutant("part of the largest x3", law, "PART_OF_LARGEST", 0.75, _by_usual),
]  # fmt: skip


@dataclass
class TransformersSampler:
    """transformers' `generate` with an assistant of another tokenizer, one text at a time.

    The assistant gets a token that the target lacks, as the draft of a real pair has: without one,
    transformers 5.23 ends in an AttributeError. `generate` changes the assistant, hence the copies.
    """

    name: str = "transformers"
    _models: dict[str, Any] = field(default_factory=dict)
    _place: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)

    def __post_init__(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        other = renumber(SHIPPED_FOLDER / "demo_draft", Path(self._place.name) / "other", tokens=600)
        for role, folder in (("target", SHIPPED_FOLDER / "demo"), ("assistant", other)):
            self._models[role] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            self._models[role + "_tokens"] = AutoTokenizer.from_pretrained(folder)
        self._models["assistant_tokens"].add_tokens(["<the draft's alone>"])
        settings = self._models["assistant"].generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = 3, "constant"

    def texts(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
        return [self._text(prompt, max_new_tokens) for prompt in prompts]

    def _text(self, prompt: Prompt, max_new_tokens: int) -> list[int]:
        torch.manual_seed(prompt_key(prompt.id) >> 1)
        ids = torch.tensor([prompt.token_ids])
        text = self._models["target"].generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, max_new_tokens=max_new_tokens, pad_token_id=0,
            assistant_model=copy.deepcopy(self._models["assistant"]), tokenizer=self._models["target_tokens"],
            assistant_tokenizer=copy.copy(self._models["assistant_tokens"]),
        )  # fmt: skip
        new: list[int] = text[0, ids.shape[1] :].tolist()
        return new


def certified(*overrides: str) -> dict[str, Any]:
    """The summary of a run of the command in this process, with its exit code."""
    said = io.StringIO()
    with patch.object(sys, "argv", ["llama-ssp", "task=certify", "out=null", "output=json", *overrides]):
        code = 0
        try:
            with redirect_stdout(said):
                cli.main()
        except SystemExit as left:
            code = int(left.code or 0)
    return {**json.loads(said.getvalue().splitlines()[-1]), "exit_code": code}


@contextmanager
def black_box(sampler: Any) -> Iterator[None]:
    """The command judges this sampler instead, by its texts alone."""
    real = certify.check_samples

    def replaced(_: Any, *others: Any) -> Any:
        return real(sampler, *others)

    with patch.object(certify, "check_samples", replaced):
        yield


@dataclass(frozen=True)
class Row:
    """One run of the table."""

    name: str
    due: str
    overrides: tuple[str, ...] = ()
    planted: Callable[[], AbstractContextManager[Any]] = nullcontext

    def line(self) -> tuple[bool, str]:
        """Runs the command; whether the verdict is the one that is due, and a line of the table."""
        torch.set_num_threads(1)
        began = time.process_time()
        with self.planted():
            found = certified(*self.overrides)
        failed = [f"{c['name']}: {c['says']}" for c in found["checks"] if c["outcome"] == "failed"]
        seconds = time.process_time() - began
        told = f"{found['verdict']} | {found['exit_code']} | {'; '.join(failed) or '-'} | {seconds:.0f}"
        return found["verdict"] == self.due, f"| {self.name} | {' '.join(self.overrides)} | {told} |"


def rows(seeds: int) -> list[Row]:
    """The faults, another library, and the sound code on `seeds` seeds."""
    found = [Row(fault.name, "different", ("seed=1", *fault.overrides), fault.planted) for fault in FAULTS]
    other = Row("transformers, another tokenizer", "different", ("seed=1",), _another_library)
    return [*found, other, *(Row("sound code", "same", (f"seed={seed}",)) for seed in range(seeds))]


def _another_library() -> AbstractContextManager[None]:
    return black_box(TransformersSampler())


def _line(number: int, seeds: int) -> tuple[bool, str]:
    return rows(seeds)[number].line()


def main() -> int:
    asked = dict(word.split("=", 1) for word in sys.argv[1:])
    seeds, wanted = int(asked.get("seeds", "20")), [word for word in asked.get("only", "").split(",") if word]
    numbers = [
        number for number, row in enumerate(rows(seeds))
        if not wanted or any(word in row.name for word in wanted)
    ]  # fmt: skip
    head = ["| fault | run with | verdict | exit | failed checks | CPU s |", "|---|---|---|---|---|---|"]
    print(*head, sep="\n", flush=True)
    by_number: dict[int, tuple[bool, str]] = {}
    with ProcessPoolExecutor(int(asked.get("jobs", "1")), get_context("spawn")) as pool:
        running = {pool.submit(_line, number, seeds): number for number in numbers}
        for done in as_completed(running):
            by_number[running[done]] = done.result()
            print(done.result()[1], flush=True)
    found = [by_number[number] for number in numbers]
    right = sum(right for right, _ in found)
    told = f"{right} of {len(found)} verdicts are those that are due: `different` of a fault, else `same`."
    print(told)
    if "write" in asked:
        about = surroundings({"device": "cpu, one thread a run"})
        lines = ["# certify: planted faults, and the sound code", "", *about, "", told, "", *head]
        write(asked["write"], "\n".join([*lines, *(line for _, line in found), ""]))
    return 0 if right == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
