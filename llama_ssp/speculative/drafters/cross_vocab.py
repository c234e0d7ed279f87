"""Drafts with a model of another tokenizer. It reads the target's text in its own tokens, and is not changed.

It proposes the target's tokens with the distribution each was drawn from, so verification is as with any
other draft. text/translation.py translates texts.
"""

from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

from llama_ssp.speculative.drafters.local import Drawn, ModelDrafter, Sampler, reach
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import Slot
from llama_ssp.speculative.state import Prompt, Proposal, State
from llama_ssp.text.translation import NONE, Intersection

# Slots for a text that takes more of the draft's tokens than a sample did; one that takes still more gets no
# drafts. Both depend on its own length, not on its neighbours'.
ROOM = 1.5  # times what the sample took
SPARE = 16  # more


@dataclass
class _Settled:
    """Holds what is translated for good of a row's text: the prompt, and `read` tokens after it."""

    prompt: list[int]
    written: list[int] = field(default_factory=list)
    read: int = 0


class IntersectionDrafter(ModelDrafter):
    """Samples from the draft's distribution over the tokens that both models have.

    `_own` holds the batch's texts in the draft's tokens; the draft's KV cache is of them.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler, bridge: Intersection) -> None:
        super().__init__(runner, sampler)
        self._bridge = bridge
        vocab = sampler.transform.vocab

        # The S shared tokens: the draft's ids, and the target's id of each.
        shared = [(i, t) for i, t in enumerate(bridge.match.target_of) if t != NONE and t < vocab]
        shared = [(i, t) for i, t in shared if i < runner.model.vocab]
        self._from_S = torch.tensor([i for i, _ in shared], dtype=torch.int64)
        self._to_S = torch.tensor([t for _, t in shared], dtype=torch.int64)

        # The draft's id of each of the target's tokens, (V,); any for those it lacks, as they are not drawn.
        draft_of = [*bridge.match.draft_of, *[NONE] * vocab]
        self._own_V = torch.tensor([max(i, 0) for i in draft_of[:vocab]])

    def start(self, rows: int, capacity: int) -> None:
        self._slots = self.slots_of(capacity)
        self._runner.start(rows, self._slots)
        self._settled: list[_Settled | None] = [None] * rows
        self._own = State([Prompt("", ())] * rows, self._slots, self._runner.model.device)

    def prefill(self, state: State) -> None:
        lengths = [len(self._prompt(state, row).prompt) for row in range(state.rows)]
        self._runner.prefill(self._own.token_BS, [self._readable(n) for n in lengths])

    def refill(self, state: State, kept: dict[int, int]) -> None:
        for row in kept:
            self._settled[row] = None
        lengths = {row: self._readable(len(self._prompt(state, row).prompt)) + 1 for row in kept}
        self._runner.refill(self._own.token_BS, lengths, {})

    def limit(self, length: int) -> int:
        """Returns more than the real limit, which depends on the draft's own text; `propose` knows it."""
        return self._slots

    def roll_back(self, lengths: list[int]) -> None:
        pass  # rejected tokens are found when the next text is compared with what was fed

    def _readable(self, length: int) -> int:
        """Returns how much of a prompt of this length is prefilled; nothing of one too long to draft for."""
        return max(length - 1, 0) if reach(self._slots, length) else 0

    def slots_of(self, length: int) -> int:
        """Returns how many slots a text of this length, in the target's tokens, may take."""
        slots = int(length * max(1.0, ROOM * self._bridge.expansion)) + SPARE
        return min(slots, self._runner.model.context)

    def _prompt(self, state: State, row: int) -> _Settled:
        """Returns the row's prompt, translated once."""
        settled = self._settled[row]
        if settled is None:
            prompt = self._bridge.prompt_ids(state.texts[row][: state.prompt_lengths[row]])
            settled = self._settled[row] = _Settled(prompt)
            self._write(row, prompt)
        return settled

    def _follow(self, state: State, wanted: tuple[int, ...]) -> list[int]:
        """Brings rows that want drafts up to what was committed; returns how many tokens each may still get.

        The cache keeps the keys of what stayed the same.
        """
        room = [0] * state.rows
        for row in range(state.rows):
            if not wanted[row]:
                continue
            text = self._translated(state, row)
            self._write(row, text)
            slots = self.slots_of(state.lengths[row] + wanted[row])
            room[row] = reach(min(slots, self._slots), len(text)) if text else 0
        return room

    def _translated(self, state: State, row: int) -> list[int]:
        """Returns the row's text; only tokens that are new are translated."""
        known = self._prompt(state, row)
        written = state.generated(row)
        known.written += self._bridge.later_ids(written[known.read :])
        known.read = len(written)
        return known.prompt + known.written

    def _write(self, row: int, text: list[int]) -> None:
        """Writes the part of a text that fits; a text that does not fit gets no drafts."""
        texts = self._own
        fits = text[: self._slots]

        # The cache keeps what stays the same; a rejected draft is where the texts part.
        held = texts.token_BS[row, : len(fits)].tolist()
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, fits, strict=True)))
        lengths = [cached + 1 for cached in self._runner.cached]
        lengths[row] = max(1, min(same + 1, len(fits)))
        self._runner.roll_back(lengths)
        texts.texts[row] = fits[:same]
        texts.append({row: fits[same:]})

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        room = self._follow(state, count)
        count = tuple(min(n, r) for n, r in zip(count, room, strict=True))
        return super().propose(state, count)

    def _step(self, state: State, offset: int, count: tuple[int, ...], slot: Slot | None = None) -> Drawn:
        """Also writes the draft after the draft model's own text."""
        ends = self._next_ends(self._own, offset, count)
        logit_BD = self._runner.logits(self._own.token_BS, ends, [1] * state.rows)[:, 0]
        drawn = self._sampler.draw(state, offset, count, self.in_target(logit_BD.to(state.device)), slot)
        self._own_V = self._own_V.to(drawn.token_B.device)
        self._own.write_draft(self._own_V[drawn.token_B].to(self._own.device), offset, count)
        return drawn

    def in_target(self, logit_BD: Tensor) -> Tensor:
        """Returns the draft's logits by the target's ids, (B, V), of its own, (B, D).

        Probabilities of draft tokens with the same target token add up; unshared tokens have -inf. So a
        softmax of the result is the draft's distribution over shared tokens, renormalised: it is declared,
        and drafts are drawn from it.
        """
        wide = torch.promote_types(logit_BD.dtype, torch.float32)
        self._from_S = self._from_S.to(logit_BD.device)
        self._to_S = self._to_S.to(logit_BD.device)

        # log(sum(exp(logit))) over the draft's tokens of each target token, with the largest taken out.
        logit_BS = logit_BD.to(wide)[:, self._from_S]
        to_BS = self._to_S.expand_as(logit_BS)
        none_BV = logit_BS.new_full((len(logit_BS), self._sampler.transform.vocab), -torch.inf)
        top_BV = none_BV.scatter_reduce(1, to_BS, logit_BS, "amax")
        # Clamped, so that -inf is compared with a number and stays -inf.
        share_BS = torch.exp(logit_BS - top_BV.gather(1, to_BS).clamp(min=torch.finfo(wide).min))
        return top_BV + torch.zeros_like(top_BV).scatter_add(1, to_BS, share_BS).log()
