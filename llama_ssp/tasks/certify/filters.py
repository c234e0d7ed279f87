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
    distances = [
        distance(seen.logit_WV[at], seen.target_WV[at], transform, seen, at)
        for seen in rounds
        if len(seen.logit_WV)
        for at in range(seen.count + 1)
    ]
    if not distances:
        return Check("filters", Outcome.blind, "no logits were recorded")
    wrong, worst = sum(not value <= SLACK for value in distances), float(np.max(distances))
    figures = {"positions": len(distances), "positions_wrong": wrong, "largest_total_variation": worst}
    fault = f"the sampling controls give other probabilities than a plain implementation at {wrong} of "
    fault += f"{len(distances)} positions: total variation {worst:.2g} at worst"
    right = f"the sampling controls are those of a plain implementation within {worst:.1g}"
    return judged("filters", [(wrong, fault)], f"{right} at {len(distances)} positions", figures)


def distance(
    logit_V: torch.Tensor, used_V: torch.Tensor, transform: SamplingTransform, seen: Round, at: int
) -> float:
    """Returns the total variation between used and plain probabilities; 1 where another token is cut."""
    text = seen.prefix(at)
    logits, used = logit_V[: transform.vocab].double().cpu().numpy(), used_V.double().cpu().numpy()
    logits = np.pad(logits, (0, transform.vocab - len(logits)), constant_values=-np.inf)
    warm = controlled(logits, transform.controls, transform.end_ids, text, seen.prompt_length)
    kept = used > 0
    if transform.controls.temperature == 0:
        slack = SLACK * max(1.0, float(np.abs(warm[np.isfinite(warm)]).max()))
        best = warm >= warm.max() - slack
        return float(kept.sum() != 1 or not best[kept].all())
    weight = np.exp((warm - warm.max()) / transform.controls.temperature)
    uncut = weight / weight.sum()
    if (kept & ~cut(uncut, transform.controls, SLACK, 1 - SLACK)).any():
        return 1.0
    if (cut(uncut, transform.controls, -SLACK, 1 + SLACK) & ~kept & (uncut > TINY)).any():
        return 1.0
    same = np.where(kept, uncut, 0)
    return float(np.abs(used - same / same.sum()).sum()) / 2 if same.sum() > 0 else 1.0


def controlled(
    logits: Probs, controls: Controls, end_ids: Sequence[int], text: Sequence[int], prompt: int
) -> Probs:
    """Returns logits after bias, bans, minimum length and penalties; `prompt` counts its tokens."""
    warm, generated, known = logits.copy(), text[prompt:], range(len(logits))
    for token, bias in controls.logit_bias.items():
        if token in known:
            warm[token] += bias
    banned = {*controls.bad_tokens, *(end_ids if len(generated) < controls.min_new_tokens else ())}
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
