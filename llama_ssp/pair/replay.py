"""Gives what models make of texts that are there. Each model is loaded by itself: a pair's need never meet.

A trained head is the exception: it reads the target's hidden states.
"""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from llama_ssp.config import Steps
from llama_ssp.distributed.comm import Ranks
from llama_ssp.models.interface import Model
from llama_ssp.pair.assembly import load_alone
from llama_ssp.pair.placements import Placements, placement_of, require_room
from llama_ssp.pair.session import PairSession
from llama_ssp.placing.pairs import PairSpec
from llama_ssp.planner.workload import DRAFT, TARGET
from llama_ssp.report.console import Progress
from llama_ssp.speculative.drafters.cross_vocab import IntersectionDrafter
from llama_ssp.speculative.drafters.head import head_drafter
from llama_ssp.speculative.drafters.local import Drafter, Sampler, reach
from llama_ssp.speculative.drafters.ngram import TEXT_DRAFTERS
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.replay import windows
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.text_laws import StartLaws, TextDraws, TokenLaw, laws_by_start, token_laws
from llama_ssp.text.compatibility import Diagnosis
from llama_ssp.text.tokenizer import Tokens, paired, read_tokens
from llama_ssp.text.translation import Intersection

log = logging.getLogger(__name__)

ROWS = 16  # texts of a pass


@dataclass(frozen=True)
class TokenText:
    """A text as token ids: its prompt, and what the target wrote after it."""

    prompt: Prompt
    token_ids: tuple[int, ...]

    @property
    def whole(self) -> list[int]:
        """Returns all its tokens."""
        return [*self.prompt.token_ids, *self.token_ids]


@dataclass(frozen=True)
class DraftLaws:
    """Holds what a drafter gives the tokens of one text, as (T, K) and (T,) of replay.py."""

    logprob_TK: Any
    reach_T: Any


def target_laws(
    spec: PairSpec, tokens: Tokens, texts: Sequence[TokenText], ranks: Ranks
) -> list[list[TokenLaw]]:
    """Returns the target's laws of each text's tokens."""
    transform = transform_of(spec, tokens)
    laws: list[list[TokenLaw]] = [[] for _ in texts]
    with _alone(spec, TARGET, texts, ranks) as model:
        runner = ModelRunner(model)
        for numbers, batch in _batches(f"target {model.name}", texts):
            state = _state(batch, model.device)
            of_batch = token_laws(runner, state, _places(batch), state, transform)
            for number, of_text in zip(numbers, of_batch, strict=True):
                laws[number] = of_text
    return laws


def draft_laws(
    spec: PairSpec, tokens: Tokens, texts: Sequence[TokenText], k: int, ranks: Ranks
) -> list[DraftLaws]:
    """Returns what the pair's drafter gives each text's tokens, in rounds of up to k drafts."""
    run = spec.run
    if run.drafts_from_text:
        draws = TextDraws(0)
        sampler = _sampler_of(spec, tokens, draws)
        drafter = TEXT_DRAFTERS[run.speculation.drafter](run.speculation, sampler)
        name = run.speculation.drafter.value
        return _by_start(name, drafter, None, draws, texts, k, torch.device("cpu"))
    assert run.draft is not None
    if run.draft.is_head:
        return _of_head(spec, tokens, texts, k, ranks)
    return _of_model(spec, tokens, texts, k, ranks)


def transform_of(spec: PairSpec, tokens: Tokens) -> SamplingTransform:
    """Returns what makes the distributions that the texts were drawn from."""
    run = spec.run
    ends = () if run.task.ignore_eos else tuple(sorted(tokens.end_ids))
    return SamplingTransform(run.sampling, ends, min(run.model.vocab, tokens.size))


def _sampler_of(spec: PairSpec, tokens: Tokens, draws: TextDraws) -> Sampler:
    """Returns what a drafter draws by that is asked at each token."""
    return Sampler(transform_of(spec, tokens), draws, top=spec.run.speculation.draft_top)


def match_of(spec: PairSpec, tokens: Tokens) -> Diagnosis | None:
    """Returns how the draft model's vocabulary matches the target's; None for bytes, and without a model.

    Raises ModelError if they cannot be paired.
    """
    run = spec.run
    if run.draft is None or run.draft.is_head or run.drafts_from_text:
        return None
    widths = run.model.vocab, run.draft.vocab
    match = paired(tokens, read_tokens(spec.draft_path, run.draft.vocab), widths, run.speculation.bridge)
    if match is not None:
        is_odd = match.notes or match.bridge
        log.log(logging.WARNING if is_odd else logging.INFO, "%s", match.in_words())
    return match


def _of_model(
    spec: PairSpec, tokens: Tokens, texts: Sequence[TokenText], k: int, ranks: Ranks
) -> list[DraftLaws]:
    """Returns a draft model's laws, by one pass."""
    match = match_of(spec, tokens)
    transform = transform_of(spec, tokens)
    top = spec.run.speculation.draft_top
    laws: list[DraftLaws | None] = [None] * len(texts)
    with _alone(spec, DRAFT, texts, ranks) as model:
        runner = ModelRunner(model)
        runner.limit = None  # see ModelRunner: a draft may mix both scales of positions
        bridged = None
        if match is not None and match.bridge is not None:
            bridged = _Bridged(runner, transform, match.bridge)
        for numbers, batch in _batches(f"draft {model.name}", texts):
            state = _state(batch, model.device)
            reaches = [
                [
                    reach(model.context, len(text.prompt.token_ids) + start)
                    for start in range(len(text.token_ids))
                ]
                for text in batch
            ]
            if bridged is None:
                fed = _cut(state, model)
                of_batch = token_laws(runner, fed, _places(batch, model.context), state, transform, top=top)
            else:
                fed, places, reaches = bridged.translated(batch, k)
                of_batch = token_laws(runner, fed, places, state, transform, bridged.in_target, top)
            for number, of_text, of_start in zip(numbers, of_batch, reaches, strict=True):
                logprob_T = np.array([law.logprob for law in of_text])
                laws[number] = DraftLaws(windows(logprob_T, k), np.array(of_start))
    return [one for one in laws if one is not None]


class _Bridged:
    """Translates texts for a draft model of another tokenizer, as its drafter does while it drafts."""

    def __init__(self, runner: ModelRunner, transform: SamplingTransform, bridge: Intersection) -> None:
        self._runner = runner
        self._bridge = bridge
        self._drafter = IntersectionDrafter(runner, Sampler(transform, TextDraws(0)), bridge)
        self.in_target = self._drafter.in_target

    def translated(
        self, batch: Sequence[TokenText], k: int
    ) -> tuple[State, list[list[int]], list[list[int]]]:
        """Returns the texts in the draft's tokens, where each of the target's stands, and how far drafts
        reach.

        The last token of a text is left out, as nothing is read after it: another stands in its place.
        """
        context = self._runner.model.context
        fed = list[Prompt]()
        places = list[list[int]]()
        reaches = list[list[int]]()
        for text in batch:
            own = self._bridge.prompt_ids(text.prompt.token_ids)
            capacity = self._drafter.slots_of(len(text.whole))
            of_text = list[int]()
            reach_T = list[int]()
            for number, token in enumerate(text.token_ids):
                of_text.append(len(own) if len(own) <= context else 0)
                slots = min(capacity, self._drafter.slots_of(len(text.prompt.token_ids) + number + k))
                reach_T.append(reach(slots, len(own)) if own else 0)
                own += self._bridge.later_ids([token])
            fed.append(Prompt(text.prompt.id, tuple([*own[: max(of_text)], 0])))
            places.append(of_text)
            reaches.append(reach_T)
        longest = max(len(prompt.token_ids) for prompt in fed)
        return State(fed, longest, self._runner.model.device), places, reaches


def _of_head(
    spec: PairSpec, tokens: Tokens, texts: Sequence[TokenText], k: int, ranks: Ranks
) -> list[DraftLaws]:
    """Returns a trained head's laws, round by round, with the target's hidden states."""
    run = replace(spec.run, engine=Steps.eager)  # what is compiled takes longer than these passes
    pair = PairSession(replace(spec, run=run), ranks)
    pair.load(min(ROWS, len(texts)), max(len(text.whole) for text in texts) + k)
    models = pair.models
    assert models.target is not None and models.head is not None
    draws = TextDraws(0)
    runner = ModelRunner(models.target, models.prefill_chunk, k)
    drafter = head_drafter(models.head, runner, _sampler_of(spec, tokens, draws))
    laws = _by_start(f"head {models.head.name}", drafter, runner, draws, texts, k, models.target.device)
    del models, runner, drafter
    pair.close()
    return laws


def _by_start(
    name: str,
    drafter: Drafter,
    target: ModelRunner | None,
    draws: TextDraws,
    texts: Sequence[TokenText],
    k: int,
    device: torch.device,
) -> list[DraftLaws]:
    """Returns the laws of a drafter that is asked at each token."""
    laws = [StartLaws([], [])] * len(texts)
    for numbers, batch in _batches(name, texts):
        draws.texts = [text.whole for text in batch]
        state = State([text.prompt for text in batch], max(map(len, draws.texts)) + k, device)
        of_batch = laws_by_start(drafter, target, state, [text.token_ids for text in batch], k)
        for number, of_text in zip(numbers, of_batch, strict=True):
            laws[number] = of_text
    return [DraftLaws(np.array(one.logprobs).reshape(len(one.reach), k), np.array(one.reach)) for one in laws]


@contextmanager
def _alone(spec: PairSpec, role: str, texts: Sequence[TokenText], ranks: Ranks) -> Iterator[Model]:
    """Gives one model of the pair, which is freed afterwards. Raises DistributedError if it does not fit."""
    placed = placement_of(spec, role)
    longest = max(len(text.whole) for text in texts)
    if spec.run.plan.enforce:
        require_room(Placements(placed), spec.run, min(ROWS, len(texts)), min(longest, placed.model.context))
    model = load_alone(placed, ranks)
    try:
        yield model
    finally:
        del model
        gc.collect()
        torch.cuda.empty_cache()


def _batches(name: str, texts: Sequence[TokenText]) -> Iterator[tuple[list[int], list[TokenText]]]:
    """Yields texts of like lengths together, with their numbers."""
    order = sorted(range(len(texts)), key=lambda number: len(texts[number].whole))
    with Progress(f"replay: {name}", len(texts), "texts") as progress:
        for first in range(0, len(order), ROWS):
            numbers = order[first : first + ROWS]
            yield numbers, [texts[number] for number in numbers]
            progress.advance(len(numbers))


def _state(batch: Sequence[TokenText], device: torch.device) -> State:
    """Returns a state of whole texts, whose prompts are those of the texts."""
    state = State([text.prompt for text in batch], max(len(text.whole) for text in batch), device)
    state.append({row: list(text.token_ids) for row, text in enumerate(batch)})
    return state


def _cut(state: State, model: Model) -> State:
    """Returns the texts as far as the model can read them, and a token more."""
    if max(state.lengths) <= model.context + 1:
        return state
    cut = [Prompt("", tuple(text[: model.context + 1])) for text in state.texts]
    return State(cut, max(len(prompt.token_ids) for prompt in cut), state.device)


def _places(batch: Sequence[TokenText], context: int | None = None) -> list[list[int]]:
    """Returns how many tokens stand before each of a text; 0 beyond the context."""
    places = [
        [len(text.prompt.token_ids) + number for number in range(len(text.token_ids))] for text in batch
    ]
    if context is None:
        return places
    return [[place if place <= context else 0 for place in of_text] for of_text in places]
