"""Traversal verification (2505.12398) of one node of a draft tree, in the array operations of both libraries.

A node has a weight: the chance that its text stands, given that nothing behind it does. Its children were
drawn one after the other, each from the draft's distribution without the earlier ones. They are tried in
this order; each that fails leaves the node with what it could not cover of the target's distribution, and
with another weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from llama_ssp.speculative.array_ops import Array, excess, order, pick, smaller, where


@dataclass(frozen=True)
class Closed:
    """A node all of whose children have failed. X: any axes; C children, the first of them a draft.

    `chances` has the chance of each child's draw when its earlier siblings have failed, (X); 0 of one that
    was not drawn. `weights` has the node's weight after each child, and `probs_XV` the distribution of the
    token behind the node after all.
    """

    chances: list[Array]
    weights: list[Array]
    probs_XV: Array


def closed(weight_X: Array, target_XV: Array, draft_XV: Array, child_XC: Array, count_X: Array) -> Closed:
    """Tries a node's children: `count_X` were drawn, or all tokens of `draft_XV` if it has fewer."""
    chances, weights = [], []
    for c in range(child_XC.shape[-1]):
        token_X1 = child_XC[..., c : c + 1]
        if c:
            draft_XV = where(order(draft_XV) == child_XC[..., c - 1 : c], 0, draft_XV)
        mass_X1 = draft_XV.sum(-1, keepdims=True)
        drawn_X = (count_X > c) & (mass_X1[..., 0] > 0)
        child_XV = draft_XV / where(mass_X1 > 0, mass_X1, 1)
        asked_X, given_X = (pick(probs, token_X1, -1)[..., 0] for probs in (target_XV, child_XV))
        ratio_X = weight_X * asked_X / where(given_X > 0, given_X, 1)
        chances.append(where(drawn_X & (given_X > 0), smaller(ratio_X, ratio_X * 0 + 1), 0))
        rest_XV = excess(weight_X[..., None], target_XV, child_XV)
        rest_X = rest_XV.sum(-1)
        whole_X = rest_X + 1 - weight_X
        left_X = rest_X / where(whole_X > 0, whole_X, 1)
        # Where nothing remains only rounding can have made the child fail: the distribution stays.
        some_X1 = (drawn_X & (rest_X > 0))[..., None]
        target_XV = where(some_X1, rest_XV / where(some_X1, rest_X[..., None], 1), target_XV)
        weight_X = where(drawn_X, left_X, weight_X)
        weights.append(weight_X)
    return Closed(chances, weights, target_XV)
