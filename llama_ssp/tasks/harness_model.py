"""The pair as a model of lm-evaluation-harness; harness.py has the command."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from llama_ssp import SamplingConfig, load_pair
from llama_ssp.config import USUAL_ROWS, Dtype
from llama_ssp.config.compose import composed, pair_words
from llama_ssp.config.environment import rank_environment
from llama_ssp.distributed.comm import broadcast_json
from llama_ssp.errors import DataError, UsageError
from llama_ssp.models.checkpoint import complete, dtype_on_disk
from llama_ssp.pair.given import OWN
from llama_ssp.pair.results import ScoredText
from llama_ssp.placing.pairs import pair_specs
from llama_ssp.placing.prediction import predict
from llama_ssp.placing.request import Known
from llama_ssp.text.messages import Message
from llama_ssp.text.tokenizer import Tokens

# The harness's log: it shows what is said there, in its own form.
log = logging.getLogger("lm_eval.models.llama_ssp")

USUAL_LENGTH = 4096  # tokens of the texts in the memory check, unless max_length says otherwise
AUTO_ROWS = 64  # the most that batch_size=auto takes, as in the harness's own class
SCORED_AT_ONCE = 16  # batches between two steps of the progress bar
CUT = "\N{REPLACEMENT CHARACTER}"  # what decoders write for a part of a character
SEEDS = 2**31  # torch's seed is larger if nobody has set it
# Settings of a request that are ours by the same name; others must have the value that changes nothing.
CONTROLS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
WITHOUT_EFFECT = {"num_beams": (1,), "num_return_sequences": (1,), "use_cache": (True, False)}

# What `dtype` may be, as torch names it; our own names are taken, too.
DTYPES = {
    "float64": Dtype.fp64,
    "double": Dtype.fp64,
    "float32": Dtype.fp32,
    "float": Dtype.fp32,
    "bfloat16": Dtype.bf16,
    "float16": Dtype.fp16,
    "half": Dtype.fp16,
    **{dtype.value: dtype for dtype in Dtype},
}
# Arguments of the harness's class `hf` that are keys of ours.
RENAMED = {"revision": "model.revision", "peft": "model.adapter"}
USUAL_REVISION = "main"  # the class's default; here the copy that is at hand, or the preset's commit
SPLIT = "leave it out: torchrun --nproc-per-node N -m llama_ssp.tasks.harness splits the model"
# Its other arguments: the values that change nothing here (None: any), and what to write for another.
OF_HF: dict[str, tuple[tuple[Any, ...] | None, str]] = {
    "backend": (("default", "causal"), "leave it out: models are causal"),
    "subfolder": (("", None), "write pretrained=FOLDER/SUBFOLDER"),
    "trust_remote_code": ((False, None), "leave it out: code of a model folder is never run"),
    "use_fast_tokenizer": (None, ""),
    "truncation": (None, ""),
    "logits_cache": (None, ""),
    "softmax_dtype": ((None, "float32"), "leave it out: it is float32"),
    "mixed_precision_dtype": ((None,), "write dtype="),
    "parallelize": ((False, None), SPLIT),
    "device_map": ((None, "auto"), SPLIT),
    "max_memory_per_gpu": ((None,), SPLIT),
    "max_cpu_memory": ((None,), SPLIT),
    "offload_folder": ((None, "./offload"), SPLIT),
    "tp_plan": ((None,), SPLIT),
    "delta": ((None,), "merge the delta into the weights first"),
    "autogptq": (None, ""),
    "gptqmodel": (None, ""),
    "gguf_file": ((None,), "write pretrained=FILE.gguf"),
    "load_in_8bit": ((False, None), "write dtype=int8"),
    "load_in_4bit": ((False, None), "write dtype=nf4"),
    "attn_implementation": (None, ""),
}

Continuation = tuple[int, ...]
Score = tuple[float, bool]  # the log-probability of a continuation, and whether it is the greedy one


@dataclass
class SharedContext:
    """Continuations of one context that share what is read of it, each with the requests that ask for it."""

    context: tuple[int, ...]
    continuations: dict[Continuation, list[int]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Returns how long its longest text is."""
        return len(self.context) + max(map(len, self.continuations))

    def __len__(self) -> int:
        """Returns how many requests it answers."""
        return sum(map(len, self.continuations.values()))


@register_model("llama_ssp")
class HarnessModel(TemplateLM):  # type: ignore[misc]
    """Answers the harness's requests with a pair; scores are the target's own."""

    def __init__(
        self, model: str | None = None, draft: str | None = None, *, pretrained: str | None = None,
        dtype: Any = None, tokenizer: str | None = None, batch_size: int | str = 1,
        max_batch_size: int | None = None, max_length: int | None = None, max_gen_toks: int = 256,
        add_bos_token: bool | None = None, prefix_token_id: int | None = None, seed: int | None = None,
        device: str | None = None, enable_thinking: bool | None = None,
        think_end_token: str | int | None = None, chat_template_args: dict[str, Any] | None = None,
        **overrides: Any,
    ) -> None:  # fmt: skip
        """Takes what the class `hf` takes, and `overrides` of the command line: `speculation.k=6`.

        `model` is another name of `pretrained`. The harness always gives `device`, which changes nothing: the
        placement decides. Raises UsageError, ModelError or DistributedError.
        """
        super().__init__()
        target = _only("pretrained", pretrained, model)
        if tokenizer not in (None, target) and not Path(tokenizer).is_dir():
            raise UsageError(
                "the tokenizer is no folder",
                where="tokenizer",
                found=tokenizer,
                allowed="a folder with tokenizer.json and tokenizer_config.json",
                fix="leave it out for the model's own, or name such a folder",
            )
        if enable_thinking and think_end_token is None:
            raise UsageError(
                "enable_thinking=True needs to know where an answer begins",
                where="think_end_token",
                fix="write think_end_token=</think>, or what ends this model's thoughts",
            )

        if not isinstance(chat_template_args, dict | None):
            raise UsageError(
                "chat_template_args is not a map",
                found=repr(chat_template_args),
                fix='write --model_args {"pretrained": "...", "chat_template_args": {...}}',
            )
        self._prefix_id = _whole("prefix_token_id", prefix_token_id)
        self._seed = _whole("seed", seed)

        words = ["sampling=plain", *_words(dtype, overrides)]
        run = composed(pair_words(target, draft, words))
        conf, path = complete(run.model, "model", run.download)
        # A type on disk is kept, as by the class `hf`; codes, and bf16 where the device lacks it, are not.
        own = dtype_on_disk(path) if path and conf.dtype is Dtype.auto else None
        if own in (Dtype.fp64, Dtype.fp32, Dtype.fp16) and not conf.code_bits:
            words.append(f"model.dtype={own}")
        length = min(_whole("max_length", max_length) or conf.context, conf.context)
        checked = length if max_length else min(length, USUAL_LENGTH)
        rows = _rows(batch_size, max_batch_size, [target, draft, words], checked)

        self._pair = load_pair(
            target,
            draft,
            tokenizer=OWN if tokenizer in (None, target) else Path(tokenizer),
            batch_size=rows,
            max_tokens=checked,
            overrides=words,
        )
        self._session = self._pair.session
        self._tokens = self._session.tokens
        self._add_bos = add_bos_token
        self._end_of_thought = _end_of_thought(think_end_token)
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._arguments = {**(chat_template_args or {}), **thinking}  # of the chat template
        self._thinks = bool(enable_thinking)
        self._warned_of_system = False
        # The harness reads these.
        self.tokenizer = self._tokens.library
        self.batch_size = rows
        self.max_gen_toks = max_gen_toks
        self.max_length = length

    @property
    def eot_token_id(self) -> int:
        eos = self._tokens.eos_id
        return min(self._tokens.end_ids, default=0) if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that is scored from its first token on."""
        if self._prefix_id is not None:
            return self._prefix_id
        return self.eot_token_id if self._tokens.bos_id is None else self._tokens.bos_id

    def get_model_info(self) -> dict[str, Any]:
        """Returns what the harness writes of the model into its results."""
        run = self._session.run
        return {
            "model_dtype": self._session.placements.target.dtype.value,
            "model_revision": run.model.revision or "",
            "draft": run.drafter_name,
        }

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
        with _bar("generate_until", len(requests), disable_tqdm) as bar:
            for indices in groups.values():
                self._generate(requests, indices, answers, bar)
        result: list[str] = broadcast_json(answers, self._session.ranks)  # the leader's
        return result

    def _generate(self, requests: list[Any], indices: list[int], answers: list[str], bar: Any) -> None:
        """Answers the requests at these indices, which have the same settings."""
        settings = dict(normalize_gen_kwargs(requests[indices[0]].args[1], self.max_gen_toks))
        stops = [stop for stop in settings.pop("until") if stop]
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
        whole = {index: self.tok_encode(requests[index].args[0]) for index in indices}
        _warn_of_cuts("prompts", map(len, whole.values()), room)
        prompts = {index: token_ids[-room:] for index, token_ids in whole.items()}
        order = sorted(indices, key=lambda index: -len(prompts[index]))
        stream = self._pair.stream(
            [prompts[index] for index in order],
            max_new_tokens=new_tokens,
            sampling=_sampling(settings, self._session.run.sampling),
            stop=stops,
            seed=torch.initial_seed() % SEEDS if self._seed is None else self._seed,  # --seed sets torch's
        )

        written: dict[int, list[int]] = defaultdict(list)
        for rows in stream:
            for row in rows:
                index = order[row.index]
                written[index] += row.token_ids
                if row.finish_reason is None:
                    continue
                answers[index] = self._answer(row.text, written.pop(index), stops)
                self.cache_hook.add_partial("generate_until", requests[index].args, answers[index])
                bar.update(1)

    def _answer(self, text: str, token_ids: list[int], stops: list[str]) -> str:
        """Returns the text without what the model thought before it, where think_end_token says its end.

        A character that the limit has cut stays as U+FFFD, as by the class `hf`.
        """
        if self._tokens.decode(token_ids) == f"{text}{CUT}":
            text += CUT
        end = self._end_of_thought
        if isinstance(end, int) and end in token_ids:
            after = token_ids[len(token_ids) - token_ids[::-1].index(end) :]
            text = self._tokens.decode(after).lstrip()
        answer: str = postprocess_generated_text(text, stops, end if isinstance(end, str) else None)
        return answer

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Score]:
        """Returns the score of each continuation. Raises UsageError with enable_thinking=True."""
        if self._thinks:
            tasks = sorted({request.task_name for request in requests if request.task_name})
            raise UsageError(
                "a score of given texts has no thought in it",
                where=", ".join(tasks),
                found="enable_thinking=True",
                fix="leave it out, or take tasks that generate",
            )
        result: list[Score] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return result

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[Score]:
        """Returns the score of each continuation, and keeps it in the harness's cache."""

        def keep(index: int, score: Score) -> None:
            texts, _, _ = requests[index]
            if texts is not None:  # of windows of a longer text it is None
                self.cache_hook.add_partial("loglikelihood", texts, score)

        return self._scores([(before, after) for _, before, after in requests], keep, disable_tqdm)

    def _scores(
        self, pairs: Sequence[tuple[list[int], list[int]]], keep: Any, disable_tqdm: bool
    ) -> list[Score]:
        """Returns the score of each context and continuation; calls `keep` with its number and the score."""
        answers: list[Score] = [(0.0, True)] * len(pairs)  # of an empty continuation
        groups = self._groups(pairs)
        _warn_of_cuts("texts", (len(before) + len(after) - 1 for before, after in pairs), self.max_length)

        step = SCORED_AT_ONCE * self.batch_size
        with _bar("loglikelihood", sum(map(len, groups)), disable_tqdm) as bar:
            for first in range(0, len(groups), step):
                part = groups[first : first + step]
                scored = self._pair.score_continuations(
                    [group.context for group in part], [list(group.continuations) for group in part], top=1
                )
                scores_here = [list(map(_score, texts)) for texts in scored]
                of_leader = broadcast_json(scores_here, self._session.ranks)
                for group, scores in zip(part, of_leader, strict=True):
                    for indices, (total, is_greedy) in zip(group.continuations.values(), scores, strict=True):
                        for index in indices:
                            answers[index] = total, is_greedy
                            keep(index, answers[index])
                            bar.update(1)
        return answers

    def _groups(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[SharedContext]:
        """Returns groups of continuations that are scored together, the longest first.

        Continuations of one context share it if it is longer than they are. Those that differ in their last
        token alone always do, as nothing but that token is looked up.
        """
        limit = self.max_length + 1  # the last token is not fed
        groups: dict[Any, SharedContext] = {}
        for index, (before, after) in enumerate(pairs):
            text = (*before, *after)[-limit:]  # of a text that is too long the end is scored
            count = min(len(after), len(text) - 1)  # the first token has no score
            if not count:
                continue
            context = text[:-count]
            continuation = text[-count:]
            key = context, None if len(context) > count else continuation[:-1]
            group = groups.setdefault(key, SharedContext(context))
            group.continuations.setdefault(continuation, []).append(index)
        return sorted(groups.values(), key=lambda group: -group.tokens)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of whole texts, in windows of the context where they are longer."""
        owners = list[int]()  # the request of each window
        windows = list[tuple[list[int], list[int]]]()
        for index, request in enumerate(requests):
            token_ids = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(
                token_ids, self.prefix_token_id, self.max_length, context_len=1
            )
            for window in rolling:
                owners.append(index)
                windows.append(make_disjoint_window(window))

        totals = [0.0] * len(requests)
        left = [owners.count(index) for index in range(len(requests))]

        def keep(number: int, score: Score) -> None:
            owner = owners[number]
            totals[owner] += score[0]
            left[owner] -= 1
            if not left[owner]:
                self.cache_hook.add_partial("loglikelihood_rolling", requests[owner].args, totals[owner])

        self._scores(windows, keep, disable_tqdm)
        return totals

    def apply_chat_template(self, chat_history: list[Message], add_generation_prompt: bool = True) -> str:
        """Returns the conversation in the target's chat template.

        Where the template does not take a system message, it is left out, and a warning says so, as by the
        class `hf`. Raises DataError where the template refuses the rest, too, or there is none.
        """
        tokens = self._templated()
        goes_on = not add_generation_prompt
        others = [message for message in chat_history if message["role"] != "system"]
        try:
            return tokens.rendered(chat_history, goes_on, self._arguments)
        except DataError as error:
            if not others or len(others) == len(chat_history):
                raise _refused(error) from None
        if not self._warned_of_system:
            _say(logging.WARNING, "the chat template takes no system message: it is left out everywhere")
        self._warned_of_system = True
        try:
            return tokens.rendered(others, goes_on, self._arguments)
        except DataError as error:
            raise _refused(error) from None

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Returns the template, for the harness's record. Raises UsageError for another than the model's."""
        if isinstance(chat_template, str) and chat_template != "default":
            raise UsageError(
                "the model has one chat template", found=repr(chat_template), fix="write no name"
            )
        return self._templated().template if chat_template else ""

    @property
    def tokenizer_name(self) -> str:
        return str(self._session.spec.target).replace("/", "__")

    def _templated(self) -> Tokens:
        if not self._tokens.has_template:
            raise UsageError("the model has no chat template", fix="leave out --apply_chat_template")
        return self._tokens


def _only(name: str, value: str | None, other: str | None) -> str:
    """Returns the model that is named in one of two ways. Raises UsageError for none, and for both."""
    given = [item for item in (value, other) if item]
    if not given:
        raise UsageError(
            f"{name} is missing", where="--model_args", fix=f"write --model_args {name}=/models/70b"
        )
    if len(given) > 1:
        raise UsageError(
            f"{name} and model are both given", found=", ".join(map(str, given)), fix="leave out one of them"
        )
    return given[0]


def _words(dtype: Any, overrides: dict[str, Any]) -> list[str]:
    """Returns overrides of the command line. Raises UsageError for arguments without a meaning here."""
    words = list[str]()
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise UsageError("dtype is unknown", found=name, allowed=", ".join(DTYPES), fix="choose one")
        if "model.dtype" in overrides:
            raise UsageError("dtype and model.dtype are both given", fix="leave out one of them")
        words.append(f"model.dtype={DTYPES[name]}")
    for key, value in overrides.items():
        if key not in OF_HF:
            is_usual = key in RENAMED and value in (None, USUAL_REVISION)
            words += [] if is_usual else [f"{RENAMED.get(key, key)}={value}"]
            continue
        without_effect, fix = OF_HF[key]
        if without_effect is not None and value not in without_effect:
            raise UsageError(
                f"{key} is an argument of the class hf alone", where="--model_args", found=value, fix=fix
            )
    return words


def _rows(batch_size: int | str, most: int | None, pair: Sequence[Any], tokens: int) -> int:
    """Returns the rows: those given, or for `auto` as many as the plan finds to pay, `most` or fewer.

    `pair` is the target, the draft and the overrides. Raises UsageError for another size.
    """
    size, _, _ = str(batch_size).partition(":")  # auto:N asks the class hf to look again N times
    if size.isdigit() and int(size):
        return int(size)
    if size != "auto":
        raise UsageError(
            "batch_size is not a number", found=repr(batch_size), allowed="auto, whole numbers", fix="write 8"
        )
    target, draft, words = pair
    run = composed(["task.max_new_tokens=1", *pair_words(target, draft, words)])
    spec = pair_specs(run, [], rank_environment().world)[0]
    prediction = predict(spec.run, spec.placement, Known(rows=1, slots=tokens))
    most = _whole("max_batch_size", most) or AUTO_ROWS
    rows = prediction.rows_that_pay(most) if prediction else min(USUAL_ROWS, most)
    _say(logging.INFO, f"batch_size=auto: {rows} texts at a time, by the plan")
    return rows


def _whole(name: str, value: Any) -> int | None:
    """Returns the whole number, or None where there is none. Raises UsageError for anything else."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise UsageError(f"{name} is not a whole number", found=repr(value), fix="correct it")


def _end_of_thought(token: str | int | None) -> str | int | None:
    """Returns the text, or the token's id, which may be written as a text."""
    return int(token) if isinstance(token, str) and token.isdigit() else token


def _score(text: ScoredText) -> Score:
    """Returns the log-probability of a continuation, and whether each token is the likeliest."""
    is_greedy = all(token.token_id == token.top[0].token_id for token in text.logprobs)
    return sum(token.logprob or 0.0 for token in text.logprobs), is_greedy


def _warn_of_cuts(what: str, lengths: Iterable[int], room: int) -> None:
    """Says how many texts are longer than there is room: they lose their beginnings."""
    every = list(lengths)
    cut = [length for length in every if length > room]
    if cut:
        line = f"{len(cut)} of {len(every)} {what} are longer than {room} tokens, the longest has {max(cut)}"
        _say(logging.WARNING, f"{line}: they lose their beginnings (max_length, max_gen_toks)")


def _refused(error: DataError) -> DataError:
    """Returns the template's refusal with what to do here; the last part of the line names our keys."""
    said, _, _ = str(error).rpartition("; ")
    return DataError(said, fix="leave out --apply_chat_template")


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


def _say(level: int, line: str) -> None:
    """Logs a line, on the leader alone."""
    if rank_environment().is_leader:
        log.log(level, "%s", line)


def _bar(name: str, total: int, is_off: bool) -> Any:
    """Returns the progress bar; the leader alone shows one."""
    return tqdm(total=total, desc=name, disable=is_off or not rank_environment().is_leader)
