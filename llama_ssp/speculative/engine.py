"""Runs a round: the drafts, one target forward, the decision. One interface for every rank.

`Engine` is the leader's, which alone decides. Other ranks have a `Follower` each (follower.py): it computes
its part of the models, and gets drafts and decisions by message. That two ranks with equal seeds would draw
the same is never relied on, as their probabilities may differ in the last bit.
"""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain, takewhile
from typing import Any

import torch
from torch import Tensor

from llama_ssp.distributed.comm import checksum
from llama_ssp.distributed.roles import SOLE, Roles
from llama_ssp.models.passes import sent
from llama_ssp.speculative.decision import Decision, decide
from llama_ssp.speculative.drafters.local import Drafter, Sampler
from llama_ssp.speculative.logprobs import Continuation, LogprobReader, scored, scored_continuations
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import Purpose
from llama_ssp.speculative.round_protocol import LeaderProtocol, RoundProtocol
from llama_ssp.speculative.sampling import has_nan
from llama_ssp.speculative.state import Prompt, Proposal, State
from llama_ssp.speculative.verification import Rule
from llama_ssp.text.logprobs import ScoredToken

log = logging.getLogger(__name__)

OnLeader = Tensor | None

# Parts of a round that a stopwatch tells apart.
DRAFT = "draft"
VERIFY = "verify"
DECIDE = "decide"


class Observer:
    """Sees an engine's rounds, and changes nothing. This base does nothing."""

    def part(self, name: str) -> AbstractContextManager[Any]:
        """Returns a context in which this part of a round runs: a stopwatch tells the parts apart."""
        return nullcontext()

    def decided(
        self,
        state: State,
        proposal: Proposal,
        decision: Decision,
        probs_BWV: OnLeader,
        logit_BWV: OnLeader,
    ) -> None:
        """Sees a decided round before the commit.

        Only the leader has the target's logits, and their probabilities under the sampling controls.
        """


class RankEngine(ABC):
    """Takes one rank's part in every round. All ranks make the same calls in the same order, on token ids.

    The leader has an `Engine`, which decides; other ranks have a `Follower` each. The target's ranks get one
    message a round: the decision of the round before, and the new drafts. A follower feeds the drafts to its
    part of the target, then waits for the next message, and only then knows what was decided. The leader does
    not wait: it decides, commits and drafts on. `flush` sends the decision of the last round.
    """

    _protocol: type[RoundProtocol]

    def __init__(
        self,
        target: ModelRunner | None,
        drafter: Drafter | None,
        sampler: Sampler,
        roles: Roles,
        context: int,
        device: torch.device,
    ) -> None:
        """`target` and `drafter` are None where this rank has no part in them."""
        self.target = target
        self.drafter = drafter
        self.context = context  # of the target, in tokens
        self.transform = sampler.transform
        self.draws = sampler.draws
        self.observer = Observer()
        self.logprobs = LogprobReader()  # what the leader keeps of the target's distribution: here nothing

        self._device = device
        self._rounds = self._protocol(roles)
        self._enter = roles.everyone.enter  # records what this rank does, for messages of failures
        self._target_ranks = roles.target
        self._leads = roles.leads

    @property
    def target_forwards(self) -> int:
        return self.target.forwards if self.target else 0

    @property
    def draft_forwards(self) -> int:
        return self.drafter.forwards if self.drafter else 0

    @property
    def overlap(self) -> dict[str, Any] | None:
        """Returns figures of a draft on ranks of its own; None without one, and on ranks that do not lead."""
        return self.drafter.figures() if self.drafter else None

    def prefill(self, prompts: list[Prompt], max_new_tokens: int, longest: int = 0) -> State:
        """Returns the batch's state; every cache holds all of each prompt but its last token.

        The last token is left for the first round, which feeds it with the drafts: what the target makes of
        it is the distribution of the first new token. So the first round is like all others.

        `longest` is the length, prompt and answer, of texts that may be admitted to its rows later.
        """
        self._begin_prefill(prompts)

        longest_here = max(len(prompt.token_ids) for prompt in prompts) + max_new_tokens
        capacity = min(max(longest_here, longest), self.context)
        state = State(prompts, capacity, self._device)

        if self.target:
            self.target.start(state.rows, state.capacity)
        if self.drafter:
            self.drafter.start(state.rows, state.capacity)  # before the target's pass, which a head reads

        if self.target:
            self.target.prefill(state.token_BS, [length - 1 for length in state.lengths])
        if self.drafter:
            self.drafter.prefill(state)
        return state

    def admit(self, state: State, prompts: dict[int, Prompt], reuse: bool = False) -> int:
        """Replaces the texts of rows that have ended, and prefills them in one pass, or in one a chunk.

        A row begins anew as in `prefill`: its caches hold its prompt except the last token, and its draws
        are those of its own prompt. The other rows stay where they are in their texts.

        With `reuse` caches keep the tokens that a row's old and new text begin with, except the last of
        them: a head that drafts reads its hidden state with the token after it. Returns how many tokens the
        target's cache kept.
        """
        self._begin_prefill(list(prompts.values()))

        kept = dict.fromkeys(prompts, 0)
        for row, prompt in prompts.items():
            if reuse:
                # The prompt's last token is fed in any case, as its logits are wanted.
                pairs = zip(state.texts[row], prompt.token_ids[:-1], strict=False)
                shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                kept[row] = max(0, shared - 1)
            state.replace(row, prompt)

        stayed = 0
        if self.target:
            lengths = {row: state.lengths[row] for row in prompts}
            stayed = self.target.refill(state.token_BS, lengths, kept)
        if self.drafter:
            self.drafter.refill(state, kept)
        return stayed

    @torch.inference_mode()
    def score(self, texts: list[Prompt], reader: LogprobReader) -> list[list[ScoredToken]]:
        """Returns log-probabilities of each text's tokens, None of its first; only the leader has any.

        Caches are used anew: what was prefilled before must be prefilled again.
        """
        self._begin_prefill(texts)
        if self.target is None:
            return [[] for _ in texts]

        state = State(texts, max(len(text.token_ids) for text in texts), self._device)
        observer = self.target.observer
        self.target.observer = None  # a head drafts nothing here
        try:
            return scored(self.target, state, self.transform, reader, self._leads)
        finally:
            self.target.observer = observer

    @torch.inference_mode()
    def score_continuations(
        self, contexts: list[Prompt], continuations: Sequence[Sequence[Continuation]], reader: LogprobReader
    ) -> list[dict[Continuation, list[ScoredToken]]]:
        """Returns log-probabilities of the tokens of continuations of each context; only the leader has any.

        Each context is read once. They are the target's, unfiltered. Caches are used anew, as by `score`.
        """
        wholes = [
            replace(context, token_ids=(*context.token_ids, *chain(*of_context)))
            for context, of_context in zip(contexts, continuations, strict=True)
        ]
        self._begin_prefill(wholes)
        if self.target is None:
            return [{} for _ in contexts]

        longest = [max(map(len, of_context)) for of_context in continuations]
        lengths = [len(context.token_ids) for context in contexts]
        room = max(length + new - 1 for length, new in zip(lengths, longest, strict=True))
        state = State(contexts, room, self._device)
        observer = self.target.observer
        self.target.observer = None  # a head drafts nothing here
        try:
            return scored_continuations(
                self.target, state, continuations, reader, self.transform.vocab, self._leads
            )
        finally:
            self.target.observer = observer

    def _begin_prefill(self, prompts: list[Prompt]) -> None:
        """Sends the last decision, and refuses prompts that differ between ranks.

        Ranks sum parts of prompts: sums of other prompts would be wrong, or never end.
        """
        self.flush()
        self._enter("prefill")
        if self._target_ranks is not None:
            sizes = {prompt.id: [len(prompt.token_ids), checksum(prompt.token_ids)] for prompt in prompts}
            self._target_ranks.require_same("prompts", json.dumps(sizes))

    @abstractmethod
    def draft(self, state: State, wanted: list[int]) -> Proposal:
        """Drafts at most `wanted` tokens a row, fewer where the drafter cannot reach further.

        What the leader proposes is verified. Only it reads `wanted`: the other ranks get by message how many
        tokens each row drafts, and the drafts. They need no probabilities of drafts, as they decide nothing.
        """

    @abstractmethod
    def verify(self, state: State, proposal: Proposal) -> Decision:
        """Runs one target forward over K+1 positions, and decides. Ended rows are fed nothing."""

    def roll_back(self, state: State) -> None:
        """Makes every key/value cache drop what was not committed: at most len-1 tokens of a text stay.

        Of a row of n tokens with 3 drafts the target was fed up to position n+2. If 1 is accepted, the text
        has n+2 tokens with the correction, and n+1 stay cached: those up to the accepted draft. The keys of
        the other two drafts are forgotten. The correction was never fed: the next round feeds it.

        After a block of which all drafts were accepted, a draft model lacks two tokens, its own last draft
        and the token after it: the next round feeds it both. Nothing is computed again.
        """
        for model in (self.target, self.drafter):
            if model:
                model.roll_back(state.lengths)

    def flush(self) -> None:
        """Sends, or receives, the last decision where no round follows it."""
        self._rounds.flush()

    def leave(self) -> None:
        """Does as `flush` where rounds end before their texts do; the leader ends those of all ranks."""
        self._rounds.leave()

    @property
    def were_left(self) -> bool:
        """Returns whether the leader has left the rounds."""
        return self._rounds.were_left

    def free(self) -> None:
        """Frees the caches. The engine cannot be used afterwards."""
        for model in (self.target, self.drafter):
            if model:
                model.free()

    def synchronize(self) -> None:
        """Waits for the GPUs of this rank's models, so that the leader's clocks are right.

        Other GPUs are not touched: the first call to one makes a context there, of half a GiB.
        """
        devices = {self._device, self.drafter.device if self.drafter else None}
        for device in devices:
            if device is not None and device.type == "cuda":
                torch.cuda.synchronize(device)


class Engine(RankEngine):
    """Runs rounds as the leader: drafts or requests drafts, verifies and decides."""

    target: ModelRunner
    drafter: Drafter
    _rounds: LeaderProtocol
    _protocol = LeaderProtocol

    def __init__(
        self, target: ModelRunner, drafter: Drafter, sampler: Sampler, rule: Rule, roles: Roles = SOLE
    ) -> None:
        super().__init__(
            target=target,
            drafter=drafter,
            sampler=sampler,
            roles=roles,
            context=target.model.context,
            device=target.model.device,
        )
        self._rule = rule
        self._damaged = set[str]()  # models whose logits were not numbers, and are known to be

    @torch.inference_mode()
    def draft(self, state: State, wanted: list[int]) -> Proposal:
        """Returns K >= 0 drafts a row, each with the distribution q that it was drawn from.

        The drafts are (B, K), their distributions (B, K, V), over the target's vocabulary: a token that the
        draft model lacks has probability 0. Each q depends on the row's text and on the drafts before it.

        Whatever drafts, the rules need no more of it than that q is the one that was really drawn from:

        * a draft model's q is a softmax of its logits under the row's sampling controls, one forward a draft;
        * a trained head's is the same of logits that it computes from the target's hidden states;
        * an n-gram's draft is looked up in the text, not drawn: its q is 1 for that token, 0 for others, and
          it is accepted with the probability p that the target gives it.

        With K = 0 nothing is drafted, and the proposal is empty.
        """
        with self.observer.part(DRAFT):
            self._enter("draft", self._rounds.decided + 1)

            # What limits a row's drafts is known before they are drawn. Once drawn, all are submitted.
            count = tuple(
                min(k, self.drafter.limit(length), self.target.room(length))
                for k, length in zip(wanted, state.lengths, strict=True)
            )
            # Ranks with a part of the draft model are asked first. Of a split model they add their part to
            # the logits from which this rank draws; ranks of the draft's own draw, and send tokens with q.
            self._rounds.ask(state, count)
            proposal = self.drafter.propose(state, count)
            self._rounds.submit(state, proposal)  # to the ranks of the target, which are fed the drafts
            return proposal

    @torch.inference_mode()
    def verify(self, state: State, proposal: Proposal) -> Decision:
        with self.observer.part(DECIDE):
            self._enter("verify", self._rounds.decided + 1)
            with self.observer.part(VERIFY):
                logit_BWV = target_logits(self.target, state, proposal.count)
            decision = self.judge(state, proposal, logit_BWV)
            # Other ranks get the decision with the next round's drafts: one message a round.
            self._rounds.decide(state, decision)
            self._enter("commit", self._rounds.decided)
            return decision

    def judge(self, state: State, proposal: Proposal, logit_BWV: Tensor) -> Decision:
        """Decides what each row commits, given the target's logits over its drafts and the next position."""
        # The controls that the drafts were drawn under, each position over its own prefix, which holds the
        # drafts before it. Column i: the target's distribution after i drafts, if they stand.
        probs_BWV = self.transform(logit_BWV, state.prefix(0, proposal.k + 1))
        # Without drafts (K = 0) there are no probabilities of drafts: (B, 0, V).
        draft_BKV = probs_BWV[:, :0] if proposal.draft_BKV is None else proposal.draft_BKV
        count_B = sent(proposal.count, probs_BWV.device)

        # The slot names the round's random numbers: a uniform in [0, 1) for each draft's coin, (B, K), and
        # others for the draw of the token after them; drafts are drawn with numbers of a third kind, and all
        # are independent. It names them by the run's seed, the prompt's id, the length of the text, what the
        # draw is for and the draft's place, never by a counter. So no two rounds share a number, and a row's
        # text does not depend on the rows next to it. `round` returns `decide` of these draws and of the
        # tensors; a model may run it as a CUDA graph.
        slot = state.slot(Purpose.ACCEPT)
        packed_BN = self.draws.round(
            decide, self._rule, slot, probs_BWV, draft_BKV, proposal.drafted_BK, count_B
        )
        decision = Decision.unpack(packed_BN, proposal.count)  # here the host waits for the device, once
        if any(decision.damaged):
            self._name_damaged(decision, probs_BWV)

        if self.logprobs.reads:
            blocks = [[] if ended else decision.tokens(row) for row, ended in enumerate(state.ended)]
            logprobs = self.logprobs.read(logit_BWV, probs_BWV, self.transform.vocab, blocks)
            decision = replace(decision, logprobs=logprobs)
        self.observer.decided(state, proposal, decision, probs_BWV, logit_BWV)
        return decision

    def _name_damaged(self, decision: Decision, probs_BWV: Tensor) -> None:
        """Warns, once for each model, that its logits are not numbers: the texts of these rows end there."""
        rows = [row for row, damaged in enumerate(decision.damaged) if damaged]
        by_target_R = has_nan(probs_BWV)[rows].any(1)  # a target that is sound leaves the draft
        names = {
            f"the target {self.target.model.name}" if it else self.drafter.name for it in by_target_R.tolist()
        }
        for name in sorted(names - self._damaged):
            log.warning("%s gave logits that are not numbers (NaN or infinite)", name)
        self._damaged |= names


def target_logits(target: ModelRunner, state: State, count: tuple[int, ...]) -> Tensor:
    """Returns the target's logits over each row's drafts and the position after them, (B, K+1, V).

    text      0 1 2 3 4 | 5 6      a row of 5 tokens and 2 drafts, in a batch where K = 3
    fed               4   5 6      every token that the cache lacks, up to the last draft
    columns           0   1 2 -    column i: the logits after i drafts; the last is undefined in this row

    Tokens are read from `state.token_BS`, (B, S): the drafter wrote each row's drafts after its text. It
    is one forward for all rows and drafts. Without drafts (K = 0) each row is fed its last token alone. A
    row that has ended is fed nothing: it ends where its cache does.
    """
    rows = zip(target.cached, state.ended, state.lengths, count, strict=True)
    ends = [cached if ended else length + drafted for cached, ended, length, drafted in rows]
    wanted = [drafted + 1 for drafted in count]
    return target.logits(state.token_BS, ends, wanted)
