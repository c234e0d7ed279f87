"""What rounds of drafts would do to texts that are there: expected exactly, for every K, without speculation.

The texts are the target's, drawn under the same sampling settings. p is the target's probability of a text's
token, q the draft's. Given the text, its draws are decided by coins alone:

Token rule: x is drafted and kept with probability q(x) * min(1, p(x) / q(x)) = min(p(x), q(x)), and it is
committed with probability p(x). So a committed token that was drafted for was kept with probability
min(1, q(x) / p(x)), given the text; else it is the correction, which ends the round.

Block rule: let w be P[i] of verification.py, the weight that the first i drafts carry: 1 where a round
begins. If i drafts or more are kept, x follows with probability w * p(x), and it is drafted and kept with
probability min(w * p(x), q(x)). So it was kept with probability min(1, q(x) / (w * p(x))), given the text,
and then w is min(1, w * p(x) / q(x)). This does not depend on how many drafts follow.

Under both rules what follows is drawn from p, however the tokens before it came about. So no later token says
anything of a coin before it, and the chances of a round multiply.

Rounds begin anew after each correction or bonus token. With r(t) the probability that a round begins after t
tokens, and c(t, j) that a round which begins there commits j of them, r(0) = 1 and

    r(t) = sum over j of r(t - j) * c(t - j, j)

The expected rounds of the text are the sum of r(t) over its tokens. Tokens a round are all tokens over all
expected rounds; a mean over positions would be biased, as rounds do not begin at all of them equally often.

Shapes: T tokens of a text, K drafts. Row t is a round that begins after t tokens, and column i its draft
number i + 1, which stands where the text has its token t + i. No torch: on numpy arrays, of floats or of
fractions, in which tests/proofs enumerate whole runs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from llama_ssp.config import Verification

Array = Any  # numpy.ndarray, of float or of Fraction
LARGEST = 700.0  # of a logarithm whose exponential is a number


def windows(of_T: Array, k: int) -> Array:
    """Returns what stands at the k tokens from each on, (T, k); 0 after the text's end."""
    padded = np.concatenate([of_T, np.zeros(k, of_T.dtype)])
    return np.lib.stride_tricks.sliding_window_view(padded, k)[: len(of_T)] if k else of_T[:, None][:, :0]


def ratios(target_TK: Array, draft_TK: Array) -> Array:
    """Returns q / p of log-probabilities, (T, K).

    A token that the target never draws, which no sound text has, is taken as the draft's own law of it: 1
    where the draft may draw it, else 0.
    """
    possible_TK = draft_TK > -np.inf
    drawn_TK = target_TK > -np.inf
    difference_TK = np.where(possible_TK & drawn_TK, draft_TK, 0.0) - np.where(drawn_TK, target_TK, 0.0)
    ratio_TK = np.exp(np.minimum(difference_TK, LARGEST))
    return np.where(possible_TK, np.where(drawn_TK, ratio_TK, 1.0), 0.0)


def kept_chances(ratio_TK: Array, rule: Verification) -> Array:
    """Returns the chance of each draft to be kept, given the text and that those before it are, (T, K)."""
    if rule is Verification.token or not ratio_TK.shape[1]:
        return np.minimum(ratio_TK, 1)

    one_T = ratio_TK[:, 0] * 0 + 1  # in the array's own kind of number
    weight_T = one_T  # w = 1
    chances = []
    for ratio_T in ratio_TK.T:
        chances.append(np.minimum(ratio_T / np.where(weight_T > 0, weight_T, one_T), one_T))
        # Without a ratio the draft is never kept, so that what it would carry does not count.
        weight_T = np.minimum(weight_T / np.where(ratio_T > 0, ratio_T, one_T), one_T)
    return np.stack(chances, 1)


def counts_of(k: int, reach_T: Array, room: int | None) -> Array:
    """Returns how many drafts a round has that begins after 0, 1, ... tokens, (T,).

    `reach_T` is how many the drafter could make there. A text that may get `room` tokens in all drafts one
    less than it lacks, as a round adds a token to those that it keeps; None is no limit.
    """
    count_T = np.minimum(k, reach_T)
    if room is None:
        return count_T
    return np.minimum(count_T, room - 1 - np.arange(len(reach_T))).clip(0)


@dataclass(frozen=True, kw_only=True)
class ExpectedRounds:
    """Holds what the rounds of a text are expected to be at one K, given the text.

    `drafted` and `accepted` are drafts by their position in the block, counted as `Counts` counts those of a
    run: a block that is cut at the text's end has no drafts after it.
    """

    tokens: int
    rounds: Any
    drafted: list[Any]
    accepted: list[Any]


def expected_rounds(chance_TK: Array, count_T: Array) -> ExpectedRounds:
    """Returns the expected rounds of a text; each that begins after t tokens has `count_T[t]` drafts."""
    tokens, k = chance_TK.shape
    left_T = tokens - np.arange(tokens)  # a round that begins after t tokens can keep so many of the text
    column_K = np.arange(k)
    is_real_TK = column_K < np.minimum(count_T, left_T)[:, None]

    # Column i: i drafts or more are kept; exactly i of them are, and a round commits one token more.
    none_T1 = chance_TK[:, :0].sum(1, keepdims=True)
    reached_TK1 = np.concatenate([none_T1 + 1, np.where(is_real_TK, chance_TK, 0)], 1).cumprod(1)
    commits_TK1 = reached_TK1 - np.concatenate([reached_TK1[:, 1:], none_T1], 1)

    # r(t): each beginning hands on its probability to the places where its round may end.
    begins_T = np.concatenate([none_T1[:, 0], np.zeros(k + 1, reached_TK1.dtype)])
    begins_T[0] += 1
    for start in range(tokens):
        begins_T[start + 1 : start + k + 2] += begins_T[start] * commits_TK1[start]
    begins_T = begins_T[:tokens]

    # A block that holds the text's last token among its kept drafts is cut there.
    last_T = np.minimum(left_T, k)
    is_cut_T = np.where(left_T <= k, reached_TK1[np.arange(tokens), last_T], 0)
    drafted = []
    for position in range(k):
        is_counted_T = np.where(position < left_T, 1, 1 - is_cut_T)
        drafted.append((begins_T * np.where(position < count_T, is_counted_T, 0)).sum())

    return ExpectedRounds(
        tokens=tokens,
        rounds=begins_T.sum(),
        drafted=drafted,
        accepted=list((begins_T[:, None] * reached_TK1[:, 1:]).sum(0)),
    )
