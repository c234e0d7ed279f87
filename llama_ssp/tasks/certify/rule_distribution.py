"""The exact distribution of what a rule commits, computed from the probabilities of one round.

A rule is a pure function: it gives the chance of each independent draw, how many drafts stand for each
outcome of the draws, and the distribution of the token that follows. So the distribution of the output is a
finite sum. It is computed node by node. At node i of a round, with the first i drafts as they were, the rule
gets a block of i+1 drafts, once for each token that could have been drafted last; then

    draft(x) P(i+1 stand | x)  +  sum over y of  draft(y) P(i stand | y) correction(x | y)

must be the target's probability of x times the chance that i drafts stand. If that holds at every node, and
the chance that i drafts stand is the same from a block of i and from one of i+1, then by induction from the
last position the distribution of whole texts is the target's: for the token rule, and for the block rule,
in which draws depend on later positions. Only the rule's three functions are called, so any wrong rule shows.

Tokens that the draft hardly ever proposes are not tried one by one. Their part can only lie between nothing
and their share of the draft's distribution; if some such addition makes the equation true, it counts as true.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llama_ssp.speculative.verification import DraftBlock, Rule
from llama_ssp.tasks.certify.recorder import Round

REST = 1e-3  # of the draft's probability is not tried; more where MOST_TRIED tokens leave out more
MOST_TRIED = 256
CELLS = 2**18  # of a table of drafts by vocabulary; larger tables are split


def rule_error(rule: Rule, seen: Round, at: int) -> float | None:
    """How far the rule is from exact at this position of the round; None where it cannot get there.

    The larger of two figures: the total variation between its output and the target's distribution, both
    weighted with the chance of getting here given the drafts; and how much that chance differs between a
    block that ends here and a longer one.
    """
    target_V = seen.target_WV[at]
    reach = _reach(rule, seen, at)
    if reach <= 0:
        return None
    if at == seen.count:
        block = _block(seen, torch.tensor(seen.drafted)[None], at)
        probs_V = rule.correction_probs(block, torch.tensor([at]))[0]
        return float((probs_V - target_V).abs().sum()) / 2
    draft_V = seen.draft_KV[at]
    tried = likeliest(draft_V)
    kept_V, corrected_V = torch.zeros_like(target_V), torch.zeros_like(target_V)
    some_V = target_V
    for part in torch.split(tried, max(1, CELLS // len(target_V))):
        drafted = torch.tensor(seen.drafted[:at], dtype=torch.int64).expand(len(part), at)
        block = _block(seen, torch.cat([drafted, part[:, None]], 1), at + 1)
        chance_EN = _stand_chances(rule, rule.accept_chances(block))
        correction_EV = rule.correction_probs(block, torch.full((len(part),), at))
        kept_V[part] = draft_V[part] * chance_EN[:, at + 1]
        corrected_V += (draft_V[part] * chance_EN[:, at]) @ correction_EV
        some_V = correction_EV[0]
    rest_V = draft_V.index_fill(0, tried, 0)
    return missed(kept_V, corrected_V, some_V, reach * target_V, rest_V)


def missed(kept_V: Tensor, corrected_V: Tensor, some_V: Tensor, due_V: Tensor, rest_V: Tensor) -> float:
    """By how much the equation is missed, with the best addition of the tokens that were not tried.

    Of `rest_V` each may add to its own token, and all of it together to the correction.
    """
    correction_V = corrected_V / corrected_V.sum() if float(corrected_V.sum()) > 0 else some_V
    lacking_V = due_V - kept_V - corrected_V

    def lacking(added: float) -> float:
        left_V = lacking_V - added * correction_V
        return float((left_V - torch.minimum(left_V.clamp(min=0), rest_V)).abs().sum()) / 2

    rest, less = float(rest_V.sum()), float(lacking_V.sum())
    least = min(lacking(0.0), _least(lacking, rest)) if rest > 0 else lacking(0.0)
    return max(least, -less, less - rest)


def _least(convex: Callable[[float], float], high: float) -> float:
    """The minimum of a convex function on 0..high."""
    low = 0.0
    for _ in range(100):
        third = (high - low) / 3
        if convex(low + third) <= convex(high - third):
            high -= third
        else:
            low += third
    return convex((low + high) / 2)


def _reach(rule: Rule, seen: Round, count: int) -> float:
    """The chance, given the round's first `count` drafts, that all of them stand."""
    if not count:
        return 1.0
    block = _block(seen, torch.tensor(seen.drafted[:count])[None], count)
    return float(_stand_chances(rule, rule.accept_chances(block))[0, count])


def _stand_chances(rule: Rule, chance_EK: Tensor) -> Tensor:
    """For each row, the chance that n = 0..K drafts stand: a sum over all outcomes of the draws.

    All draws but the last have the same chances in every row, so outcomes are weighted once.
    """
    rows, k = chance_EK.shape
    if rows > 1 and not torch.equal(chance_EK[:, :-1], chance_EK[:1, :-1].expand(rows, k - 1)):
        return torch.cat([_stand_chances(rule, one[None]) for one in chance_EK])
    outcome_OK = (torch.arange(2**k)[:, None] >> torch.arange(k)) & 1 == 1
    earlier_O = torch.where(outcome_OK[:, :-1], chance_EK[0, :-1], 1 - chance_EK[0, :-1]).prod(1)
    length_O = rule.accepted(outcome_OK)
    found_EN = torch.zeros(rows, k + 1, dtype=chance_EK.dtype)
    for passed in (True, False):
        mine_O = outcome_OK[:, -1] == passed
        weight_N = torch.zeros(k + 1, dtype=chance_EK.dtype)
        weight_N.scatter_add_(0, length_O[mine_O], earlier_O[mine_O])
        last_E = chance_EK[:, -1] if passed else 1 - chance_EK[:, -1]
        found_EN += last_E[:, None] * weight_N
    return found_EN


def _block(seen: Round, drafted_EK: Tensor, count: int) -> DraftBlock:
    rows = len(drafted_EK)
    return DraftBlock(
        seen.target_WV[: count + 1].expand(rows, -1, -1),
        seen.draft_KV[:count].expand(rows, -1, -1),
        drafted_EK,
        torch.full((rows,), count),
    )


def likeliest(draft_V: Tensor) -> Tensor:
    """The fewest tokens that leave out no more than REST of the distribution, MOST_TRIED at most."""
    down = draft_V.sort(descending=True)
    needed = int((down.values.cumsum(0) < 1 - REST).sum()) + 1
    return down.indices[: min(needed, int((draft_V > 0).sum()), MOST_TRIED)]
