"""Scenarios whose whole tree is walked: the loop that ships against the target's distribution, text by
text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from llama_ssp.config import SamplingConfig
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.heads.model import HeadModel
from llama_ssp.speculative.draft_length import AdaptiveDraftLength, Costs, DraftLength, FixedDraftLength
from llama_ssp.speculative.drafters.block_head import head_drafter
from llama_ssp.speculative.drafters.cross_vocab import IntersectionDrafter
from llama_ssp.speculative.drafters.local import Drafter, ModelDrafter
from llama_ssp.speculative.drafters.ngram import NgramDrafter
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import Shape
from llama_ssp.speculative.verification import RULES, TREE
from tests.heads import loaded, save_dflash, save_head
from tests.proofs.choices import distance, every_branch
from tests.proofs.reference import reference_law
from tests.proofs.toy import WIDTH, toy
from tests.tongues import PAIRS, bridge

Outcome = tuple[tuple[tuple[int, ...], str | None], ...]


@dataclass(frozen=True)
class Scenario:
    """One run small enough to walk. `draft` is a seed, or "ngram", "same" (the target), "none"."""

    prompts: tuple[tuple[int, ...], ...] = ((1, 0),)
    vocab: int = 3
    k: int = 2
    new: int = 3
    rule: str = "block"
    draft: int | str = 1
    draft_vocab: int | None = None
    draft_context: int = 64
    context: int = 64
    window: int | None = None
    adaptive: bool = False
    ends: frozenset[int] = frozenset()
    stop: tuple[int, ...] | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    chunk: int = 512
    build: Callable[..., CausalModel] = toy
    plain: Callable[[], Any] | None = None  # the target's module once more, for the reference
    bridge: str | None = None  # between two of tests.tongues
    head: tuple[int, ...] | None = None  # a trained head drafts, which has these of the target's tokens
    width: int = 0  # of its block, if it gives all drafts in one pass
    siblings: tuple[int, ...] = (0,)  # of each draft, by row


class Shapes(FixedDraftLength):
    """Rows with other numbers of siblings each."""

    def __init__(self, k: int, rows: int, each: tuple[int, ...]) -> None:
        super().__init__(k, rows)
        self.by_row = [(k, siblings) for siblings in [*each, *each[-1:] * rows][:rows]]

    def choose(self) -> list[Shape]:
        return self.by_row


class StopAt:
    """Ends a row when its generated tokens hold a sequence, as a stop string would."""

    def __init__(self, sequence: tuple[int, ...], rows: int) -> None:
        self._sequence, self._seen = sequence, [[] for _ in range(rows)]

    def kept(self, row: int, tokens: list[int], _last: bool) -> int | None:
        for count, token in enumerate(tokens, start=1):
            self._seen[row].append(token)
            if tuple(self._seen[row][-len(self._sequence) :]) == self._sequence:
                return count
        return None


def models(scenario: Scenario) -> tuple[CausalModel, CausalModel | HeadModel | None]:
    s = scenario
    target = s.build(s.vocab, 0, context=s.context, window=s.window)
    if s.head is not None:
        head = head_of(s.vocab, s.head, s.draft_context, s.width)
        target.tap(head.taps)
        return target, head
    if s.draft == "same":
        return target, s.build(s.vocab, 0, context=s.context, window=s.window)
    if isinstance(s.draft, int):
        return target, s.build(s.draft_vocab or s.vocab, s.draft, context=s.draft_context)
    return target, None


@cache
def head_of(vocab: int, ids: tuple[int, ...], context: int, width: int) -> HeadModel:
    """A random head for a toy; with a width one that gives all drafts in one pass."""
    sizes = {"vocab": vocab, "target_dim": WIDTH, "taps": (0, 1, 2), "dim": 8, "loud": 0.8}
    with TemporaryDirectory() as folder:
        if width:
            own = {"vocab": vocab, "dim": WIDTH, "taps": (0, 1), "width": width, "whole": True}
            return loaded(save_dflash(Path(folder), **own, ids=list(ids), context=context))
        return loaded(
            save_head(Path(folder), **sizes, ids=list(ids), context=context, flags=("norm_output",))
        )


def walk(scenario: Scenario) -> tuple[float, int]:
    """Total variation between the loop's joint distribution and the target's, and the number of branches."""
    target, draft = models(scenario)
    found, branches = every_branch(lambda draws: play(scenario, target, draft, draws))
    module = scenario.plain() if scenario.plain else target.module
    return distance(found, expected(scenario, module)), branches


def play(s: Scenario, target: CausalModel, draft: CausalModel | HeadModel | None, draws: Any) -> Outcome:
    """One run of the shipping loop under the given draws."""
    transform = SamplingTransform(s.sampling, tuple(s.ends), target.vocab)
    drafter: Any = Drafter()
    runner = ModelRunner(target, s.chunk)
    if isinstance(draft, HeadModel):
        drafter = head_drafter(draft, runner, transform, draws)
    elif draft is not None and s.bridge is not None:
        drafter = IntersectionDrafter(ModelRunner(draft, s.chunk), transform, draws, bridge(s.bridge))
    elif draft is not None:
        drafter = ModelDrafter(ModelRunner(draft, s.chunk), transform, draws)
    elif s.draft == "ngram":
        drafter = NgramDrafter(1, 2, target.vocab, torch.float64)
    room = s.k * max(s.siblings)
    rule = TREE if room else RULES[s.rule]
    engine = Engine(runner, drafter, transform, rule, draws, siblings=room)
    prompts = [Prompt(str(row), ids) for row, ids in enumerate(s.prompts)]
    state = engine.prefill(prompts, s.new)
    limits = Limits(s.new, s.ends, StopAt(s.stop, len(prompts)) if s.stop else None)
    rows = len(prompts)
    lookahead: DraftLength = Shapes(s.k, rows, s.siblings)
    if s.adaptive:
        lookahead = AdaptiveDraftLength(Costs.of_ratio(0.3, s.k, max(s.siblings)), rows)
    for _ in generate(engine, state, limits, lookahead):
        pass
    return tuple((tuple(state.generated(row)), state.finished[row]) for row in range(rows))


def expected(s: Scenario, module: Any) -> dict[Outcome, float]:
    """The target's own distribution over whole texts: no cache, no draft, one forward a prefix."""
    joint: dict[Outcome, float] = {(): 1.0}
    for prompt in s.prompts:
        row: dict[tuple[tuple[int, ...], str | None], float] = {}
        _grow(s, module, prompt, (), 1.0, row)
        joint = {(*texts, text): p * q for texts, p in joint.items() for text, q in row.items()}
    return joint


def _grow(
    s: Scenario, module: Any, prompt: tuple[int, ...], text: tuple[int, ...], weight: float, probs: dict
) -> None:
    reason = _ended(s, prompt, text)
    if reason is not None:
        probs[text, reason] = probs.get((text, reason), 0.0) + weight
        return
    ids = [*prompt, *text]
    logits = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].tolist()
    for token, share in enumerate(reference_law(logits, ids, len(prompt), s.sampling, s.ends)):
        if share > 0:
            _grow(s, module, prompt, (*text, token), weight * share, probs)


def _ended(s: Scenario, prompt: tuple[int, ...], text: tuple[int, ...]) -> str | None:
    if text and text[-1] in s.ends:
        return "eos"
    if s.stop and text[-len(s.stop) :] == s.stop:
        return "stop"
    if len(text) == s.new:
        return "length"
    return "context" if len(prompt) + len(text) == s.context else None


_CONTROLS = SamplingConfig(
    temperature=2.5, top_k=3, top_p=0.98, min_p=0.02, repetition_penalty=1.3, frequency_penalty=0.2,
    presence_penalty=0.3, logit_bias={0: 0.5}, bad_tokens=[3], min_new_tokens=2,
)  # fmt: skip

_EARLY = SamplingConfig(bad_tokens=[0], min_new_tokens=2)  # token 1 ends a text: early it is forbidden, too

BASE: dict[str, Scenario] = {
    "plain": Scenario(),
    "full length": Scenario(vocab=2, k=3, new=4),
    "regular sampling": Scenario(k=0, draft="none"),
    "EOS inside the block": Scenario(ends=frozenset({2}), new=4),
    "stop sequence across blocks": Scenario(vocab=2, stop=(0, 1), new=4, k=3),
    "two ragged rows": Scenario(prompts=((1,), (0, 1, 1)), vocab=2, k=1, new=3),
    "two ragged rows, longer block": Scenario(prompts=((1, 0, 0), (1,)), vocab=2, k=2, new=2),
    "two ragged rows with EOS": Scenario(
        prompts=((1, 1, 0), (0,)), vocab=2, k=1, new=3, ends=frozenset({1})
    ),
    "adaptive K": Scenario(adaptive=True, vocab=2, k=3, new=5),
    "n-gram drafts": Scenario(draft="ngram", prompts=((0, 1, 0, 2, 0, 1),), k=3, new=3),
    "n-gram drafts, two rows": Scenario(draft="ngram", prompts=((0, 1, 0), (1, 1)), vocab=2, k=2, new=3),
    "draft equals target": Scenario(draft="same", vocab=2, k=3, new=5),
    "every control": Scenario(vocab=4, k=2, new=3, sampling=_CONTROLS, ends=frozenset({2})),
    "penalties, long block": Scenario(
        vocab=2, k=3, new=4, sampling=SamplingConfig(repetition_penalty=2.0, frequency_penalty=0.7)
    ),
    "minimum length": Scenario(k=3, sampling=SamplingConfig(min_new_tokens=2), ends=frozenset({0})),
    "greedy": Scenario(sampling=SamplingConfig(temperature=0.0), new=3, k=2),
    "the context ends": Scenario(context=5, new=10, vocab=2, k=3),
    "the draft's context ends": Scenario(draft_context=4, new=4, vocab=2, k=3),
    "two ragged rows, one a token from the context's end": Scenario(
        prompts=((1, 0, 1, 1), (1,)), vocab=2, k=2, new=3, context=5
    ),
    "two ragged rows, the draft's context ends": Scenario(
        prompts=((1,), (0, 1, 1)), vocab=2, k=2, new=2, draft_context=3
    ),
    "two ragged rows, one beyond the draft's context": Scenario(
        prompts=((1, 0, 1, 1, 0), (1,)), vocab=2, k=2, new=2, draft_context=3
    ),
    "n-gram drafts for one of two rows, stop": Scenario(
        draft="ngram", prompts=((0, 1, 0), (1,)), vocab=2, k=2, new=3, stop=(0, 1)
    ),
    "two ragged rows, prefill in chunks of one": Scenario(
        prompts=((1,), (0, 1, 1, 0, 1)), vocab=2, k=2, new=2, chunk=1
    ),
    "sliding window": Scenario(window=2, vocab=2, k=2, new=4),
    "narrower draft vocabulary": Scenario(draft_vocab=2),
    "all that the draft has is forbidden": Scenario(
        vocab=4, draft_vocab=2, new=4, ends=frozenset({1}), sampling=_EARLY
    ),
    "wider draft vocabulary": Scenario(draft_vocab=5),
    "prefill in chunks of one": Scenario(prompts=((0, 1, 1, 0),), chunk=1, vocab=2, k=3, new=4),
}  # fmt: skip


def _between(name: str, **changes: Any) -> Scenario:
    target, draft = PAIRS[name]
    own = Scenario(vocab=target.size, draft_vocab=draft.size, ends=target.ends, k=2, new=3)
    return replace(own, bridge=name, **changes)


BRIDGED: dict[str, Scenario] = {
    **{f"Intersection, {name}": _between(name) for name in PAIRS},
    "Intersection, greedy": _between("overlapping", sampling=SamplingConfig(temperature=0.0)),
    "Intersection, two ragged rows": _between("target within draft", prompts=((1,), (0, 1, 1)), k=1),
    "Intersection, adaptive K": _between("target within draft", adaptive=True, k=3, new=4),
    "Intersection, every control": _between("draft within target", sampling=_CONTROLS, ends=frozenset({2})),
    "Intersection, all that is shared is forbidden": _between(
        "draft within target", sampling=SamplingConfig(bad_tokens=[0, 1])
    ),
    "Intersection, the draft's context ends": _between("overlapping", draft_context=4),
    "Intersection, chunks of one": _between(
        "target within draft", prompts=((0, 1, 1, 0),), chunk=1, k=3, new=4
    ),
    "Intersection, stop across blocks": _between("target within draft", stop=(0, 1), new=4, k=3),
}

# One token is not among the head's.
_HEADED = Scenario(head=(0, 2))
HEADS: dict[str, Scenario] = {
    "head": _HEADED,
    "head, all tokens": replace(_HEADED, head=(0, 1), vocab=2, k=3, new=4),
    "head, EOS inside the block": replace(_HEADED, ends=frozenset({2})),
    "head, stop across blocks": replace(_HEADED, stop=(0, 1), k=3),
    "head, two ragged rows": replace(_HEADED, prompts=((1,), (0, 1, 1)), k=1, new=2),
    "head, two ragged rows with EOS": replace(
        _HEADED, prompts=((1, 1, 0), (0,)), vocab=2, head=(0, 1), k=1, new=3, ends=frozenset({1})
    ),
    "head, adaptive K": replace(_HEADED, adaptive=True, vocab=2, head=(0, 1), k=3, new=4),
    "head, every control": replace(
        _HEADED, vocab=4, head=(0, 1, 3), sampling=_CONTROLS, ends=frozenset({2})
    ),
    "head, all that it has is forbidden": replace(
        _HEADED, sampling=SamplingConfig(bad_tokens=[0, 2]), vocab=4
    ),
    "head, greedy": replace(_HEADED, sampling=SamplingConfig(temperature=0.0)),
    "head, the context ends": replace(_HEADED, context=5, new=10, vocab=2, head=(0, 1), k=3),
    "head, its context ends": replace(_HEADED, draft_context=3, new=4, vocab=2, head=(0, 1), k=3),
    "head, chunks of one": replace(
        _HEADED, prompts=((0, 1, 1, 0), (1,)), chunk=1, vocab=2, head=(0, 1), k=2, new=2
    ),
    "DFlash head": replace(_HEADED, width=4),
    "DFlash head, two ragged rows with EOS": replace(
        _HEADED, prompts=((1, 1, 0), (0,)), vocab=2, head=(0, 1), k=1, new=3, width=3, ends=frozenset({1})
    ),
    "DFlash head, every control": replace(
        _HEADED, vocab=4, head=(0, 1, 3), width=4, sampling=_CONTROLS, ends=frozenset({2})
    ),
    "DFlash head, its context ends": replace(
        _HEADED, draft_context=5, new=4, vocab=2, head=(0, 1), k=3, width=3
    ),
}  # fmt: skip

SCENARIOS: dict[tuple[str, str], Scenario] = {
    (name, rule): replace(scenario, rule=rule)
    for name, scenario in (BASE | BRIDGED | HEADS).items()
    for rule in RULES
}


TREES: dict[str, Scenario] = {
    "one sibling": Scenario(siblings=(1,), new=3),
    "two siblings": Scenario(siblings=(2,), k=1),
    "long block": Scenario(siblings=(1,), k=3, new=4, vocab=2),
    "two siblings, long block": Scenario(siblings=(2,), k=2, vocab=3, new=3, draft_vocab=3),
    "two ragged rows, one with siblings": Scenario(
        siblings=(0, 1), k=2, new=2, prompts=((1,), (0, 1, 1)), vocab=2
    ),
    "two ragged rows of other shapes": Scenario(
        siblings=(2, 1), k=1, new=2, prompts=((1,), (0, 1, 1)), vocab=3
    ),
    "EOS": Scenario(siblings=(1,), ends=frozenset({2}), new=3),
    "stop across blocks": Scenario(siblings=(1,), vocab=2, stop=(0, 1), new=4, k=3),
    "every control": replace(BASE["every control"], siblings=(1,)),
    "penalties": replace(BASE["penalties, long block"], siblings=(1,)),
    "window": Scenario(siblings=(1,), window=2, new=3),
    "the context ends": replace(BASE["the context ends"], siblings=(1,)),
    "narrower draft vocabulary": Scenario(siblings=(2,), draft_vocab=2),
    "all that the draft has is forbidden": replace(
        BASE["all that the draft has is forbidden"], siblings=(1,)
    ),
    "bridged": replace(BRIDGED["Intersection, overlapping"], siblings=(1,)),
    "adaptive": Scenario(siblings=(1,), adaptive=True, vocab=2, k=3, new=4),
    "a head's": Scenario(siblings=(1,), head=(0, 1, 2), new=3),
    "a head's, with few tokens": Scenario(siblings=(1,), head=(0, 2), k=2, new=3),
    "a DFlash head's": Scenario(siblings=(1,), head=(0, 1, 2), width=4, new=3),
    "a DFlash head's, two ragged rows of other shapes, EOS": Scenario(
        siblings=(2, 1), head=(0, 1, 2), width=3, k=1, new=2, prompts=((1,), (0, 1, 1)), ends=frozenset({2})
    ),
    "two ragged rows of other shapes, EOS": Scenario(
        siblings=(2, 1), k=1, new=2, prompts=((1,), (0, 1, 1)), ends=frozenset({2})
    ),
}  # fmt: skip
