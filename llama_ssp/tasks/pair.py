"""The pair a task runs on: tokenizers first, then memory, then weights, so that what can fail early does."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from llama_ssp.config import Drafting, Dtype, ModelConf, RunConf
from llama_ssp.draws import CounterDraws
from llama_ssp.engine import Drafter, Engine, ModelDrafter, NgramDrafter, NoDrafter, Runner
from llama_ssp.inputs import Entry
from llama_ssp.load.causal import CausalModel
from llama_ssp.load.devices import TORCH_DTYPES, describe, device_of, dtype_of, memory_of
from llama_ssp.load.models import load, load_part, require_supported
from llama_ssp.load.tokens import Tokens, read_tokens, require_same_tokens
from llama_ssp.lookahead import AdaptiveLookahead, FixedLookahead, Lookahead
from llama_ssp.plan import Bill, bill, parameters, require_room
from llama_ssp.ranks import ALONE, Ranks
from llama_ssp.sampling import Laws
from llama_ssp.verify import RULES

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seat:
    """One role's model, its files, and where and how it is held."""

    role: str
    model: ModelConf
    path: Path | None
    device: torch.device
    dtype: Dtype


@dataclass(frozen=True)
class Pair:
    """Loaded models; `draft` is None when nobody, another rank or the text itself drafts."""

    target: CausalModel
    draft: CausalModel | None
    devices: dict[str, str]
    ranks: Ranks = ALONE


def seats(entry: Entry) -> list[Seat]:
    """The roles this pair needs, each with its device and number format."""
    run, draft_path = entry.run, entry.draft_path
    asked = [("model", run.model, entry.target_path, run.placement.target_device)]
    if run.draft is not None and run.speculation.drafter is Drafting.model and _drafts(run):
        asked.append(("draft", run.draft, draft_path, run.placement.draft_device))
    found = []
    for role, model, path, device_name in asked:
        device = device_of(device_name, f"placement.{'target' if role == 'model' else role}_device")
        found.append(Seat(role, model, path, device, dtype_of(model.dtype, device, f"{role}.dtype")))
    _warn(found, run)
    return found


def tokens_of(found: list[Seat]) -> Tokens:
    """The pair's tokenizer, after checking that both have the same."""
    own = [read_tokens(seat.path, seat.model.vocab) for seat in found]
    for other, seat in zip(own[1:], found[1:], strict=True):
        require_same_tokens(own[0], other, (found[0].model.vocab, seat.model.vocab))
    return own[0]


def open_pair(
    found: list[Seat], reserve: float, gib: float | None, rows: int, slots: int, ranks: Ranks = ALONE
) -> Pair:
    """Loads the models, if they fit with caches of `rows` texts of `slots` tokens."""
    require_loadable(found, reserve, gib, rows, slots, ranks)
    return Shelf(ranks).open(found)


def require_loadable(
    found: list[Seat], reserve: float, gib: float | None, rows: int, slots: int, ranks: Ranks
) -> None:
    """Refuses what cannot be run or does not fit, before weights are read."""
    for seat in found:
        if seat.path is not None:
            require_supported(seat.path)
    by_device: dict[torch.device, list[Bill]] = {}
    for seat in found:
        bills = by_device.setdefault(seat.device, [])
        whole = bill(seat.role, seat.model, seat.dtype, rows, slots)
        bills.append(_own_part(whole, seat, ranks))
    for device, bills in by_device.items():
        capacity = memory_of(device) if gib is None else int(gib * 2**30)
        require_room(bills, str(device), capacity, reserve)


class Shelf:
    """Keeps the models of the last pair, so that what the next one shares is not loaded again."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._held: list[tuple[Seat, CausalModel]] = []

    def open(self, found: list[Seat]) -> Pair:
        """Loads the pair; what it does not need is let go of first."""
        if self._held:
            self._held = [(seat, model) for seat, model in self._held if seat in found]
            gc.collect()
            torch.cuda.empty_cache()
        self._ranks.barrier()  # all have found that it fits
        loaded = {seat.role: self._model(seat) for seat in found if _is_held(seat, self._ranks)}
        self._ranks.barrier()
        over = f", over {self._ranks.world} ranks" if self._ranks.world > 1 else ""
        devices = {
            seat.role: f"{describe(seat.device)}, {seat.dtype.value}{over if seat.role == 'model' else ''}"
            for seat in found
        }
        return Pair(loaded["model"], loaded.get("draft"), devices, self._ranks)

    def _model(self, seat: Seat) -> CausalModel:
        for known, model in self._held:
            if known == seat:
                return model
        if seat.role == "model" and self._ranks.world > 1:
            model = load_part(seat.model, seat.path, seat.dtype, seat.device, seat.role, self._ranks)
        else:
            model = load(seat.model, seat.path, seat.dtype, seat.device, seat.role)
        self._held.append((seat, model))
        return model


def engine_for(
    pair: Pair, run: RunConf, tokens: Tokens, end_ids: frozenset[int], seed: int, chunk: int
) -> Engine:
    """One engine with caches and draws of its own; only real tokens are ever drawn."""
    vocab = min(pair.target.vocab, tokens.size)
    laws = Laws(run.sampling, tuple(sorted(end_ids)), vocab)
    draws = CounterDraws(seed)
    drafter: Drafter = NoDrafter()
    if pair.draft is not None:
        drafter = ModelDrafter(Runner(pair.draft, chunk), laws, draws)
    elif run.speculation.drafter is Drafting.ngram:
        wide = torch.promote_types(pair.target.dtype, torch.float32)
        spec = run.speculation
        drafter = NgramDrafter(spec.ngram_min, spec.ngram_max, vocab, wide)
    rule = RULES[run.speculation.verification.value]
    return Engine(Runner(pair.target, chunk), drafter, laws, rule, draws, pair.ranks)


def lookahead_for(run: RunConf, rows: int) -> Lookahead:
    """How K is chosen for a batch of this many rows."""
    spec = run.speculation
    if spec.adaptive:
        return AdaptiveLookahead(spec.k_max, spec.cost_ratio, rows)
    return FixedLookahead(spec.k, rows)


def _is_held(seat: Seat, ranks: Ranks) -> bool:
    """The target is split over all ranks; the leader alone drafts."""
    return seat.role == "model" or ranks.is_leader


def _own_part(whole: Bill, seat: Seat, ranks: Ranks) -> Bill:
    """What this rank's device holds of it; the ranks of a machine without GPUs share its memory."""
    if ranks.world == 1 or seat.device.type == "cpu":
        return whole
    if seat.role != "model":
        return whole if ranks.is_leader else replace(whole, weights=0, cache=0)
    return replace(whole, weights=-(-whole.weights // ranks.world), cache=-(-whole.cache // ranks.world))


def _drafts(run: RunConf) -> bool:
    return run.speculation.k > 0 or run.speculation.adaptive


def _warn(found: list[Seat], run: RunConf) -> None:
    target, draft = found[0], found[1] if len(found) > 1 else None
    if run.sampling.top_k > target.model.vocab:
        log.warning(
            "sampling.top_k=%d exceeds the vocabulary of %d: off",
            run.sampling.top_k,
            target.model.vocab,
        )
    if target.dtype is Dtype.int8 and run.sampling.temperature == 0:
        log.warning("int8 logits depend on what is computed beside them: greedy equality is not promised")
    for seat in found:
        if seat.device.type == "cpu" and TORCH_DTYPES[seat.dtype] is torch.float16:
            log.warning("%s.dtype=fp16 is several times slower than bf16 on a CPU", seat.role)
    if draft is None:
        if run.draft is None and run.speculation.drafter is Drafting.model and _drafts(run):
            log.info("no draft model: plain decoding")
        return
    if draft.path is not None and target.path is not None and draft.path.samefile(target.path):
        log.warning("the draft is the target itself: exact, but no gain is expected")
    elif parameters(draft.model) >= parameters(target.model):
        log.warning(
            "draft %s is no smaller than target %s: drafting pays only if acceptance exceeds the cost ratio",
            draft.model.name, target.model.name,
        )  # fmt: skip
