"""The distribution that the target samples from, once more: plain Python, one position, one prefix.

The proofs over whole texts compare the loop with it (scenarios.py), and tests/test_sampling.py compares
sampling.py with it at random controls, within 1e-12. It shares no code with what ships.
"""

import math

from llama_ssp.config import Controls


def reference_law(
    logits: list[float], prefix: list[int], prompt: int, sampling: Controls, ends: frozenset[int]
) -> list[float]:
    """The distribution after `prefix`, whose first `prompt` tokens were given."""
    generated = prefix[prompt:]
    scores = list(logits)
    for token in range(len(scores)):
        scores[token] += sampling.logit_bias.get(token, 0.0)
        if token in sampling.bad_tokens or (token in ends and len(generated) < sampling.min_new_tokens):
            scores[token] = -math.inf
        if token in prefix:
            penalty = sampling.repetition_penalty
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        count = generated.count(token)
        scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
    if sampling.temperature == 0:
        best = scores.index(max(scores))
        return [1.0 if token == best else 0.0 for token in range(len(scores))]
    top = max(scores)
    probs = _normalised([math.exp((score - top) / sampling.temperature) for score in scores])
    if 0 < sampling.top_k < len(probs):
        probs = _at_least(probs, sorted(probs, reverse=True)[sampling.top_k - 1])
    if sampling.top_p < 1:
        mass, last = 0.0, 1.0
        for share in sorted(probs, reverse=True):
            if mass >= sampling.top_p:
                break
            mass, last = mass + share, share
        probs = _at_least(probs, last)
    if sampling.min_p > 0:
        probs = _at_least(probs, sampling.min_p * max(probs))
    return probs


def _at_least(probs: list[float], threshold: float) -> list[float]:
    return _normalised([share if share >= threshold else 0.0 for share in probs])


def _normalised(weights: list[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]
