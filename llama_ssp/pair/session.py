"""One pair on this rank, from its configuration to engines: what the Python API, tasks and benchmarks share.

session = PairSession(spec, ranks)          # devices, number formats, tokenizers
prompts = session.prompts(texts)            # as token ids
session.load(rows=8, max_tokens=600)        # checks that everything fits, then reads the weights
engine = session.engine(seed=0)             # as many as needed, each with KV caches of its own
"""

from __future__ import annotations

import gc
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from llama_ssp.config import USUAL_CHUNK, USUAL_ROWS, Drafting, LogprobsOf, OnBadRow, RunConf
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.distributed.process_group import open_ranks
from llama_ssp.errors import DataError, MemoryFull, UsageError, first_line, lacks_gpu_memory
from llama_ssp.models.devices import device_of, usage_of
from llama_ssp.pair.assembly import COMPILED, ModelCache, RankModels, engine_for, prepare, prepare_anew
from llama_ssp.pair.given import NOTHING, Given
from llama_ssp.pair.placements import model_placements, require_loadable, tokens_of
from llama_ssp.pair.requests import TokenRequest, requests_of
from llama_ssp.pair.run import RunSettings
from llama_ssp.pair.token_prompts import prompt_of
from llama_ssp.placing.engine import compiled_before
from llama_ssp.placing.pairs import PairSpec
from llama_ssp.placing.prediction import Prediction, RunMeasurement, fitting
from llama_ssp.planner.advice import largest
from llama_ssp.planner.workload import GIB, MIB
from llama_ssp.report.run_folder import sources
from llama_ssp.speculative.draft_length import Costs, lookahead_for
from llama_ssp.speculative.engine import RankEngine
from llama_ssp.speculative.measure_costs import measured, measured_ks
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import ratio
from llama_ssp.speculative.verification import Rule
from llama_ssp.text.prompts import CORRECT_PROMPTS, TextPrompt

log = logging.getLogger(__name__)
Ends = frozenset[int]  # ids of tokens that end a text
LEAST_CONTEXT = 2048  # of a conversation that takes what fits
MEASURED_CONTEXT = 8192  # tokens of the texts, at most, on which costs are measured
# What torch says of memory that it could not get.
ASKED = re.compile(r"allocate ([\d.]+) (GiB|MiB)")
UNITS = {"GiB": GIB, "MiB": MIB}


class PairSession:
    """A target and its drafter. `models` is there after `load`."""

    def __init__(self, spec: PairSpec, ranks: Ranks = ALONE, given: Given = NOTHING) -> None:
        """Takes what a script gives in place of files and names.

        Raises UsageError or ModelError where the pair cannot be run as configured.
        """
        self._given = given
        self._require_drafter(spec.run)
        self.spec = spec
        self.run = spec.run
        self.ranks = ranks
        self.placements = model_placements(spec, given)
        self.tokens = tokens_of(self.placements, given)
        self.end_ids = self.ends_of(spec.run)
        self._models: RankModels | None = None
        self._prediction: Prediction | None = None
        self.engines: dict[str, str] = {}  # how steps run, by role
        self.costs: Costs | None = None  # of rounds at each K, if they have been measured
        self._lacks_k = False  # whether `settle` is to prepare the rounds of the run
        if spec.sampling.source:
            log.info("%s", spec.sampling.in_words)

    @property
    def models(self) -> RankModels:
        """This rank's part of the models. Raises RuntimeError before `load` and after `close`."""
        if self._models is None:
            raise RuntimeError("the pair is not loaded, or it was closed")
        return self._models

    @property
    def is_loaded(self) -> bool:
        """Whether the models are there."""
        return self._models is not None

    @property
    def slots(self) -> int:
        """The tokens of a text, at most, that `load` has made sure of."""
        return self._slots

    def figures(self) -> dict[str, Any]:
        """Returns where the models are and how the two vocabularies match, for the summary."""
        paired = self.tokens.paired
        return {
            "devices": self._models.devices if self._models else {},
            "engines": self.engines,
            "vocabulary": paired.record() if paired else None,
        }

    def prompt(self, text: TextPrompt, run: RunConf | None = None) -> Prompt:
        """Returns the prompt as token ids. Raises DataError where the model cannot continue it."""
        return prompt_of(text, self.tokens, run or self.run)

    def prompts(
        self, texts: list[TextPrompt], policy: OnBadRow, skipped: list[str]
    ) -> list[tuple[TextPrompt, Prompt]]:
        """Returns the prompts as token ids. A bad one raises DataError or is `skipped`, by the policy."""
        usable = []
        for text in texts:
            try:
                usable.append((text, self.prompt(text)))
            except DataError as problem:
                if policy is OnBadRow.fail:
                    raise
                log.warning("skipped: %s", problem)
                skipped.append(str(problem))
        if texts and not usable:
            raise DataError("no usable prompt is left", found=f"{len(skipped)} bad ones", fix=CORRECT_PROMPTS)
        return usable

    def check(self, rows: int, max_tokens: int, caches: tuple[int, int] = (1, 1)) -> None:
        """Plans what `open` will load; raises MemoryFull if it does not fit. Arguments: see `load`."""
        self.rows = rows
        self._slots = min(max_tokens, self.run.model.context)
        self.placements, self._prediction = require_loadable(
            self.spec, self.placements, self.ranks, rows, self._slots, caches
        )

    def longest_that_fits(self) -> int:
        """Returns how many tokens a text may have, by the plan; at most the model's context.

        Where nothing is planned, it is LEAST_CONTEXT at most. All ranks call it. Raises DistributedError
        where not even so many tokens fit.
        """
        context = self.run.model.context
        fits = min(LEAST_CONTEXT, context)
        self.check(1, fits)
        if self._prediction is not None:
            fits = max(fits, largest(self._prediction.request, self._prediction.option).context_tokens)
        return min(tokens for [tokens] in self.ranks.gather_ints([fits]))

    def rows_for(self, texts: int, max_tokens: int) -> int:
        """Returns the rows of a batch for so many texts: the task's, or the plan's. All ranks call it."""
        if self.run.task.batch_size is not None:
            return min(self.run.task.batch_size, texts)
        self.check(1, max_tokens)
        rows = self._prediction.rows_that_pay(texts) if self._prediction else min(USUAL_ROWS, texts)
        return min(row for [row] in self.ranks.gather_ints([rows]))

    def load(
        self, rows: int, max_tokens: int, caches: tuple[int, int] = (1, 1), prompts: Sequence[Prompt] = ()
    ) -> PairSession:
        """Loads the models, if they fit together with their KV caches; returns the session.

        A KV cache holds `rows` texts of at most `max_tokens` tokens, prompt included; `caches` says how many
        of the target's and of the draft's there are at once. Costs, if any, are measured on `prompts`.
        """
        self.check(rows, max_tokens, caches)
        try:
            self.open(ModelCache(self.ranks, self.run.placement))
            self.measure_costs(prompts)
        except Exception as error:
            raise self.full_gpu(error) or error from error.__cause__
        return self

    def open(self, cache: ModelCache) -> PairSession:
        """Loads the models after `check`, except those in the cache; returns the session."""
        chunk = self.run.task.prefill_chunk or USUAL_CHUNK
        if self._prediction:
            chunk = self._prediction.request.work.prefill_chunk
        self._models = replace(cache.open(self.placements), prefill_chunk=chunk)
        spec = self.run.speculation if self.run.most_drafts else regular(self.run).speculation
        # A job that keeps one K needs no graphs of others, except to measure them. Drafts that are looked up
        # are of any number in each row, so all their graphs are captured at once.
        self._lacks_k = self.run.task.chooses_k and self._measures and self.run.has_draft_model
        ks = measured_ks(spec.longest) if self._lacks_k else []
        with self.ranks.loading():
            prepare(self._models, spec, self.rows, self._slots, ks)
        self.engines = {}
        self._note_engines()
        return self

    def _note_engines(self) -> None:
        """Notes how steps of all ranks' models run; the leader warns of a trial that has failed since.

        All ranks call it.
        """
        known = self.engines
        self.engines = {}
        for text in self.ranks.gather_texts(json.dumps(self.models.engines)):
            self.engines = json.loads(text) | self.engines

        for placed in self.placements:
            engine = self.engines.get(placed.role, COMPILED)
            is_new = engine != known.get(placed.role)
            if placed.on_trial and self.ranks.is_leader and engine != COMPILED and is_new:
                log.warning("engine: the steps of %s run %s", placed.model.name, engine)
            if placed.device.type == "cpu" and self.models.engines.get(placed.role) == COMPILED:
                compiled_before(placed.model, placed.dtype).touch()

    def close(self) -> None:
        """Frees the models, except those in a cache."""
        self._models = None
        gc.collect()
        torch.cuda.empty_cache()  # the next pair is checked against what is free

    def settle(self) -> None:
        """Prepares the rounds of `run`, if `load` has prepared only those that it measured.

        What was captured to be measured is freed: decisions of 16 drafts a row take most memory. Steps on
        trial are compared again, so `engines` may change. All ranks call it.
        """
        if not self._lacks_k:
            return
        self._lacks_k = False
        with self.ranks.loading():
            prepare_anew(self.models, self.run.speculation, self.rows, self._slots)
        self._note_engines()

    @property
    def _measures(self) -> bool:
        """Returns whether the task chooses K by measured costs."""
        run = self.run
        spec = run.speculation
        # With a draft of another tokenizer a round's cost depends on the text, so it is not measured.
        is_bridged = self.tokens.paired is not None and self.tokens.paired.bridge is not None
        has_drafts = run.drafts_from_text or (run.has_draft_model and not is_bridged)
        is_open = spec.fixed_k is None and spec.cost_ratio is None
        return run.task.measures_costs and is_open and has_drafts

    def measure_costs(self, prompts: Sequence[Prompt] = ()) -> None:
        """Measures `costs`, those of a round at each K, if the task chooses K by them. All ranks call it."""
        run = self.run
        draft = self.models.draft_context
        if self._measures:
            slots = min(self._slots, MEASURED_CONTEXT)
            slots = min(slots, draft) if run.has_draft_model else slots
            engine = self.engine(0, end_ids=frozenset())
            self.costs = measured(engine, run, self.rows, slots, self.ranks, prompts)

    def full_gpu(self, error: BaseException) -> MemoryFull | None:
        """Returns the error of a full GPU, with the plan, what is held and a fix; None for another error."""
        full = next((one for one in (error, error.__cause__) if one and lacks_gpu_memory(one)), None)
        if full is None or self._prediction is None:
            return None
        usage = usage_of(self.placements.target.device)
        models = self._models
        loaded = list(models.loaded.values()) if models else []
        weights = sum(model.weights_bytes for model in loaded)
        held = {"weights": weights, "caches": sum(model.held_bytes for model in loaded) - weights}
        held["graphs"] = usage["graphs"]
        held["other tensors"] = max(0, usage["reserved"] - sum(held.values()))
        held["libraries and other programs"] = usage["others"]
        said = ASKED.search(str(full))
        needed = usage["reserved"] + int(float(said[1]) * UNITS[said[2]] if said else 0)
        available = usage["reserved"] + usage["free"]
        planned, fix = fitting(self._prediction, self.ranks.rank, available, needed)
        words = ", ".join(f"{name} {size / GIB:.2f}" for name, size in held.items() if size)
        where = f"planned {planned / GIB:.2f} GiB, held {words}"
        return MemoryFull("the GPU's memory is full", where=where, found=first_line(full), fix=fix)

    def engine(
        self, seed: int, run: RunConf | None = None, end_ids: Ends | None = None, rule: Rule | None = None
    ) -> RankEngine:
        """Returns an engine with its own KV caches and draws; `run` and `rule` replace the session's."""
        run = run or self.run
        ends = self.ends_of(run) if end_ids is None else end_ids
        self._require_drafter(run)
        return engine_for(self.models, run, self.tokens, ends, seed, rule, self._given.make_drafter)

    def _require_drafter(self, run: RunConf) -> None:
        """Raises UsageError where the run wants a drafter of a script's own, and there is none."""
        if run.speculation.drafter is Drafting.own and self._given.make_drafter is None:
            raise UsageError(
                "there is no drafter of your own",
                where="speculation.drafter",
                found="own",
                allowed="model, ngram, none",
                fix="give it in Python: load_pair(..., drafter=Mine)",
            )

    def ends_of(self, run: RunConf) -> Ends:
        """Returns the tokens that end a text of the run."""
        return frozenset[int]() if run.task.writes_past_end else self.tokens.end_ids

    def run_settings(self, rows: int, run: RunConf | None = None, is_clocked: bool = True) -> RunSettings:
        """Returns how texts of `run` are written, `rows` at a time; an adaptive K goes by `costs`."""
        run = run or self.run
        return RunSettings(
            rows=rows,
            lookahead=partial(lookahead_for, run, costs=self.costs),
            ends=self.ends_of(run),
            decode=self.tokens.decode,
            is_sampled=run.task.logprobs_of is LogprobsOf.sampled,
            is_clocked=is_clocked,
        )

    def requests(
        self,
        prompts: Sequence[Prompt],
        run: RunConf | None = None,
        stops: Sequence[str] = (),
        max_new_tokens: int | None = None,
    ) -> list[TokenRequest]:
        """Returns the requests to continue these prompts as `run` says; their indices count from 0."""
        run = run or self.run
        task = run.task
        return requests_of(
            prompts,
            run.sampling,
            task.max_new_tokens if max_new_tokens is None else max_new_tokens,
            stop=tuple(self.tokens.stops(stops)),
            logprobs=task.logprobs,
            echo=task.echo,
        )

    def measurement(
        self, name: str, figures: Mapping[str, Any], run: RunConf | None = None, rows: int | None = None
    ) -> RunMeasurement:
        """Returns the speed and acceptance of texts generated with `run`, from the JSON's `figures`."""
        spec = (run or self.run).speculation
        k = spec.fixed_k
        if spec.drafter is Drafting.none or not spec.may_draft:
            k = 0
        took = figures["ms_per_token"]
        accepted = figures["acceptance_rate_decided"]
        held = self.models.held_bytes
        return RunMeasurement(
            name=name,
            prediction=self._prediction,
            rows=rows or self.rows,
            k=k,
            ms_per_token=took,
            acceptance=accepted,
            held_bytes=held,
            drafts_a_round=ratio(figures["tokens_drafted"], figures["row_rounds"]),
            tokens_a_round=figures["tokens_per_target_forward"],
        )


def regular(run: RunConf) -> RunConf:
    """Returns the run by regular sampling: speculation without a drafter."""
    spec = replace(run.speculation, drafter=Drafting.none, k=0, adaptive=False)
    return replace(run, speculation=spec)


def ranks_of(run: RunConf) -> Ranks:
    """Returns the ranks that torchrun started, or this process alone."""
    device = device_of(run.placement.target_device, "placement.target_device")
    placement = run.placement
    return open_ranks(device, placement.timeout_s, placement.appear_s, placement.loading_s)


def require_same_code(ranks: Ranks) -> None:
    """Raises DistributedError where ranks run other code of this package. All ranks call it."""
    if ranks.world > 1:
        ranks.require_same("the code of llama_ssp", json.dumps(sources()))


@contextmanager
def first_cause(ranks: Ranks, pair: PairSession | None = None) -> Iterator[None]:
    """Makes all ranks raise the first failure; for a full GPU its error says what `pair` holds there."""
    if ranks.ended:
        raise UsageError(
            "the pair has ended with an earlier error", found=ranks.ended, fix="start the script again"
        )
    try:
        yield
    except GeneratorExit:
        raise
    except BaseException as error:
        cause = ranks.cause_of((pair and pair.full_gpu(error)) or error)
        if cause is error:
            raise
        raise cause from error
