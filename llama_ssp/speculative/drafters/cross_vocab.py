"""A draft model of another tokenizer. It reads the target's text in its own tokens, and is not changed.

What it proposes are the target's tokens, with the distribution each was drawn from, so that verification
knows no difference. How texts are translated is said by the bridge (text/translation.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

from llama_ssp.models.transfer import sent
from llama_ssp.speculative.drafters.local import certain_where, nothing, reach
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import Draws, Purpose
from llama_ssp.speculative.sampling import SamplingTransform, one_hot
from llama_ssp.speculative.state import Proposal, State
from llama_ssp.text.compatibility import NONE
from llama_ssp.text.translation import Intersection, Text

# Slots for a text that takes more of the draft's tokens than a sample did; one that takes still more goes
# without drafts. Whether it does hangs on its own length, and not on its neighbours'.
ROOM, SPARE = 1.5, 16


@dataclass
class _Settled:
    """What of a row's text will not be translated again: the prompt, and `read` tokens behind it."""

    prompt: list[int]
    written: list[int] = field(default_factory=list)
    read: int = 0


class _Mirror:
    """The batch's texts in the draft's tokens, beside its cache, which holds keys of these alone."""

    def __init__(self, runner: ModelRunner, bridge: Intersection | Text) -> None:
        self.runner, self._bridge = runner, bridge
        runner.limit = None
        self.slots = 0

    def start(self, rows: int, capacity: int) -> None:
        self.slots = self._slots_of(capacity)
        self.runner.start(rows, self.slots)
        self._settled: list[_Settled | None] = [None] * rows
        self.texts: list[list[int]] = [[] for _ in range(rows)]
        self.token_BS = torch.zeros(rows, self.slots + 1, dtype=torch.int64, device=self.runner.model.device)

    def forget(self, row: int) -> None:
        """Another text comes into the row."""
        self._settled[row] = None
        self.runner.forget(row)

    def prompt(self, state: State, row: int) -> list[int]:
        """The row's prompt, translated once."""
        found = self._settled[row]
        if found is None:
            prompt = self._bridge.begun(state.texts[row][: state.prompt_lengths[row]])
            found = self._settled[row] = _Settled(prompt)
            self._write(row, prompt)
        return found.prompt

    def follow(self, state: State, wanted: tuple[int, ...]) -> list[int]:
        """Brings the rows that want drafts up to what was committed; how many tokens each may still get.

        The cache keeps the keys of what stayed the same.
        """
        room = [0] * state.rows
        for row in range(state.rows):
            if not wanted[row]:
                continue
            text = self._translated(state, row)
            self._write(row, text)
            own = self._slots_of(state.lengths[row] + wanted[row])
            room[row] = reach(min(own, self.slots), len(text)) if text else 0
        return room

    def _slots_of(self, length: int) -> int:
        """How many a text of this length, in the target's tokens, may take."""
        slots = int(length * max(1.0, ROOM * self._bridge.expansion)) + SPARE
        return min(slots, self.runner.model.context)

    def place(self, token_B: Tensor, offset: int, drafting: list[bool]) -> None:
        """Writes a drafted token behind the text of each row that drafts."""
        places = [
            len(text) + offset if active else self.slots
            for text, active in zip(self.texts, drafting, strict=True)
        ]
        index_B1 = sent(places, self.token_BS.device)[:, None]
        self.token_BS.scatter_(1, index_B1, token_B.to(self.token_BS.device)[:, None])

    def logits(self, offset: int, drafting: list[bool]) -> Tensor:
        """The draft's logits behind the text and `offset` drafted tokens; other rows are fed nothing."""
        ends = [
            len(text) + offset if active else cached
            for text, active, cached in zip(self.texts, drafting, self.runner.cached, strict=True)
        ]
        return self.runner.logits(self.token_BS, ends, [1] * len(ends))[:, 0]

    def _translated(self, state: State, row: int) -> list[int]:
        """The row's text; only what comes after the last place where it may be parted is translated anew."""
        self.prompt(state, row)
        known, written = self._settled[row], state.generated(row)
        assert known is not None
        while (at := self._bridge.parting(written, known.read)) is not None:
            known.written += self._bridge.continued(written[known.read : at])
            known.read = at
        return known.prompt + known.written + self._bridge.continued(written[known.read :])

    def _write(self, row: int, text: list[int]) -> None:
        """Of a text that does not fit, what does: no drafts are made for it."""
        fits = text[: self.slots]
        held = self.token_BS[row, : len(fits)].tolist()
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, fits, strict=True)))
        lengths = [cached + 1 for cached in self.runner.cached]
        lengths[row] = max(1, min(same + 1, len(fits)))
        self.runner.roll_back(lengths)
        self.token_BS[row, : len(fits)] = sent(fits, self.token_BS.device)
        self.texts[row] = text


class _BridgedDrafter:
    """What both bridges share: their part in a batch's life."""

    def __init__(self, runner: ModelRunner, bridge: Intersection | Text) -> None:
        self._mirror = _Mirror(runner, bridge)

    @property
    def forwards(self) -> int:
        return self._mirror.runner.forwards

    def start(self, rows: int, capacity: int) -> None:
        self._mirror.start(rows, capacity)

    def warm(self, state: State) -> None:
        lengths = [len(self._mirror.prompt(state, row)) for row in range(state.rows)]
        self._mirror.runner.warm(self._mirror.token_BS, [self._readable(n) for n in lengths])

    def forget(self, row: int) -> None:
        self._mirror.forget(row)

    def read(self, state: State, row: int, end: int) -> None:
        """As much of the draft's own text as `end` is of the target's."""
        length = self._readable(len(self._mirror.prompt(state, row)))
        whole = max(state.prompt_lengths[row] - 1, 1)
        self._mirror.runner.expect(row, length + 1)
        self._mirror.runner.read(self._mirror.token_BS, row, -(-length * min(end, whole) // whole))

    def limit(self, length: int) -> int:
        """What it can draft hangs on its own text, whose length it knows when it proposes."""
        return self._mirror.slots

    def roll_back(self, lengths: list[int]) -> None:
        pass  # what was rejected is found when the text is next compared with what was fed

    def _readable(self, length: int) -> int:
        """How much of a prompt of this length is read; none of one too long to draft for."""
        return max(length - 1, 0) if reach(self._mirror.slots, length) else 0


class IntersectionDrafter(_BridgedDrafter):
    """Samples from the draft's distribution over the tokens that both models have."""

    def __init__(
        self, runner: ModelRunner, transform: SamplingTransform, draws: Draws, bridge: Intersection
    ) -> None:
        super().__init__(runner, bridge)
        self._transform, self._draws = transform, draws
        pairs = [
            (i, t)
            for i, t in enumerate(bridge.match.target_of)
            if t != NONE and t < transform.vocab and i < runner.model.vocab
        ]
        self._from_S = torch.tensor([i for i, _ in pairs], dtype=torch.int64)
        self._to_S = torch.tensor([t for _, t in pairs], dtype=torch.int64)
        own = [*bridge.match.draft_of, *[NONE] * transform.vocab]
        self._own_V = torch.tensor([max(i, 0) for i in own[: transform.vocab]])

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        room = self._mirror.follow(state, count)
        count = tuple(min(n, r) for n, r in zip(count, room, strict=True))
        if not max(count):
            return nothing(state)
        drafted, probs, damaged = [], [], []
        for offset in range(max(count)):
            drafting = [offset < n for n in count]
            logit_BV = self._in_target(self._mirror.logits(offset, drafting).to(state.device))
            probs_BV, damaged_B = self._probs(logit_BV, state, offset)
            idle_B = ~sent(drafting, state.device)
            token_B = self._draws.categorical(
                certain_where(idle_B, probs_BV), state.slot(Purpose.DRAFT, offset)
            )
            state.place(token_B, offset, count)
            self._own_V = self._own_V.to(token_B.device)
            self._mirror.place(self._own_V[token_B], offset, drafting)
            drafted.append(token_B)
            probs.append(probs_BV)
            damaged.append(damaged_B & ~idle_B)
        damaged_B = torch.stack(damaged, 1).any(1)
        return Proposal(torch.stack(drafted, 1), torch.stack(probs, 1), count, damaged_B)

    def _in_target(self, logit_BD: Tensor) -> Tensor:
        """The draft's logits by the target's ids: chances of tokens that are one add up, others have none."""
        wide = torch.promote_types(logit_BD.dtype, torch.float32)
        self._from_S, self._to_S = self._from_S.to(logit_BD.device), self._to_S.to(logit_BD.device)
        logit_BS = logit_BD.to(wide)[:, self._from_S]
        to_BS = self._to_S.expand_as(logit_BS)
        none_BV = logit_BS.new_full((len(logit_BS), self._transform.vocab), -torch.inf)
        top_BV = none_BV.scatter_reduce(1, to_BS, logit_BS, "amax")
        # A chance of 0 stays one: its logit is compared with a number, not with another infinity.
        share_BS = torch.exp(logit_BS - top_BV.gather(1, to_BS).clamp(min=torch.finfo(wide).min))
        return top_BV + torch.zeros_like(top_BV).scatter_add(1, to_BS, share_BS).log()

    def _probs(self, logit_BV: Tensor, state: State, offset: int) -> tuple[Tensor, Tensor]:
        """The distribution, and which rows' logits make none. Where the controls forbid all that both have,
        there is none either, but nothing is broken: any distribution will do, and certainty of token 0 is
        one."""
        probs_BV = self._transform(logit_BV[:, None], state.prefix(offset, 1))[:, 0]
        damaged_B = (logit_BV.isnan() | logit_BV.isposinf()).any(-1)
        return certain_where(probs_BV.isnan().any(-1), probs_BV), damaged_B


class TextDrafter(_BridgedDrafter):
    """Lets the draft write its likeliest text, and proposes that, cut into the target's tokens.

    Each token is declared certain: for any text that could have been written verification is exact, so
    it is for this one. One token more is cut than is proposed, as long as the draft may go on: what
    comes next may still change the last one.
    """

    def __init__(self, runner: ModelRunner, bridge: Text, vocab: int, dtype: torch.dtype) -> None:
        """`vocab` and `dtype` are those of the distributions."""
        super().__init__(runner, bridge)
        self._bridge, self._vocab, self._dtype = bridge, vocab, dtype
        size, special, width = bridge.draft.size, bridge.draft.special, runner.model.vocab
        unusable = (special - bridge.draft.ends) | set(range(size, width))
        self._unusable = torch.tensor(sorted(i for i in unusable if i < width), dtype=torch.int64)

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        found, damaged_B = self._written(state, count)
        found = [ids[:n] for ids, n in zip(found, count, strict=True)]
        drafted = tuple(len(ids) for ids in found)
        if not max(drafted):
            return nothing(state)
        padded = [ids + [0] * (max(drafted) - len(ids)) for ids in found]
        drafted_BK = sent(padded, state.device)
        for offset in range(max(drafted)):
            state.place(drafted_BK[:, offset], offset, drafted)
        like = torch.empty(*drafted_BK.shape, self._vocab, dtype=self._dtype, device=state.device)
        return Proposal(drafted_BK, one_hot(drafted_BK, like), drafted, damaged_B)

    def _written(self, state: State, count: tuple[int, ...]) -> tuple[list[list[int]], Tensor]:
        """What the draft writes behind each text, in the target's tokens; which rows' logits were none."""
        room = self._mirror.follow(state, count)
        texts: list[list[int]] = [[] for _ in count]
        found: list[list[int]] = [[] for _ in count]
        drafting = [n > 0 and r > 0 for n, r in zip(count, room, strict=True)]
        damaged_B = torch.zeros(state.rows, dtype=torch.bool, device=state.device)
        most = [min(r, self._most(n)) for r, n in zip(room, count, strict=True)]
        offset = 0
        while any(drafting):
            logit_BD = self._mirror.logits(offset, drafting)
            token_B = self._likeliest(logit_BD)
            broken_B = (logit_BD.isnan() | logit_BD.isposinf()).any(-1).to(state.device)
            damaged_B |= broken_B & sent(drafting, state.device)
            self._mirror.place(token_B, offset, drafting)
            offset += 1
            for row, token in enumerate(token_B.tolist()):
                if not drafting[row]:
                    continue
                texts[row].append(token)
                ids = self._bridge.back(state.texts[row], texts[row])
                found[row] = list(takewhile(lambda i: i < self._vocab, ids))
                ended = token in self._bridge.draft.special
                settled = len(ids) > count[row]
                drafting[row] = not (ended or settled or offset == most[row])
        return found, damaged_B

    def _likeliest(self, logit_BD: Tensor) -> Tensor:
        """Without what stands for no text, but for its ends."""
        self._unusable = self._unusable.to(logit_BD.device)
        return logit_BD.index_fill(1, self._unusable, -torch.inf).argmax(-1)

    def _most(self, wanted: int) -> int:
        """Draft tokens at most for so many of the target's: twice what the sample's texts took."""
        return 1 + int(2 * (wanted + 1) * max(1.0, self._bridge.expansion))
