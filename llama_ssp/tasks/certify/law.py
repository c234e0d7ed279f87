"""The distribution of what verification commits, summed exactly, and whether what it was given is right.

Two comparisons at recorded positions make the whole.

**What the rule commits is the distribution that it was given.** A rule is three pure functions, so the
distribution of its output is a finite sum, made node by node. At node i of a round, with the first i drafts
as they were, the rule gets a block of i+1 drafts, once for each token x that could have been drafted last:

    draft(x) P(i+1 stand | x)  +  sum over y of  draft(y) P(i stand | y) correction(x | y)

must be the target's probability of x times the chance that i drafts stand. If that holds at every node, then
by induction from the last position the distribution of whole texts is the target's: for the token rule, and
for the block rule, whose draws depend on later positions. Tokens that the draft hardly ever proposes are not
tried one by one: what they add lies between nothing and their share of the draft's distribution.

**The logits that it was given are the target's own.** Every text is fed anew to an empty cache: token by
token, as regular sampling feeds it, and, to see what rounding does, in blocks, in one piece, and alone. The
recorded logits may differ from the target's by what these passes differ by. (filters.py checks that the
probabilities are what the sampling controls make of the logits.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llama_ssp.config import MAX_K
from llama_ssp.models.interface import Model
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.verification import DraftBlock, Rule
from llama_ssp.tasks.certify.decisions import UNKNOWN, Round
from llama_ssp.tasks.certify.verdict import Check, Outcome, judged

Item = TypeVar("Item")
REST = 1e-3  # of the draft's probability is not tried; more where MAX_TRIED tokens leave out more
MAX_TRIED = 256
CELLS = 2**18  # of a table of drafts by vocabulary; larger tables are split
RULE_TOLERANCE = 1e-10  # of arithmetic in fp64
# Total variation between regular passes, beyond which the target's distribution says too little; and how many
# times the largest of them a recorded distribution may differ.
MAX_NOISE = 0.2
SAFETY = 2.0
MULTIPLE = 3.0  # of the passes' usual difference that is still rounding
PART_OF_LARGEST = 0.25  # passes may be equal, bit by bit, at most positions: so much is rounding everywhere
QUANTILE = 0.75  # of the positions: where "usual" is looked at


def check_law(
    model: Model | None, rule: Rule, rounds: list[Round], heat: float, vocab: int, rows: int, chunk: int
) -> Check | None:
    """Makes both comparisons at the positions of the rounds, on every rank; the leader judges."""
    if not rounds:
        return Check("law", Outcome.blind, "nothing was drafted, so verification had nothing to decide")
    if model is None:
        return None
    width = max(seen.count for seen in rounds) + 1
    logits = own_logits(model, rounds, width, rows, chunk)
    if rounds[0].logit_WV is UNKNOWN:  # this rank does not lead
        return None

    noise, departures = compared(rounds, logits, heat or 1.0, vocab)
    places = [(seen, at) for seen in rounds for at in range(seen.count + 1)]
    errors = [rule_error(rule, seen, at) for seen, at in spread(places, 2 * len(rounds))]
    return judge(noise, departures, [error for error in errors if error is not None])


@dataclass(frozen=True)
class Noise:
    """Total variation between regular passes: the largest, and at QUANTILE of the positions."""

    largest: float
    usual: float = 0.0

    @property
    def tolerance(self) -> float:
        """How far a recorded distribution may be from the target's own; in fp32 at least its rounding."""
        return max(SAFETY * self.largest, 1e-6)


def judge(noise: Noise, departures: Sequence[float], errors: Sequence[float]) -> Check:
    """Says what differences from the target's own distributions, and errors of the rule, amount to."""
    wrong = sum(not error <= RULE_TOLERANCE for error in errors)  # NaN is wrong, too
    largest_error = max(errors, default=0.0)
    positions = len(departures)
    astray = sum(not difference <= noise.tolerance for difference in departures)
    largest = float(np.max([0.0, *departures]))
    usual = float(np.quantile(departures, QUANTILE)) if departures else 0.0
    figures = {
        "positions": positions,
        "positions_astray": astray,
        "largest_total_variation": largest,
        "usual_total_variation": usual,
        "rounding_total_variation": noise.largest,
        "rounding_usual_total_variation": noise.usual,
        "positions_rule": len(errors),
        "positions_rule_wrong": wrong,
        "largest_total_variation_rule": largest_error,
    }

    wrong_rule = (
        f"the rule commits another distribution than it is given at {wrong} of {len(errors)} positions: "
        f"total variation {largest_error:.2g} at worst"
    )
    some_differ = (
        f"verification used distributions other than the target's at {astray} of {positions} positions: "
        f"total variation {largest:.2g} at worst, where rounding explains {noise.tolerance:.2g}"
    )
    many_differ = (
        f"verification used distributions other than the target's: total variation of {usual:.2g} and more "
        f"at a quarter of {positions} positions, where regular passes differ by {noise.usual:.2g}"
    )
    right = (
        f"verification commits the distribution it is given within {largest_error:.1g}, and that is the "
        f"target's own within {largest:.2g} at {positions} positions (rounding: {noise.largest:.2g})"
    )
    usual_by_rounding = MULTIPLE * noise.usual + max(PART_OF_LARGEST * noise.largest, 1e-6)
    faults = [(wrong, wrong_rule), (astray, some_differ), (usual > usual_by_rounding, many_differ)]
    check = judged("law", faults, right, figures)

    if check.outcome is Outcome.failed or noise.largest <= MAX_NOISE:
        return check
    says = f"the target's own distribution moves by {noise.largest:.2g} with how its text is fed"
    return Check("law", Outcome.blind, says, figures)


def spread(places: Sequence[Item], count: int) -> list[Item]:
    """Returns a random subset: a fixed stride would hit the same positions of rounds of equal length."""
    return Random(len(places)).sample(places, min(len(places), count))


class Text(NamedTuple):
    """A text that is fed anew; the logits of its `last` tokens are looked at."""

    token_ids: Sequence[int]
    prompt_length: int
    last: int


def own_logits(
    model: Model, rounds: Sequence[Round], width: int, rows: int, chunk: int
) -> list[list[Tensor]]:
    """Returns each round's logits, (W, V), by four regular passes, of which the last has one row.

    The others have `rows` rows, as the run's had: of fewer texts some are fed several times. A batch of few
    tokens may be multiplied by another kernel, which rounds differently.
    """
    texts = [Text(seen.text, seen.prompt_length, seen.count) for seen in rounds]
    order = sorted(range(len(rounds)), key=lambda n: len(rounds[n].text))  # texts of a batch end together
    longest = len(rounds[order[-1]].text)
    full = [order[n % len(order)] for n in range(max(rows, len(order)))]
    mixed = [*full[1::2], *full[::2]]
    return [
        fed(model, texts, order=full, width=1, rows=rows, chunk=chunk),
        fed(model, texts, order=full[::-1], width=width, rows=rows, chunk=chunk),
        fed(model, texts, order=mixed, width=0, rows=rows, chunk=chunk),
        fed(model, texts, order=order, width=longest, rows=1, chunk=chunk),
    ]


def compared(
    rounds: Sequence[Round], ways: list[list[Tensor]], temperature: float, vocab: int
) -> tuple[Noise, list[float]]:
    """Compares the recorded logits with the first way's, and all ways with each other, by total variation."""

    def probs(logit_WV: Tensor) -> Tensor:
        return torch.softmax(logit_WV[:, :vocab].double().cpu() / temperature, -1)

    departures: list[float] = []
    noise: list[float] = []
    for seen, *logits in zip(rounds, *ways, strict=True):
        probs_by_way = [probs(logit_WV) for logit_WV in logits]
        departures += (probs(seen.logit_WV) - probs_by_way[0]).abs().sum(-1).div(2).tolist()
        for first_WV, second_WV in combinations(probs_by_way, 2):
            noise += (first_WV - second_WV).abs().sum(-1).div(2).tolist()
    return Noise(float(np.max(noise)), float(np.quantile(noise, QUANTILE))), departures


def rule_error(rule: Rule, seen: Round, at: int) -> float | None:
    """Returns how far the rule is from exact at this position of the round; None where it cannot get there.

    The larger of two figures: the total variation between its output and the target's distribution, both
    weighted with the chance of getting here given the drafts; and how much that chance differs between a
    block that ends here and a longer one.
    """
    target_V = seen.target_WV[at]
    before = _block(seen, torch.tensor(seen.drafted[:at], dtype=torch.int64)[None], at)
    reach = float(_stand_chances(rule, rule.accept_chances(before))[0, at]) if at else 1.0
    if reach <= 0:
        return None
    if at == seen.count:  # after all drafts: no further one could be tried
        probs_V = rule.correction_probs(before, torch.tensor([at]))[0]
        return float((probs_V - target_V).abs().sum()) / 2

    draft_V = seen.draft_KV[at]
    down = draft_V.sort(descending=True)
    needed = int((down.values.cumsum(0) < 1 - REST).sum()) + 1  # tokens that leave out no more than REST
    tried = down.indices[: min(needed, int((draft_V > 0).sum()), MAX_TRIED)]

    # A block for each token that is tried as the next draft (E of them): it is kept, or corrected.
    kept_V = torch.zeros_like(target_V)
    corrected_V = torch.zeros_like(target_V)
    for part in torch.split(tried, max(1, CELLS // len(target_V))):
        drafted_EK = torch.cat([before.drafted_BK.expand(len(part), at), part[:, None]], 1)
        block = _block(seen, drafted_EK, at + 1)
        chance_EN = _stand_chances(rule, rule.accept_chances(block))
        correction_EV = rule.correction_probs(block, torch.full((len(part),), at))
        kept_V[part] = draft_V[part] * chance_EN[:, at + 1]
        corrected_V += (draft_V[part] * chance_EN[:, at]) @ correction_EV

    # What was not tried adds to no token less than nothing, and to all at most its share of the draft's.
    lacking_V = reach * target_V - kept_V - corrected_V
    lacking = float(lacking_V.sum())
    too_much = float(-lacking_V.clamp(max=0).sum())
    untried = float(draft_V.index_fill(0, tried, 0).sum())
    return max(too_much, lacking - untried)


def _stand_chances(rule: Rule, chance_EK: Tensor) -> Tensor:
    """Sums over all outcomes of the draws: the chance in each row that n = 0..K drafts stand, (E, K+1)."""
    rows, k = chance_EK.shape
    outcome_OK = (torch.arange(2**k)[:, None] >> torch.arange(k)) & 1 == 1
    weight_EO = torch.ones(rows, 1, dtype=chance_EK.dtype)
    for chance_E1 in chance_EK.T[..., None]:  # outcomes without this draw, then those with it
        weight_EO = torch.cat([weight_EO * (1 - chance_E1), weight_EO * chance_E1], 1)
    return weight_EO.new_zeros(rows, k + 1).index_add_(1, rule.accepted(outcome_OK), weight_EO)


def _block(seen: Round, drafted_EK: Tensor, count: int) -> DraftBlock:
    rows = len(drafted_EK)
    return DraftBlock(
        target_BWV=seen.target_WV[: count + 1].expand(rows, -1, -1),
        draft_BKV=seen.draft_KV[:count].expand(rows, -1, -1),
        drafted_BK=drafted_EK,
        count_B=torch.full((rows,), count),
    )


def fed(
    model: Model, texts: Sequence[Text], order: Sequence[int], width: int, rows: int, chunk: int
) -> list[Tensor]:
    """Returns each text's logits for its `last` tokens and the one after, (last + 1, V), on the CPU.

    Prompts are prefilled as in a run, without their last token; the rest is fed `width` tokens at a time, or,
    if that is 0, prefilled, too, as far as no logits are asked for. `rows` texts are fed at a time, in this
    order. Every rank of the model takes part.
    """
    logits: dict[int, Tensor] = {}
    for first in range(0, len(order), rows):
        numbers = order[first : first + rows]
        batch = [texts[number] for number in numbers]
        for number, logit_WV in zip(numbers, _fed_at_once(model, batch, width, chunk), strict=True):
            logits[number] = logit_WV
    return [logits[number] for number in range(len(texts))]


def _fed_at_once(model: Model, texts: Sequence[Text], width: int, chunk: int) -> list[Tensor]:
    """Feeds the texts as one batch. Arguments and result: see `fed`."""
    lengths = [len(text.token_ids) for text in texts]
    starts = [length - text.last - 1 for text, length in zip(texts, lengths, strict=True)]  # of the logits
    token_BS = pad_sequence([torch.tensor(text.token_ids) for text in texts], True).to(model.device)
    runner = ModelRunner(model, chunk, rewinds=min(width, MAX_K))  # steps as wide as a run's
    runner.start(len(texts), max(lengths))
    runner.prefill(token_BS, [text.prompt_length - 1 for text in texts] if width else starts)

    blocks = [list[Tensor]() for _ in texts]
    while runner.cached != lengths:
        cached = runner.cached
        ends = [min(begin + (width or length), length) for begin, length in zip(cached, lengths, strict=True)]
        fresh = [end - begin for begin, end in zip(cached, ends, strict=True)]
        logit_BWV = runner.logits(token_BS, ends, fresh)
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if fresh[row] and end > start:
                skipped = max(start - cached[row], 0)
                blocks[row].append(logit_BWV[row, skipped : fresh[row]].cpu())

    logits = [torch.cat(blocks_of_row) for blocks_of_row in blocks]
    return [logit_WV.to(torch.promote_types(logit_WV.dtype, torch.float32)) for logit_WV in logits]
