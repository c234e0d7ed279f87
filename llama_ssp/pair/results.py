"""What the Python API returns: completions, the rows of a stream, and texts with their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from llama_ssp.speculative.stats import ratio
from llama_ssp.text.logprobs import TokenLogprob
from llama_ssp.text.messages import Message


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One prompt's continuation.

    `finish_reason` is eos, stop, length or context. `message` is the text as an answer of the model, for the
    next turn of a conversation. `seed` gives the same text again, with the same settings and prompt number.

    `drafted` and `accepted` count draft tokens up to the end of the text, the lists by place in the round.
    `rounds` is how many of the target's forwards the text took part in, and `seconds` how long these took,
    together with the other texts of the batch. `logprobs` has an entry for each of `token_ids`; None unless
    asked for.
    """

    prompt: str
    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    drafted: int
    accepted: int
    message: Message
    seed: int
    rounds: int
    seconds: float = field(compare=False)
    drafted_by_position: list[int]
    accepted_by_position: list[int]
    logprobs: list[TokenLogprob] | None = None

    @property
    def acceptance_by_position(self) -> list[float]:
        """The share of drafts that were accepted, by place in the round."""
        kept = [*self.accepted_by_position, *[0] * len(self.drafted_by_position)]
        return [accepted / drafted for accepted, drafted in zip(kept, self.drafted_by_position, strict=False)]

    @property
    def tokens_per_round(self) -> float | None:
        """The tokens of the text for each of the target's forwards; None for an empty text."""
        return ratio(len(self.token_ids), self.rounds)


@dataclass(frozen=True)
class ScoredText:
    """A given text's log-probabilities, one entry a token; the first token has None."""

    text: str
    logprobs: list[TokenLogprob]

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.logprobs]

    @property
    def total(self) -> float:
        """The log-probability of the text, given its first token."""
        return sum(token.logprob for token in self.logprobs if token.logprob is not None)


@dataclass(frozen=True, kw_only=True)
class RoundDetails:
    """What one round did in one row, before the text was cut at its end.

    Of each draft there are the probability that it was drawn with (`draft_probs`, 1 for one that was looked
    up), that which the target gives it under the sampling controls (`target_probs`), and sum(min(target,
    draft)) at its place (`overlap`). The first `accepted` drafts stand, and `token` follows them.
    `logit_WV` are the target's logits after 0, 1, ... drafts, on the CPU, if they were asked for.
    """

    drafts: list[int]
    draft_probs: list[float]
    target_probs: list[float]
    overlap: list[float]
    accepted: int
    token: int
    logit_WV: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class StreamedRow:
    """What one prompt got in one round. `text` is all that it has so far."""

    index: int
    text: str
    token_ids: list[int]
    drafted: int
    accepted: int
    finish_reason: str | None
    logprobs: list[TokenLogprob] | None = None
    details: RoundDetails | None = None
