"""Whole runs, walked: every outcome of every coin and every draw of the loop that ships is followed.

So the distribution of a run's texts is a finite sum (`walk`). It is compared with the target's own
(`expected`): the product over tokens of the distributions of reference.py, by one plain forward a prefix,
without cache, draft or batch. All is in fp64, and the bound on the total variation is 1e-12. A scenario is
small (2 to 5 tokens, K <= 3, texts of 2 to 5 tokens), but its models have attention, positions and a cache
(toy.py). The controls are the planted faults of mutants.py: each names a scenario that must show it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

from llama_ssp.config import Dtype, SamplingConfig
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.heads.model import HeadModel
from llama_ssp.models.passes import Pass, all_rows
from llama_ssp.speculative.draft_length import AdaptiveDraftLength, Costs, DraftLength, FixedDraftLength
from llama_ssp.speculative.engine import RankEngine
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.state import Prompt
from tests.families import build, decoder_of
from tests.heads import loaded, save_assistant, save_dflash, save_head
from tests.proofs.choices import distance, every_branch
from tests.proofs.hybrid import TokenByToken, hybrid
from tests.proofs.reference import reference_law
from tests.proofs.toy import WIDTH, toy
from tests.rig import GREEDY, engine_of
from tests.tongues import PAIRS, bridge

Text = tuple[tuple[int, ...], str | None]  # what a row has generated, and why it ended
Outcome = tuple[Text, ...]


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
    top: int | None = None  # of the draft's likeliest tokens, from which it draws
    chunk: int = 512
    build: Callable[..., CausalModel] = toy
    plain: Callable[[], Any] | None = None  # the target's module once more, for the reference
    drafts: Callable[..., Any] | None = None  # builds the draft, where it is of another kind than the target
    bridge: str | None = None  # between two of tests.tongues
    head: tuple[int, ...] | None = None  # a trained head drafts, which has these of the target's tokens
    width: int = 0  # of its block, if it gives all drafts in one pass
    groups: int | None = None  # an assistant drafts for a Gemma 4; of tokens, some of which have logits


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


def models(s: Scenario) -> tuple[Any, CausalModel | HeadModel | str | None]:
    if s.groups is not None:
        return assisted(s.vocab, s.context, s.draft_context, s.groups)
    target = s.build(s.vocab, 0, context=s.context, window=s.window)
    if s.head is not None:
        head = head_of(s.vocab, s.head, s.draft_context, s.width)
        target.tap(head.taps)
        return target, head
    if s.draft == "same":
        return target, s.build(s.vocab, 0, context=s.context, window=s.window)
    if isinstance(s.draft, int):
        return target, (s.drafts or s.build)(s.draft_vocab or s.vocab, s.draft, context=s.draft_context)
    return target, None if s.draft == "none" else s.draft


@cache
def head_of(vocab: int, ids: tuple[int, ...], context: int, width: int) -> HeadModel:
    """A random head for a toy; with a width one that gives all drafts in one pass."""
    common: dict[str, Any] = {"vocab": vocab, "ids": list(ids), "context": context}
    with TemporaryDirectory() as folder:
        if width:
            sizes = {"dim": WIDTH, "taps": (0, 1), "width": width, "whole": True}
            return loaded(save_dflash(Path(folder), **common, **sizes))
        sizes = {"target_dim": WIDTH, "taps": (0, 1, 2), "dim": 8, "loud": 0.8, "flags": ("norm_output",)}
        return loaded(save_head(Path(folder), **common, **sizes))


@cache
def assisted(vocab: int, context: int, draft_context: int, groups: int) -> tuple[DecoderModel, HeadModel]:
    """A random Gemma 4 with a window of two tokens, and its assistant; their distributions overlap."""
    sizes = {"vocab_size": vocab, "sliding_window": 2, "max_position_embeddings": context}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    module = build("gemma4", 0, torch.float64, mild=True, **sizes, **ends)
    target = DecoderModel(decoder_of(module), module.config, "target")
    with TemporaryDirectory() as folder:
        save_assistant(
            Path(folder), module.config, groups, chosen=max(1, groups - 1), dtype=torch.float64,
            max_position_embeddings=draft_context,
        )  # fmt: skip
        table = target.table(False)
        head = loaded(Path(folder), 3, table, dtype=Dtype.fp64, target=module.config)
    target.tap(head.taps)
    return target, head


class Plain:
    """A decoder as a module: one pass over a text, with a cache of its own."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model

    def __call__(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
        length = input_ids.shape[1]
        pass_ = Pass(spans=all_rows([0], [length]), device=self._model.device)
        logit_BWV = self._model.logits(input_ids, pass_, self._model.new_cache(1, length))
        return SimpleNamespace(logits=logit_BWV)


def walk(s: Scenario) -> tuple[float, int]:
    """Total variation between the loop's joint distribution and the target's, and the number of branches."""
    target, draft = models(s)
    found, branches = every_branch(lambda draws: play(s, target, draft, draws))
    plain = s.plain() if s.plain else getattr(target, "module", Plain(target))
    return distance(found, expected(s, plain)), branches


def play(s: Scenario, target: CausalModel, draft: Any, draws: Any) -> Outcome:
    engine = engine_of(
        target, draft, s.rule, sampling=s.sampling, ends=s.ends, draws=draws, chunk=s.chunk,
        bridge=bridge(s.bridge) if s.bridge else None, rewinds=s.k, top=s.top,
    )  # fmt: skip
    return written(s, engine)


def written(s: Scenario, engine: RankEngine) -> Outcome:
    rows = len(s.prompts)
    lookahead: DraftLength = FixedDraftLength(s.k, rows)
    if s.adaptive:
        lookahead = AdaptiveDraftLength(Costs.of_ratio(0.3, s.k), rows)
    limits = Limits(s.new, s.ends, StopAt(s.stop, rows) if s.stop else None)
    state = engine.prefill([Prompt(str(row), ids) for row, ids in enumerate(s.prompts)], s.new)
    for _ in generate(engine, state, limits, lookahead):
        pass
    return tuple((tuple(state.generated(row)), state.finished[row]) for row in range(rows))


def expected(s: Scenario, module: Any) -> dict[Outcome, float]:
    """The target's own distribution over whole texts: no cache, no draft, one forward a prefix."""
    joint: dict[Outcome, float] = {(): 1.0}
    for prompt in s.prompts:
        row: dict[Text, float] = {}
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
    for token, share in enumerate(reference_law(logits, ids, len(prompt), s.sampling.controls, s.ends)):
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


CONTROLS = SamplingConfig(
    temperature=2.5, top_k=3, top_p=0.98, min_p=0.02, repetition_penalty=1.3, frequency_penalty=0.2,
    presence_penalty=0.3, logit_bias={0: 0.5}, bad_tokens=[3], min_new_tokens=2,
)  # fmt: skip
PENALTIES = SamplingConfig(repetition_penalty=2.0, frequency_penalty=0.7)
EARLY = SamplingConfig(bad_tokens=[0], min_new_tokens=2)  # token 1 ends a text: early it is forbidden, too
RAGGED, ENDING = ((1,), (0, 1, 1)), ((1, 1, 0), (0,))
FIRST, SECOND, THIRD = frozenset({0}), frozenset({1}), frozenset({2})  # tokens that end texts

BASE: dict[str, Scenario] = {
    "plain": Scenario(),
    "full length": Scenario(vocab=2, k=3, new=4),
    "regular sampling": Scenario(k=0, draft="none"),
    "EOS inside the block": Scenario(ends=THIRD, new=4),
    "stop sequence across blocks": Scenario(vocab=2, stop=(0, 1), new=4, k=3),
    "two ragged rows": Scenario(prompts=RAGGED, vocab=2, k=1),
    "two ragged rows, longer block": Scenario(prompts=((1, 0, 0), (1,)), vocab=2, new=2),
    "two ragged rows with EOS": Scenario(prompts=ENDING, vocab=2, k=1, ends=SECOND),
    "adaptive K": Scenario(adaptive=True, vocab=2, k=3, new=5),
    "n-gram drafts": Scenario(draft="ngram", prompts=((0, 1, 0, 2, 0, 1),), k=3),
    "n-gram drafts, two rows": Scenario(draft="ngram", prompts=((0, 1, 0), (1, 1)), vocab=2),
    "n-gram drafts for one of two rows, stop": Scenario(
        draft="ngram", prompts=((0, 1, 0), (1,)), vocab=2, stop=(0, 1)
    ),
    "draft equals target": Scenario(draft="same", vocab=2, k=3, new=5),
    "every control": Scenario(vocab=4, sampling=CONTROLS, ends=THIRD),
    "penalties, long block": Scenario(vocab=2, k=3, new=4, sampling=PENALTIES),
    "minimum length": Scenario(k=3, sampling=SamplingConfig(min_new_tokens=2), ends=FIRST),
    "greedy": Scenario(sampling=GREEDY),
    "the context ends": Scenario(context=5, new=10, vocab=2, k=3),
    "the draft's context ends": Scenario(draft_context=4, new=4, vocab=2, k=3),
    "two ragged rows, one a token from the context's end": Scenario(
        prompts=((1, 0, 1, 1), (1,)), vocab=2, context=5
    ),
    "two ragged rows, the draft's context ends": Scenario(prompts=RAGGED, vocab=2, new=2, draft_context=3),
    "two ragged rows, one beyond the draft's context": Scenario(
        prompts=((1, 0, 1, 1, 0), (1,)), vocab=2, new=2, draft_context=3
    ),
    "two ragged rows, prefill in chunks of one": Scenario(
        prompts=((1,), (0, 1, 1, 0, 1)), vocab=2, new=2, chunk=1
    ),
    "prefill in chunks of one": Scenario(prompts=((0, 1, 1, 0),), chunk=1, vocab=2, k=3, new=4),
    "sliding window": Scenario(window=2, vocab=2, new=4),
    "narrower draft vocabulary": Scenario(draft_vocab=2),
    "wider draft vocabulary": Scenario(draft_vocab=5),
    "all that the draft has is forbidden": Scenario(
        vocab=4, draft_vocab=2, new=4, ends=SECOND, sampling=EARLY
    ),
}  # fmt: skip


def _between(name: str, **changes: Any) -> Scenario:
    target, draft = PAIRS[name]
    return replace(
        Scenario(vocab=target.size, draft_vocab=draft.size, ends=target.ends, bridge=name), **changes
    )


_INNER = "target within draft"
BRIDGED: dict[str, Scenario] = {
    **{f"Intersection, {name}": _between(name) for name in PAIRS},
    "Intersection, greedy": _between("overlapping", sampling=GREEDY),
    "Intersection, two ragged rows": _between(_INNER, prompts=RAGGED, k=1),
    "Intersection, adaptive K": _between(_INNER, adaptive=True, k=3, new=4),
    "Intersection, every control": _between("draft within target", sampling=CONTROLS, ends=THIRD),
    "Intersection, all that is shared is forbidden": _between(
        "draft within target", sampling=SamplingConfig(bad_tokens=[0, 1])
    ),
    "Intersection, the draft's context ends": _between("overlapping", draft_context=4),
    "Intersection, chunks of one": _between(_INNER, prompts=((0, 1, 1, 0),), chunk=1, k=3, new=4),
    "Intersection, stop across blocks": _between(_INNER, stop=(0, 1), new=4, k=3),
}

# Of three tokens the first head lacks one; of two it has both.
_HEADED, _OF_TWO = Scenario(head=(0, 2)), Scenario(head=(0, 1), vocab=2, k=3, new=4)
HEADS: dict[str, Scenario] = {
    "head": _HEADED,
    "head, all tokens": _OF_TWO,
    "head, EOS inside the block": replace(_HEADED, ends=THIRD),
    "head, stop across blocks": replace(_HEADED, stop=(0, 1), k=3),
    "head, two ragged rows": replace(_HEADED, prompts=RAGGED, k=1, new=2),
    "head, two ragged rows with EOS": replace(_OF_TWO, prompts=ENDING, k=1, new=3, ends=SECOND),
    "head, adaptive K": replace(_OF_TWO, adaptive=True),
    "head, every control": replace(_HEADED, vocab=4, head=(0, 1, 3), sampling=CONTROLS, ends=THIRD),
    "head, all that it has is forbidden": replace(
        _HEADED, sampling=SamplingConfig(bad_tokens=[0, 2]), vocab=4
    ),
    "head, greedy": replace(_HEADED, sampling=GREEDY),
    "head, the context ends": replace(_OF_TWO, context=5, new=10),
    "head, its context ends": replace(_OF_TWO, draft_context=3),
    "head, chunks of one": replace(_OF_TWO, prompts=((0, 1, 1, 0), (1,)), chunk=1, k=2, new=2),
    "DFlash head": replace(_HEADED, width=4),
    "DFlash head, two ragged rows with EOS": replace(
        _OF_TWO, prompts=ENDING, k=1, new=3, width=3, ends=SECOND
    ),
    "DFlash head, every control": replace(
        _HEADED, vocab=4, head=(0, 1, 3), width=4, sampling=CONTROLS, ends=THIRD
    ),
    "DFlash head, its context ends": replace(_OF_TWO, draft_context=5, width=3),
}  # fmt: skip


def _hybrid(vocab: int = 2, **changes: Any) -> Scenario:
    return replace(Scenario(vocab=vocab, build=hybrid, plain=lambda: TokenByToken(vocab, 0)), **changes)


# Targets and drafts with recurrent states. Their rings have the states of K drafts, and no others.
HYBRIDS: dict[str, Scenario] = {
    "hybrid": _hybrid(vocab=3, new=2),
    "hybrid, long block": _hybrid(k=3, new=4),
    "hybrid, regular sampling": _hybrid(k=0, draft="none", new=4),
    "hybrid, rounds with and without drafts": _hybrid(draft="ngram", prompts=((0, 1, 0), (1, 1)), new=3),
    "hybrid, two ragged rows": _hybrid(prompts=RAGGED, k=1, new=2),
    "hybrid, two ragged rows, longer block": _hybrid(prompts=((1, 0, 0), (1,)), new=2),
    "hybrid, two ragged rows with EOS": _hybrid(prompts=ENDING, k=1, ends=SECOND),
    "hybrid, adaptive K": _hybrid(adaptive=True, k=3, new=4),
    "hybrid, EOS inside the block": _hybrid(vocab=3, ends=THIRD, new=3),
    "hybrid, draft equals target": _hybrid(draft="same", k=2, new=3),
    "hybrid, prefill in chunks of one": _hybrid(prompts=((0, 1, 1, 0),), chunk=1, k=2, new=3),
    "hybrid, greedy": _hybrid(sampling=GREEDY),
    "hybrid, an attention draft": _hybrid(drafts=toy, k=2, new=3),
    "a hybrid draft of an attention target": Scenario(vocab=2, drafts=hybrid, k=3, new=4),
    "a hybrid draft of an attention target, two ragged rows": Scenario(
        vocab=2, drafts=hybrid, prompts=RAGGED, k=1, new=2
    ),
}

_ASSISTED = Scenario(groups=0)
ASSISTED: dict[str, Scenario] = {
    "assistant": _ASSISTED,
    "assistant, EOS inside the block": replace(_ASSISTED, ends=THIRD),
    "assistant, two ragged rows with EOS": replace(
        _ASSISTED, prompts=ENDING, vocab=2, k=1, new=3, ends=SECOND
    ),
    "assistant, every control": replace(_ASSISTED, vocab=4, groups=2, sampling=CONTROLS, ends=THIRD),
    "assistant, its context ends": replace(_ASSISTED, vocab=2, draft_context=3, new=4),
    "assistant, a prompt of one token": replace(_ASSISTED, prompts=((1,),), vocab=2),
}  # fmt: skip

# Drafts from a draft's likeliest tokens alone: what drafts, and what else makes distributions.
TOPS: dict[str, Scenario] = {
    "likeliest tokens": Scenario(vocab=4, top=2),
    "likeliest tokens, the first alone": Scenario(top=1),
    "likeliest tokens, two ragged rows with EOS": Scenario(
        prompts=ENDING, vocab=3, k=1, new=2, ends=SECOND, top=2
    ),
    "likeliest tokens, adaptive K": Scenario(adaptive=True, k=3, new=3, top=2),
    "likeliest tokens, every control": Scenario(vocab=4, sampling=CONTROLS, ends=THIRD, top=2),
    "likeliest tokens, greedy": Scenario(sampling=GREEDY, top=2),
    "likeliest tokens, draft equals target": Scenario(draft="same", top=2),
    "likeliest tokens, wider draft vocabulary": Scenario(draft_vocab=5, top=2),
    "likeliest tokens, all that the draft has is forbidden": replace(
        BASE["all that the draft has is forbidden"], top=1
    ),
    "likeliest tokens, n-gram drafts": replace(BASE["n-gram drafts"], top=1),
    "likeliest tokens, Intersection": _between("overlapping", top=1),
    "likeliest tokens, head": Scenario(head=(0, 1, 2), vocab=4, top=2),
    "likeliest tokens, DFlash head": Scenario(head=(0, 1, 2), vocab=4, width=4, top=2),
    "likeliest tokens, hybrid": _hybrid(vocab=3, new=2, top=2),
    "likeliest tokens, assistant": replace(_ASSISTED, top=2),
}

SCENARIOS = BASE | BRIDGED | HEADS | HYBRIDS | ASSISTED | TOPS
