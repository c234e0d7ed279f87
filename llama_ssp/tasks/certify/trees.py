"""The exact distribution of what the rule commits in a round with siblings of drafts.

The rule tries the children of a node one after the other. So its distribution is held against the target's
child by child, as law.py does it draft by draft: with all other tokens as they were, each token
that could have been drawn last gets its turn, with the probability child(x) of its draw, and

    child(x) P(the child stands | x)  +  sum over y of  child(y) P(its node stands | y) correction(x | y)

must be what the node gives without this child: P(its node stands) correction(x). Before its first child, a
draft, that is the chance that the drafts before it stand, times the target's distribution. If that holds at
every child, then by induction, which takes children away from the last one on, the distribution of whole
texts is the target's. What follows a child that stands must be the target's distribution behind it.
"""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from llama_ssp.speculative.verification import Branches, DraftBlock, TreeRule
from llama_ssp.tasks.certify.decisions import Round
from llama_ssp.tasks.certify.law import CELLS, likeliest, missed, rule_error

TRIES = 64  # random outcomes of all draws, to see that the largest that passed decides


def tree_error(rule: TreeRule, seen: Round, at: int) -> float | None:
    """Returns how far the rule is from exact at the children of this position of the round, as `rule_error`
    does for rounds without siblings."""
    if not seen.siblings:
        return rule_error(rule, seen, at)
    if not _largest_decides(rule, seen):
        return 1.0
    if at == seen.count:
        return _after_all(rule, seen)
    size, errors = _size(seen), []
    reach = float(_chances(rule, _tree(seen, at))[0, -1]) if at else 1.0
    due_V = reach * seen.target_WV[at]  # what the node gives without the children that are still to come
    left_V = seen.draft_KV[at]  # the draft's distribution without the children before
    for c, own in enumerate((seen.drafted[at], *seen.siblings[at])):
        reached, mass = float(due_V.sum()), float(left_V.sum())
        if reached <= 0 or mass <= 0:
            break
        child_V, place = left_V / mass, (at * size + size - c if c else (at + 1) * size)
        errors.append(_child_error(rule, seen, at, c, place, child_V, due_V))
        as_it_was = _tree(seen, at + 1, c)
        after_V = rule.probs_after(as_it_was, torch.tensor([at * size]))[0]
        due_V = _chances(rule, as_it_was)[0, at * size] * after_V
        if c:
            behind_V = rule.probs_after(as_it_was, torch.tensor([place]))[0]
            recorded_V = seen.behind[at][c - 1].target_WV[0]
            errors.append(float((behind_V - recorded_V).abs().sum()) / 2)
        left_V = left_V.index_fill(0, torch.tensor([own]), 0)
    return max(errors, default=None)


def _child_error(
    rule: TreeRule, seen: Round, at: int, c: int, place: int, child_V: Tensor, due_V: Tensor
) -> float:
    """The equation at child `c` of a node, over the tokens that it could have been."""
    tried, size = likeliest(child_V), _size(seen)
    kept_V, corrected_V = torch.zeros_like(due_V), torch.zeros_like(due_V)
    for part in torch.split(tried, max(1, CELLS // len(due_V))):
        block = _tree(seen, at + 1, c, part)
        chance_EO = _chances(rule, block)
        correction_EV = rule.probs_after(block, torch.full((len(part),), at * size))
        kept_V[part] = child_V[part] * chance_EO[:, place]
        corrected_V += (child_V[part] * chance_EO[:, at * size]) @ correction_EV
    return missed(kept_V, corrected_V, due_V, child_V.index_fill(0, tried, 0))


def _after_all(rule: TreeRule, seen: Round) -> float:
    """The token behind a chain that stands as a whole."""
    block = _tree(seen, seen.count)
    probs_V = rule.probs_after(block, torch.tensor([seen.count * _size(seen)]))[0]
    return float((probs_V - seen.target_WV[seen.count]).abs().sum()) / 2


def _size(seen: Round) -> int:
    return max(map(len, seen.siblings)) + 1


def _tree(seen: Round, count: int, last: int | None = None, tokens: Tensor | None = None) -> DraftBlock:
    """The round's first `count` drafts and their siblings; the last draft has the first `last` of them.

    With `tokens` a row for each: the last child of the last draft's node is this token.
    """
    most, each = _size(seen) - 1, [len(own) for own in seen.siblings[:count]]
    drafted_K = torch.tensor(seen.drafted[:count])
    token_KS = torch.tensor([[*own, *[0] * (most - len(own))] for own in seen.siblings[:count]])
    behind_KSV = torch.zeros(count, most, seen.target_WV.shape[-1], dtype=seen.target_WV.dtype)
    for i, own in enumerate(seen.behind[:count]):
        for j, one in enumerate(own):
            behind_KSV[i, j] = one.target_WV[0]
    rows = 1 if tokens is None else len(tokens)
    drafted_EK, token_EKS = drafted_K.repeat(rows, 1), token_KS.repeat(rows, 1, 1)
    if last is not None:
        each[-1] = last
    if tokens is not None and last:
        token_EKS[:, -1, last - 1] = tokens
    elif tokens is not None:
        drafted_EK[:, -1] = tokens
    branches = Branches(token_EKS, torch.tensor(each).expand(rows, -1), behind_KSV.expand(rows, -1, -1, -1))
    probs = seen.target_WV[: count + 1].expand(rows, -1, -1), seen.draft_KV[:count].expand(rows, -1, -1)
    return DraftBlock(*probs, drafted_EK, torch.full((rows,), count), branches)


def _numbers(rule: TreeRule, k: int, size: int) -> Tensor:
    """The outcome that each draw alone makes, (K * C): of every draft, and of every sibling."""
    alone = torch.eye(k * size, dtype=torch.bool).view(-1, k, size)
    return torch.as_tensor(rule.outcome(alone[..., 0], alone[..., 1:]))


def _largest_decides(rule: TreeRule, seen: Round) -> bool:
    """Whether every draw has an outcome of its own, and the largest that passed is the round's."""
    k, size = seen.count, _size(seen)
    number_N, bits = _numbers(rule, k, size), Random(len(seen.text))
    passed_TN = torch.tensor([[bits.random() < 0.5 for _ in range(k * size)] for _ in range(TRIES)])
    passed = passed_TN.view(TRIES, k, size)
    found_T = rule.outcome(passed[..., 0], passed[..., 1:])
    largest_T = torch.where(passed_TN, number_N, 0).amax(1)
    return sorted(number_N.tolist()) == list(range(1, k * size + 1)) and torch.equal(found_T, largest_T)


def _chances(rule: TreeRule, block: DraftBlock) -> Tensor:
    """The chance of every outcome in each row, (E, 1 + K * C): draws are tried from the largest down."""
    chance_EKC = rule.tree_chances(block)
    rows, k, size = chance_EKC.shape
    chance_EN, number_N = chance_EKC.reshape(rows, -1), _numbers(rule, k, size)
    found_EO, left_E = (
        torch.zeros(rows, 1 + k * size, dtype=chance_EN.dtype),
        torch.ones_like(chance_EN[:, 0]),
    )
    for column in number_N.argsort(descending=True).tolist():
        found_EO[:, number_N[column]] = left_E * chance_EN[:, column]
        left_E = left_E * (1 - chance_EN[:, column])
    found_EO[:, 0] = left_E
    return found_EO
