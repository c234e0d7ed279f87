"""What a run is asked, and what it has made of it: requests as token ids, and their replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llama_ssp.config import SamplingConfig
from llama_ssp.errors import ModelError
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import Counts, RowStep
from llama_ssp.text.detokenizer import Stop, TextSoFar
from llama_ssp.text.logprobs import ScoredToken, are_damaged

NOT_NUMBERS = "a model gave logits that are not numbers (NaN or infinite)"


@dataclass(frozen=True, kw_only=True)
class TokenRequest:
    """A request as token ids. `seed` replaces the run's."""

    index: int
    prompt: Prompt
    sampling: SamplingConfig
    max_new_tokens: int
    stop: tuple[Stop, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    echo: bool = False

    @property
    def longest(self) -> int:
        return len(self.prompt.token_ids) + self.max_new_tokens

    @staticmethod
    def of_plain(plain: dict[str, Any]) -> TokenRequest:
        """Returns the request whose `asdict` went through JSON."""
        sampling = replace(SamplingConfig(), **plain["sampling"])
        if sampling.logit_bias:  # JSON's keys are texts
            sampling.logit_bias = {int(token): bias for token, bias in sampling.logit_bias.items()}
        return TokenRequest(
            index=plain["index"],
            prompt=Prompt(plain["prompt"]["id"], tuple(plain["prompt"]["token_ids"])),
            sampling=sampling,
            max_new_tokens=plain["max_new_tokens"],
            stop=tuple(plain["stop"]),
            seed=plain["seed"],
            logprobs=plain["logprobs"],
            echo=plain["echo"],
        )


def requests_of(
    prompts: Sequence[Prompt],
    sampling: SamplingConfig,
    max_new_tokens: int,
    stop: tuple[Stop, ...] = (),
    logprobs: int | None = None,
    echo: bool = False,
) -> list[TokenRequest]:
    """Returns requests to continue these prompts in one way; their indices count from 0."""
    return [
        TokenRequest(
            index=index,
            prompt=prompt,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            stop=stop,
            logprobs=logprobs,
            echo=echo,
        )
        for index, prompt in enumerate(prompts)
    ]


@dataclass(kw_only=True)
class Reply:
    """The text of a request so far. `echoed` are the prompt's log-probabilities."""

    request: TokenRequest
    written: TextSoFar | None  # None: it is wanted as token ids alone
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # once it has ended
    logprobs: list[ScoredToken] = field(default_factory=list)
    echoed: list[ScoredToken] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)  # of this text alone

    @property
    def text(self) -> str:
        return "" if self.written is None else self.written.text

    @property
    def index(self) -> int:
        return self.request.index

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt.token_ids)

    @property
    def outcome(self) -> tuple[str, int, str | None]:
        """The text as `require_numbers` takes it."""
        return self.request.prompt.id, self.prompt_tokens + len(self.token_ids), self.finish_reason

    def kept(self, tokens: list[int], last: bool) -> int | None:
        """Adds the next tokens to the text; returns how many are kept if a stop string ends in them."""
        return None if self.written is None else self.written.kept(tokens, last)

    def printable(self, has_ended: bool) -> str:
        """Returns what may be printed of the text and has not been returned before."""
        return "" if self.written is None else self.written.printable(has_ended)

    def take(self, step: RowStep, logprobs: list[ScoredToken]) -> None:
        """Adds what a round gave; `logprobs` are those of all tokens so far."""
        self.token_ids += step.tokens
        self.logprobs = logprobs
        self.counts.add(step)
        if step.finish is not None:
            self.end(step.finish)

    def end(self, reason: str) -> None:
        """Notes why the text ended; the reason is "error" also where the echoed prompt was damaged."""
        self.finish_reason = "error" if are_damaged(self.echoed) else reason


def require_numbers(*outcomes: tuple[str, int, str | None]) -> None:
    """Raises ModelError if one of these texts ended on logits that are not numbers.

    An outcome is the prompt's id, how many tokens the text has, and why it ended (`Reply.outcome`).
    """
    stopped = [(name, length) for name, length, reason in outcomes if reason == "error"]
    if stopped:
        name, position = stopped[0]
        raise ModelError(
            NOT_NUMBERS,
            where=f"prompt {name!r}, position {position}",
            found=f"{len(stopped)} of {len(outcomes)} prompts stopped there",
            fix="try model.dtype=bf16 or fp32, or fetch the model again",
        )
