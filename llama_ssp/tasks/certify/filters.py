"""The sampling controls a second time, in plain numpy, for comparison with the code that ships (sampling.py).

One position at a time, in fp64, from the logits and the text before the position. It shares no code with
sampling.py, on purpose: a filter that is wrong there is wrong for the target, for the draft and in regular
sampling alike, so no comparison of these can show it.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from llama_ssp.config import Controls
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.tasks.certify.decisions import Round
from llama_ssp.tasks.certify.verdict import Check, Outcome, judged

Probs = NDArray[np.float64]
SLACK = 1e-4  # what fp32 may do to a probability, relative to it, and to a sum of probabilities
TINY = 1e-30  # below, a probability may vanish in fp32


def check_filters(rounds: Sequence[Round], transform: SamplingTransform) -> Check:
    """Checks that the controls make the recorded target probabilities of the recorded logits."""
    distances = list[float]()
    for seen in rounds:
        if len(seen.logit_WV):
            for at in range(seen.count + 1):
                distances.append(distance(seen.logit_WV[at], seen.target_WV[at], transform, seen, at))
    if not distances:
        return Check("filters", Outcome.blind, "no logits were recorded")

    positions = len(distances)
    wrong = sum(not value <= SLACK for value in distances)  # NaN is wrong, too
    worst = float(np.max(distances))
    figures = {"positions": positions, "positions_wrong": wrong, "largest_total_variation": worst}
    fault = (
        f"the sampling controls give other probabilities than a plain implementation at {wrong} of "
        f"{positions} positions: total variation {worst:.2g} at worst"
    )
    right = (
        f"the sampling controls are those of a plain implementation within {worst:.1g} "
        f"at {positions} positions"
    )
    return judged("filters", [(wrong, fault)], right, figures)


def distance(
    logit_V: torch.Tensor, used_V: torch.Tensor, transform: SamplingTransform, seen: Round, at: int
) -> float:
    """Returns the total variation between used and plain probabilities; 1 where another token is cut."""
    controls = transform.controls
    used = used_V.double().cpu().numpy()
    logits = logit_V[: transform.vocab].double().cpu().numpy()
    logits = np.pad(logits, (0, transform.vocab - len(logits)), constant_values=-np.inf)
    warm = controlled(logits, controls, transform.end_ids, seen.prefix(at), seen.prompt_length)
    is_used = used > 0

    if controls.temperature == 0:
        slack = SLACK * max(1.0, float(np.abs(warm[np.isfinite(warm)]).max()))
        is_best = warm >= warm.max() - slack
        return float(is_used.sum() != 1 or not is_best[is_used].all())

    weight = np.exp((warm - warm.max()) / controls.temperature)
    uncut = weight / weight.sum()
    # A token at an edge may be cut or not: what wider edges cut must be cut, what narrower ones keep be kept.
    may_be_kept = cut(uncut, controls, SLACK, 1 - SLACK)
    must_be_kept = cut(uncut, controls, -SLACK, 1 + SLACK) & (uncut > TINY)
    if (is_used & ~may_be_kept).any() or (must_be_kept & ~is_used).any():
        return 1.0

    plain = np.where(is_used, uncut, 0)
    if plain.sum() > 0:
        return float(np.abs(used - plain / plain.sum()).sum()) / 2
    return 1.0


def controlled(
    logits: Probs, controls: Controls, end_ids: Sequence[int], text: Sequence[int], prompt: int
) -> Probs:
    """Returns logits after bias, bans, minimum length and penalties; `prompt` counts its tokens."""
    warm = logits.copy()
    generated = text[prompt:]
    known = range(len(logits))  # padding of the vocabulary has no logits
    for token, bias in controls.logit_bias.items():
        if token in known:
            warm[token] += bias

    banned = {*controls.bad_tokens}
    if len(generated) < controls.min_new_tokens:
        banned |= {*end_ids}
    warm[[token for token in banned if token in known]] = -np.inf

    for token in {token for token in text if token in known}:
        factor = controls.repetition_penalty
        warm[token] = warm[token] / factor if warm[token] > 0 else warm[token] * factor
    for token, times in Counter(generated).items():
        if token in known:
            warm[token] -= controls.frequency_penalty * times + controls.presence_penalty
    return warm


def cut(probs: Probs, controls: Controls, shift: float, factor: float) -> NDArray[np.bool_]:
    """Returns which tokens top-k, top-p and min-p keep; `shift` adds to top-p, edges are times `factor`."""
    kept = np.ones(len(probs), dtype=bool)
    if 0 < controls.top_k < len(probs):
        kept &= probs >= np.sort(probs)[-controls.top_k] * factor
    if controls.top_p < 1 and kept.any():
        left = np.where(kept, probs, 0) / probs[kept].sum()
        down = np.sort(left)[::-1]
        before = np.cumsum(down) - down
        inside = down[before < controls.top_p + shift]
        kept &= left >= (inside[-1] if len(inside) else down[0]) * factor
    if controls.min_p > 0 and kept.any():
        kept &= probs >= probs.max() * controls.min_p * factor
    return kept
