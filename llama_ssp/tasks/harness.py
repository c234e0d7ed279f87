"""The pair as a model of lm-evaluation-harness (`pip install "llama-ssp[lm-eval]"`).

    llama-ssp-lm-eval run --model llama_ssp --model_args model=/models/70b,draft=/models/1b --tasks gsm8k

This is the harness's own command, which then knows the model. Under torchrun (`-m llama_ssp.tasks.harness`)
every rank runs the harness with the same requests, and gets the leader's answers.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from dataclasses import replace
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from llama_ssp import SamplingConfig, load_pair
from llama_ssp.distributed.comm import broadcast_json
from llama_ssp.errors import RunError, UsageError
from llama_ssp.text.tokenizer import Tokens

LONGEST = 4096  # tokens of a prompt and its answer, unless max_length says otherwise
SCORED_AT_ONCE = 16  # batches between two steps of the progress bar
# Settings of a request that are ours by the same name; others must have the value that changes nothing.
CONTROLS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
WITHOUT_EFFECT = {"num_beams": (1,), "num_return_sequences": (1,), "use_cache": (True, False)}


@register_model("llama_ssp")
class HarnessModel(TemplateLM):  # type: ignore[misc]
    """Answers the harness's requests with a pair; scores are the target's own."""

    def __init__(
        self, model: str, draft: str | None = None, batch_size: int | str = 1, max_length: int | None = None,
        max_gen_toks: int = 256, add_bos_token: bool | None = None, seed: int = 0, device: str | None = None,
        max_batch_size: int | None = None, **overrides: Any,
    ) -> None:  # fmt: skip
        """Takes `overrides` of the command line: `model.dtype=fp32,speculation.k=6`.

        The harness always gives `device` and `max_batch_size`: they change nothing, the placement decides.
        Raises UsageError, ModelError or DistributedError.
        """
        super().__init__()
        if not str(batch_size).isdigit():
            raise UsageError(
                "batch_size is not a number",
                found=repr(batch_size),
                allowed="whole numbers",
                fix="write 8",
            )

        # Scores of models are compared as they are, without the filters that their makers recommend.
        words = ["sampling=plain", *(f"{key}={value}" for key, value in overrides.items())]
        self._pair = load_pair(
            model, draft, batch_size=int(batch_size), max_tokens=max_length or LONGEST, overrides=words
        )
        self._session = self._pair.session
        self._tokens = self._session.tokens
        self._add_bos = add_bos_token
        self._seed = seed
        # The harness reads these.
        self.batch_size = int(batch_size)
        self.max_gen_toks = max_gen_toks
        self.max_length = min(max_length or LONGEST, self._session.run.model.context)

    @property
    def eot_token_id(self) -> int:
        return min(self._tokens.end_ids, default=0)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that is scored from its first token on."""
        return self.eot_token_id if self._tokens.bos_id is None else self._tokens.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Reads names of special tokens as those; adds the tokenizer's own unless the text begins so."""
        begin = self._add_bos if add_special_tokens is None else add_special_tokens
        bare: list[int] = self._tokens.encode(string, special=True, begin=False)
        has_begun = add_special_tokens is None and bare[:1] == [self.prefix_token_id]
        if begin is False or has_begun:
            return bare
        return self._tokens.encode(string, special=True)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns the answers. Requests with the same settings are batched, the longest prompts first."""
        answers: list[str] = [""] * len(requests)
        groups: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[repr(sorted(request.args[1].items()))].append(index)
        with tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm or _is_follower()) as bar:
            for indices in groups.values():
                self._generate(requests, indices, answers, bar)
        result: list[str] = broadcast_json(answers, self._session.ranks)  # the leader's
        return result

    def _generate(self, requests: list[Any], indices: list[int], answers: list[str], bar: Any) -> None:
        """Answers the requests at these indices, which have the same settings."""
        settings = dict(normalize_gen_kwargs(requests[indices[0]].args[1], self.max_gen_toks))
        stops = settings.pop("until")
        new_tokens = settings.pop("max_gen_toks")
        room = self.max_length - new_tokens
        if room < 1:
            raise UsageError(
                "the answer fills the context",
                found=f"max_gen_toks {new_tokens}",
                allowed=f"fewer than {self.max_length}",
                fix="raise max_length",
            )

        # Of a prompt that is too long the end is continued.
        prompts = {index: self.tok_encode(requests[index].args[0])[-room:] for index in indices}
        order = sorted(indices, key=lambda index: -len(prompts[index]))
        stream = self._pair.stream(
            [prompts[index] for index in order],
            max_new_tokens=new_tokens,
            sampling=_sampling(settings, self._session.run.sampling),
            stop=[stop for stop in stops if stop],
            seed=self._seed,
        )
        for rows in stream:
            for row in rows:
                answers[order[row.index]] = row.text
                bar.update(row.finish_reason is not None)

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Returns the log-probability of each continuation, and whether it is the greedy one."""
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        # Of a text that is too long the end is scored, as the harness's own models do.
        texts = [(context + after)[-self.max_length - 1 :] for _, context, after in requests]
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        step = SCORED_AT_ONCE * self.batch_size

        with tqdm(total=len(requests), desc="loglikelihood", disable=disable_tqdm or _is_follower()) as bar:
            for first in range(0, len(order), step):
                part = order[first : first + step]
                scored = self._pair.score([texts[index] for index in part], top=1)
                for index, text in zip(part, scored, strict=False):
                    _, _, continuation = requests[index]
                    count = min(len(continuation), len(texts[index]) - 1)  # the first token has none
                    last = text.logprobs[len(text.logprobs) - count :]
                    total = sum(token.logprob or 0.0 for token in last)
                    is_greedy = all(token.token_id == token.top[0].token_id for token in last)
                    answers[index] = total, is_greedy
                bar.update(len(part))
        return [(total, is_greedy) for total, is_greedy in broadcast_json(answers, self._session.ranks)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of whole texts, in windows of the context where they are longer."""
        owners = list[int]()  # the request of each window
        windows = list[Any]()
        for index, request in enumerate(requests):
            token_ids = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(
                token_ids, self.prefix_token_id, self.max_length, context_len=1
            )
            for window in rolling:
                owners.append(index)
                windows.append((None, *make_disjoint_window(window)))

        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm)
        for index, (total, _) in zip(owners, scores, strict=True):
            totals[index] += total
        return totals

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns the conversation in the target's chat template. Raises DataError without one."""
        return self._templated().rendered(chat_history, goes_on=not add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Returns the template, for the harness's record. Raises UsageError for another than the model's."""
        if isinstance(chat_template, str):
            raise UsageError(
                "the model has one chat template", found=repr(chat_template), fix="write no name"
            )
        return self._templated().template if chat_template else ""

    @property
    def tokenizer_name(self) -> str:
        return str(self._session.spec.target).replace("/", "__")

    def _templated(self) -> Tokens:
        if self._tokens.vocabulary is None:
            raise UsageError("synthetic models have no chat template", fix="leave out --apply_chat_template")
        return self._tokens


def _sampling(kwargs: dict[str, Any], base: SamplingConfig) -> SamplingConfig:
    """Returns the run's controls with those of a request; greedy unless it samples. Raises UsageError."""
    samples = kwargs.pop("do_sample", False)
    controls = {key: kwargs.pop(key) for key in CONTROLS if kwargs.get(key) is not None}
    for key, value in kwargs.items():
        if value is not None and value not in WITHOUT_EFFECT.get(key, ()):
            raise UsageError(
                f"the task asks for {key}",
                where="gen_kwargs",
                found=repr(value),
                allowed=", ".join(("until", "max_gen_toks", "do_sample", *CONTROLS)),
                fix="leave it out",
            )
    if not samples:
        controls["temperature"] = 0.0
    return replace(base, **controls)


def _is_follower() -> bool:
    return os.environ.get("RANK", "0") != "0"


def main() -> None:
    """Runs the harness's command line."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except RunError as error:
        if not _is_follower():
            sys.stderr.write(f"error: {error}\n")
        sys.exit(error.code)


if __name__ == "__main__":
    main()
