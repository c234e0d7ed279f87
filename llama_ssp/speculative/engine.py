"""The target, a drafter and a rule: what one round consists of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from llama_ssp.distributed.roles import SOLE, Roles
from llama_ssp.models.transfer import sent
from llama_ssp.speculative.drafters.local import Drafter, certain_where, resting, within
from llama_ssp.speculative.drafters.remote import Exchange, RemoteDrafter
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.native import HostDraws, can_decide
from llama_ssp.speculative.rng import Draws, Purpose
from llama_ssp.speculative.round_protocol import LeaderProtocol, RoundResult
from llama_ssp.speculative.sampling import SamplingTransform, has_nan, one_hot
from llama_ssp.speculative.state import Prompt, Proposal, State
from llama_ssp.speculative.verification import Block, CoupledRule, Rule, overlap

DRAFT, VERIFY, DECIDE = "draft", "verify", "decide"  # parts of a round, as a stopwatch tells them apart


class Engine:
    """The leader's: holds its part of the target and a drafter, and decides. Knows token ids only.

    The other ranks of a placement have a `Follower` each, with the same calls in the same order.
    """

    def __init__(
        self, target: ModelRunner, drafter: Drafter, transform: SamplingTransform, rule: Rule, draws: Draws,
        crew: Roles = SOLE,
    ) -> None:  # fmt: skip
        self.target = target
        self.drafter = drafter
        self._transform = transform
        self._rule = rule
        self._draws = draws
        self._rounds = LeaderProtocol(crew)
        self._enter = crew.everyone.enter
        self.part: Callable[[str], AbstractContextManager[None]] = _untimed  # what times parts of a round

    @property
    def context(self) -> int:
        return self.target.model.context

    @property
    def target_forwards(self) -> int:
        return self.target.forwards

    @property
    def draft_forwards(self) -> int:
        return self.drafter.forwards

    @property
    def overlap(self) -> dict[str, Any] | None:
        """What came of a draft on ranks of its own; None without one."""
        return self.drafter.figures() if isinstance(self.drafter, RemoteDrafter) else None

    @property
    def exchanges(self) -> list[Exchange]:
        """With a draft on ranks of its own, the latest ones; for pictures."""
        return list(self.drafter.history) if isinstance(self.drafter, RemoteDrafter) else []

    def prefill(self, prompts: list[Prompt], max_new_tokens: int, longest: int = 0) -> State:
        """The batch's state, with every cache holding all but each prompt's last token.

        `longest` is the length, prompt and answer, of texts that may come into its rows later.
        """
        self._enter("prefill")
        state = State(
            prompts, room_of(prompts, max_new_tokens, self.context, longest), self.target.model.device
        )
        self.target.start(state.rows, state.capacity)
        self.target.warm(state.token_BS, [length - 1 for length in state.lengths])
        self.drafter.start(state.rows, state.capacity)
        self.drafter.warm(state)
        return state

    def admit(self, state: State, row: int, prompt: Prompt) -> None:
        """Puts another prompt into a row whose text has ended."""
        state.replace(row, prompt)
        self.target.forget(row)
        self.drafter.forget(row)

    def read(self, state: State, row: int, count: int) -> None:
        """Reads the next `count` tokens of a new prompt, while the other rows rest."""
        self.settle()  # passes between rounds come after the last one's decision, on every rank
        self._enter("prefill")
        end = state.read(row, count)
        self.target.expect(row, state.lengths[row])
        self.target.read(state.token_BS, row, end)
        self.drafter.read(state, row, end)

    def wait(self) -> None:
        """Until GPUs have done what they were asked to; only clocks need to know."""
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)

    @torch.inference_mode()
    def draft(self, state: State, wanted: list[int]) -> Proposal:
        """At most `wanted` tokens a row, fewer where the drafter cannot reach further."""
        with self.part(DRAFT):
            self._enter("draft", self._rounds.begin())
            count = tuple(
                min(k, self.drafter.limit(length)) for k, length in zip(wanted, state.lengths, strict=True)
            )
            self._rounds.ask(state, count)
            proposal = self.drafter.propose(state, count)
            self._rounds.submit(state, proposal)
            return proposal

    @torch.inference_mode()
    def verify(self, state: State, proposal: Proposal) -> RoundResult:
        """One target forward over K+1 positions, and the decision. Finished rows are fed nothing."""
        with self.part(DECIDE):  # but for the target's forward
            self._enter("verify", self._rounds.round)
            with self.part(VERIFY):
                logit_BWV = target_logits(self.target, state, proposal.count)
            verdict = self._judge(state, proposal, logit_BWV)
            self._rounds.decide(state, verdict)
            self._enter("commit", self._rounds.round)
            return verdict

    def roll_back(self, state: State) -> None:
        """Every cache forgets what was not committed."""
        self.target.roll_back(state.lengths)
        self.drafter.roll_back(state.lengths)

    def settle(self) -> None:
        """No round follows: whoever waits for the last decision gets to know it."""
        self._rounds.settle()

    def _judge(self, state: State, proposal: Proposal, logit_BWV: Tensor) -> RoundResult:
        probs_BWV = self._transform(logit_BWV, state.prefix(0, proposal.k + 1))
        if isinstance(self._draws, HostDraws) and can_decide(self._rule):
            return _on_host(proposal, self._by_kernel(self._draws, state, proposal, probs_BWV))
        damaged_B = within(tuple(n + 1 for n in proposal.count), has_nan(probs_BWV)).any(1)
        if proposal.damaged is not None:
            damaged_B |= proposal.damaged
        if proposal.k:
            accepted_B, probs_BV, seen_BN = self._decide(state, proposal, probs_BWV)
        else:
            accepted_B = torch.zeros_like(damaged_B, dtype=torch.int64)
            probs_BV, seen_BN = probs_BWV[:, 0], probs_BWV[:, 0, :0]
        probs_BV = resting(probs_BV, _idle(state))
        token_B = self._draws.categorical(probs_BV, state.slot(Purpose.CORRECT))
        columns = accepted_B[:, None], token_B[:, None], damaged_B[:, None], proposal.drafted_BK
        return _on_host(proposal, torch.cat([*columns, seen_BN.double()], 1))

    def _by_kernel(self, draws: HostDraws, state: State, proposal: Proposal, probs_BWV: Tensor) -> Tensor:
        """All that follows here, for distributions on the host, in one call."""
        decided = draws.decided(
            self._rule, probs_BWV, proposal.draft_BKV, proposal.drafted_BK, proposal.count, _idle(state),
            state.slot(Purpose.ACCEPT), state.slot(Purpose.CORRECT),
        )  # fmt: skip
        if proposal.damaged is not None:
            decided[:, 2] += proposal.damaged
        return decided

    def _decide(self, state: State, proposal: Proposal, probs_BWV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """How many drafts stand, the distribution of what follows, and what was seen of each: see
        `Verdict`."""
        block = self._block(state, proposal, probs_BWV)
        if isinstance(self._rule, CoupledRule):
            accepted_B, probs_BV = self._coupled(self._rule, state, block)
        else:
            chance_BK = self._rule.accept_chances(block)
            passed_BK = self._draws.bernoulli(chance_BK, state.slot(Purpose.ACCEPT))
            accepted_B = self._rule.accepted(passed_BK)
            probs_BV = self._rule.correction_probs(block, accepted_B)
        overlap_BK = overlap(block)
        return accepted_B, probs_BV, torch.cat([overlap_BK, *self._rule.standing(block, overlap_BK)], 1)

    def _coupled(self, rule: CoupledRule, state: State, block: Block) -> tuple[Tensor, Tensor]:
        """The target draws first, at every position, with the noise its draft was drawn with (coupled.py).

        What it drew behind the drafts that stand is certain then.
        """
        chosen, idle_B = [], sent(_idle(state), state.device)
        for position in range(block.k + 1):
            probs_BV = certain_where(idle_B | (block.count_B < position), block.target_BWV[:, position])
            chosen.append(self._draws.categorical(probs_BV, state.slot(Purpose.CORRECT, position)))
        chosen_BW = torch.stack(chosen, 1)
        accepted_B = rule.accepted(rule.agreed(block, chosen_BW))
        token_B = chosen_BW.gather(1, accepted_B[:, None])[:, 0]
        return accepted_B, one_hot(token_B, block.target_BWV[:, 0])

    def _block(self, state: State, proposal: Proposal, probs_BWV: Tensor) -> Block:
        """What the rule decides on."""
        assert proposal.draft_BKV is not None
        return Block(
            _in_double(probs_BWV),
            _in_double(proposal.draft_BKV),
            proposal.drafted_BK,
            sent(proposal.count, state.device),
        )


def _untimed(_part: str) -> AbstractContextManager[None]:
    """No stopwatch is on."""
    return nullcontext()


def room_of(prompts: list[Prompt], max_new_tokens: int, context: int, longest: int = 0) -> int:
    """How many tokens the longest text of a batch can grow to."""
    own = max(len(prompt.token_ids) for prompt in prompts) + max_new_tokens
    return min(max(own, longest), context)


def target_logits(target: ModelRunner, state: State, count: tuple[int, ...]) -> Tensor:
    """The target over each row's drafts and the position behind them."""
    ends = [
        cached if finished else length + drafted
        for cached, finished, length, drafted in zip(
            target.cached, state.finished, state.lengths, count, strict=True
        )
    ]
    return target.logits(state.token_BS, ends, [n + 1 for n in count])


def _idle(state: State) -> list[bool]:
    """Rows that have ended: nothing is drawn for them."""
    return [reason is not None for reason in state.finished]


def _in_double(probs: Tensor) -> Tensor:
    """Ratios and residuals are taken in fp64, of distributions that sum to one."""
    wide = probs.double()
    mass = wide.sum(-1, keepdim=True)
    return wide / mass if wide is probs else wide.div_(mass)


def _on_host(proposal: Proposal, decided_BN: Tensor) -> RoundResult:
    """Everything decided, in one transfer: accepted, token, damaged, then what there is of each draft."""
    whole = decided_BN.cpu().tolist()

    def of(part: int) -> list[list[float]]:
        """Each row's share of a part that has a column for each draft."""
        first = 3 + part * proposal.k
        return [row[first : first + n] for row, n in zip(whole, proposal.count, strict=True)]

    drafted, overlap_, before, standing = (of(part) for part in range(4))
    return RoundResult(
        drafted=[[int(token) for token in row] for row in drafted],
        accepted=[int(row[0]) for row in whole],
        token=[int(row[1]) for row in whole],
        overlap=overlap_,
        damaged=[bool(row[2]) for row in whole],
        standing=[list(zip(*both, strict=True)) for both in zip(before, standing, strict=True)],
    )
