"""task=measure replay=TEXTS: what drafters would be accepted at every K, from texts alone.

Each model reads the texts once, by itself; nothing is speculated. speculative/replay.py has the mathematics.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import inf, isnan, sqrt
from statistics import mean
from typing import Any

import numpy as np

from llama_ssp.config import ClusterConf, MeasureConf, OnBadRow, Verification, Weights
from llama_ssp.distributed.comm import Ranks
from llama_ssp.errors import DataError, ModelError, UsageError
from llama_ssp.models.checkpoint import complete
from llama_ssp.pair.replay import DraftLaws, TokenText, draft_laws, target_laws
from llama_ssp.pair.requests import NOT_NUMBERS
from llama_ssp.pair.token_prompts import prompt_of, usable
from llama_ssp.placing.pairs import PairSpec
from llama_ssp.placing.ranking import planned_drafts
from llama_ssp.placing.request import PairFiles
from llama_ssp.planner.workload import TARGET
from llama_ssp.report.accepted import of_replay
from llama_ssp.report.console import Console
from llama_ssp.report.run_folder import RunFolder
from llama_ssp.report.task_tables import replayed
from llama_ssp.speculative.draft_length import AcceptanceCurve
from llama_ssp.speculative.replay import (
    ExpectedRounds,
    counts_of,
    expected_rounds,
    kept_chances,
    ratios,
    windows,
)
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.text_laws import TokenLaw
from llama_ssp.tasks.common import Task
from llama_ssp.tasks.inputs import RunInputs
from llama_ssp.text.prompts import CORRECT_PROMPTS
from llama_ssp.text.tokenizer import Tokens, read_tokens
from llama_ssp.text.written_texts import FULL, WrittenText, WrittenTexts

log = logging.getLogger(__name__)

# Texts are noticed as those of another model or other settings where their log-probability is so many
# standard errors from what is expected, or where so large a share of their tokens has probability 0.
MOST_ERRORS = 5.0
MOST_IMPOSSIBLE = 0.01
HERE = "this machine"


class ReplayTask(Task[MeasureConf]):
    """Reads the texts with the target, if their log-probabilities are not given, and with each drafter."""

    is_planned = False

    def __init__(self, inputs: RunInputs, console: Console, folder: RunFolder, ranks: Ranks) -> None:
        super().__init__(inputs, console, folder, ranks)
        self._k = max(self._task.ks)
        self._texts: list[tuple[WrittenText, TokenText]] = []
        self._about: dict[str, Any] = {"drawn_from_target": None, "seconds_of_target": 0.0}
        self._ranking: list[dict[str, Any]] = []

    def run(self) -> str:
        assert self._inputs.texts is not None
        written = self._inputs.texts
        pairs = self._inputs.pairs
        for spec in pairs:
            if spec.drafter is None:
                raise UsageError(
                    "nothing drafts",
                    where="draft, task.drafts",
                    found=spec.name,
                    fix="name what drafts: drafts=[NAME,...], with ngram for n-grams",
                )

        first = pairs[0]
        tokens = tokens_here(first)
        self._texts = self._usable(written, first, tokens)
        if written.target not in (None, first.target):
            log.warning(
                "the texts are %s's by their run's folder, and the target is %s", written.target, first.target
            )
        target = self._of_target(first, tokens)
        try:
            for spec in pairs:
                self._replay(spec, tokens, target)
        finally:
            if self.has_output():
                self._print(replayed(self.figures()))
        return "done"

    def figures(self) -> dict[str, Any]:
        return {
            "replay": {
                "texts": len(self._texts),
                "tokens": sum(len(text.token_ids) for _, text in self._texts),
                "sampling": asdict(self._inputs.pairs[0].run.sampling.controls),
                **self._about,
            },
            "ks": self._task.ks,
            "rule": self._run.speculation.verification.value,
            "acceptance": self._results,
            "ranking": sorted(self._ranking, key=lambda row: (row["cluster"], row["ms_per_token"])),
            "rows_skipped": len(self._skipped),
        }

    def _usable(
        self, written: WrittenTexts, spec: PairSpec, tokens: Tokens
    ) -> list[tuple[WrittenText, TokenText]]:
        """Returns the texts as token ids; bad ones end the run or are skipped, as configured."""
        texts = []
        for text in written.texts:
            try:
                texts.append((text, token_text(text, spec, tokens)))
            except DataError as problem:
                if self._task.on_bad_row is OnBadRow.fail:
                    raise
                log.warning("skipped: %s", problem)
                self._skipped.append(str(problem))
        if not texts:
            raise DataError(
                "no usable text is left", found=f"{len(self._skipped)} bad ones", fix=CORRECT_PROMPTS
            )
        return texts

    def _of_target(self, spec: PairSpec, tokens: Tokens) -> list[Any]:
        """Returns the target's log-probabilities of each text's tokens, (T,); notes whose the texts are."""
        given = [np.array(text.logprobs) for text, _ in self._texts if text.logprobs is not None]
        if len(given) == len(self._texts):
            log.info(
                "the target is not read: the texts give its log-probabilities, and nothing else to check"
            )
            return given

        began = time.perf_counter()
        spec = with_weights(spec)
        laws = target_laws(spec, tokens, [text for _, text in self._texts], self._ranks)
        require_laws([[law.logprob for law in of_text] for of_text in laws], spec.target)
        self._about = {**origin(laws), "seconds_of_target": time.perf_counter() - began}
        warn_of_others(self._about)
        return [np.array([law.logprob for law in of_text]) for of_text in laws]

    def _replay(self, spec: PairSpec, tokens: Tokens, target: Sequence[Any]) -> None:
        """Adds what comes of one drafter."""
        name = spec.drafter
        assert name is not None
        began = time.perf_counter()
        if spec.run.draft is not None and spec.run.draft.is_head:
            spec = with_weights(spec)
        texts = [text for _, text in self._texts]
        laws = draft_laws(spec, tokens, texts, self._k, self._ranks)
        require_laws([of_text.logprob_TK.ravel().tolist() for of_text in laws], name)
        read_s = time.perf_counter() - began

        entries = []
        for rule in Verification:
            entry = of_replay(name, rule.value, self._rounds(tokens, target, laws, rule))
            entry |= {"texts": len(texts), "tokens": sum(len(text.token_ids) for text in texts)}
            entry |= {"sampling": asdict(spec.run.sampling.controls), "seconds": read_s}
            entry |= {"draft_top": spec.run.speculation.draft_top}
            entries.append(entry)
        self._results += entries
        self._rank(
            spec, next(one for one in entries if one["rule"] == spec.run.speculation.verification.value)
        )

    def _rounds(
        self, tokens: Tokens, target: Sequence[Any], laws: Sequence[DraftLaws], rule: Verification
    ) -> dict[int, list[ExpectedRounds]]:
        """Returns the expected rounds of each text, for K = 1, 2, ..."""
        result: dict[int, list[ExpectedRounds]] = {k: [] for k in range(1, self._k + 1)}
        for (written, text), target_T, of_text in zip(self._texts, target, laws, strict=True):
            ratio_TK = ratios(windows(target_T, self._k), of_text.logprob_TK)
            chance_TK = kept_chances(ratio_TK, rule)
            room = room_of(written, text, tokens)
            for k, texts in result.items():
                texts.append(expected_rounds(chance_TK[:, :k], counts_of(k, of_text.reach_T, room)))
        return result

    def _rank(self, spec: PairSpec, entry: dict[str, Any]) -> None:
        """Plans the pair with what was measured, on this machine and on the cluster that the run names."""
        curve = AcceptanceCurve((1.0, *(point["tokens_per_round"] for point in entry["curve"])), HERE)
        prompt = round(mean(len(text.prompt.token_ids) for _, text in self._texts))
        new = max(1, round(mean(len(text.token_ids) for _, text in self._texts)))
        files = PairFiles(spec.run, spec.target_path, spec.draft_path)
        clusters = [replace(ClusterConf(), name=HERE)]
        if spec.run.cluster.gpu is not None:
            clusters.append(spec.run.cluster)
        for cluster in clusters:
            planned = planned_drafts(files, curve, cluster, prompt, new)
            if planned is not None:
                self._ranking.append({"drafter": spec.drafter, **asdict(planned)})


def tokens_here(spec: PairSpec) -> Tokens:
    """Returns the target's tokenizer. Raises ModelError if it is not on this machine."""
    if spec.target_path is None and spec.run.model.weights is not Weights.synthetic:
        raise ModelError(
            "the target's tokenizer is not on this machine",
            where=f"model {spec.target}",
            fix="give a folder with its tokenizer (model=FOLDER), or fetch the model with download=true",
        )
    return read_tokens(spec.target_path, spec.run.model.vocab)


def with_weights(spec: PairSpec) -> PairSpec:
    """Returns the pair with its target's files, which are fetched if that is allowed. Raises ModelError."""
    model, path = complete(spec.run.model, TARGET, spec.run.download)
    return replace(spec, run=replace(spec.run, model=model), target_path=path)


def token_text(text: WrittenText, spec: PairSpec, tokens: Tokens) -> TokenText:
    """Returns a text as token ids. Raises DataError for one that the target cannot have written."""
    run = spec.run
    if text.prompt_ids is None:
        prompt = prompt_of(text.as_prompt, tokens, run, text.messages)
    else:
        prompt = usable(text.as_prompt, list(text.prompt_ids), tokens, run)

    vocab = min(run.model.vocab, tokens.size)
    for place, token in enumerate(text.token_ids):
        if token >= vocab:
            raise DataError(
                "a token is not one of the target's",
                where=f"{text.where}, token_ids[{place}]",
                found=token,
                allowed=f"ids from 0, below {vocab}",
                fix="name the model that wrote the texts",
            )
    length = len(prompt.token_ids) + len(text.token_ids)
    if length > run.model.context:
        raise DataError(
            "the text is longer than the target's context",
            where=text.where,
            found=f"{length} tokens",
            allowed=f"at most {run.model.context}",
            fix="name the model that wrote the texts",
        )
    return TokenText(Prompt(text.id, prompt.token_ids), text.token_ids)


def room_of(written: WrittenText, text: TokenText, tokens: Tokens) -> int | None:
    """Returns how many tokens the text could get; None if it ended before, and nothing says its limit.

    A text that does not say why it ended, and not by an end token, got all that it could.
    """
    if written.finish is None and written.room is None:
        return None if text.token_ids[-1] in tokens.end_ids else len(text.token_ids)
    return len(text.token_ids) if written.finish in FULL else written.room


def require_laws(logprobs: Sequence[Sequence[float]], name: str) -> None:
    """Raises ModelError where a model gave logits that are not numbers."""
    damaged = sum(any(map(isnan, of_text)) for of_text in logprobs)
    if damaged:
        raise ModelError(
            NOT_NUMBERS,
            where=name,
            found=f"{damaged} of {len(logprobs)} texts",
            fix="try dtype=bf16 or fp32 of the model, or fetch it again",
        )


def origin(laws: Sequence[Sequence[TokenLaw]]) -> dict[str, Any]:
    """Returns whether the texts were drawn from these laws, by their log-probability against its mean.

    If they were, the differences are those of a martingale, and their sum over the root of the summed
    variances is a standard normal number.
    """
    drawn = [law for of_text in laws for law in of_text if law.logprob > -inf]
    tokens = sum(map(len, laws))
    impossible = tokens - len(drawn)
    difference = sum(law.logprob - law.mean for law in drawn)
    deviation = sqrt(sum(law.variance for law in drawn))
    errors = difference / deviation if deviation else 0.0
    is_theirs = abs(errors) <= MOST_ERRORS and impossible <= MOST_IMPOSSIBLE * tokens
    return {
        "drawn_from_target": is_theirs,
        "mean_logprob": sum(law.logprob for law in drawn) / len(drawn) if drawn else None,
        "mean_logprob_expected": sum(law.mean for law in drawn) / len(drawn) if drawn else None,
        "standard_errors": errors,
        "impossible_tokens": impossible,
    }


def warn_of_others(about: dict[str, Any]) -> None:
    """Warns of texts that were not drawn from the target under these settings."""
    if about["drawn_from_target"]:
        return
    known = [
        "not known" if about[name] is None else f"{about[name]:.3f}"
        for name in ("mean_logprob", "mean_logprob_expected")
    ]
    log.warning(
        "the texts are not this target's under these settings, and neither are the figures: their mean "
        "log-probability is %s where %s is expected, %.1f standard errors away; %d tokens have probability 0",
        known[0],
        known[1],
        about["standard_errors"],
        about["impossible_tokens"],
    )
