"""Checks of the whole configuration, before anything is loaded. No torch."""

from __future__ import annotations

import math

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llama_ssp.config import SIZES, TASKS, ModelConf, PlacementConf, RunConf, SpeculationConfig
from llama_ssp.config.schema import MAX_INT, MAX_K, Drafting, Output, Splitting, Verification, Weights
from llama_ssp.config.translation import translated
from llama_ssp.config.validation.values import between, check_values
from llama_ssp.errors import UsageError


def to_run(cfg: DictConfig) -> RunConf:
    """Hydra's merged config as dataclasses, checked. Raises UsageError."""
    try:
        run = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise translated(error) from error
    if not isinstance(run, RunConf):
        raise UsageError("the configuration does not start from the schema", "conf/run.yaml")
    check(run)
    return run


def check(run: RunConf) -> None:
    """Refuses values of the wrong type or out of range, and settings that contradict each other."""
    check_values(run)
    if TASKS.get(run.task.name) is not type(run.task):  # the name becomes part of a folder's name
        fix = "choose a task with task=NAME, and leave task.name"
        raise UsageError("task.name is not a task", "", repr(run.task.name), ", ".join(TASKS), fix)
    spec, sampling, most = run.speculation, run.sampling, getattr(run.task, "max_new_tokens", math.inf)
    if sampling.temperature != 0:  # a smaller divisor would turn logits into infinities
        between("sampling.temperature", sampling.temperature, 1e-5, 100.0, "0 means argmax")
    between("speculation.ngram_max", spec.ngram_max, spec.ngram_min, 32)
    if spec.siblings:
        _check_tree(spec)
    for role, model in (("model", run.model), ("draft", run.draft)):
        if model is not None:
            _check_model(role, model)
    run.task.check(spec, run.draft is not None)
    if run.output is Output.jsonl and run.task.name != "generate":
        fix = "use output=json; task=batch writes JSONL to its file"
        raise UsageError("output=jsonl is for task=generate", "output", f"task={run.task.name}", fix=fix)
    if most and sampling.min_new_tokens > most:  # of 0 new tokens, a prompt is scored
        what, fix = "sampling.min_new_tokens exceeds task.max_new_tokens", "lower the one or raise the other"
        raise UsageError(what, "", sampling.min_new_tokens, f"0..{most}", fix)
    _check_placement(run.placement)


def _check_tree(spec: SpeculationConfig) -> None:
    key, found = "speculation.siblings", spec.siblings
    if spec.verification is not Verification.block or spec.drafter is not Drafting.model:
        other = f"verification={spec.verification.value}, drafter={spec.drafter.value}"
        fix = f"remove {key}, or use speculation.verification=block speculation.drafter=model"
        raise UsageError("siblings are of a draft model's tokens, verified as a block", key, other, fix=fix)
    between(key, found, 0, MAX_K // max(spec.longest, 1) - 1, f"drafts and siblings are {MAX_K} at most")


def _check_placement(placement: PlacementConf) -> None:
    if placement.splitting is not Splitting.layers and (placement.max_memory or placement.offload_folder):
        what = "placement.max_memory and offload_folder are for splitting by layers"
        found = f"placement.splitting={placement.splitting.value}"
        raise UsageError(what, found=found, fix="use placement=layers")


def _check_model(role: str, model: ModelConf) -> None:
    if model.weights is Weights.synthetic:
        for name in SIZES:
            fix = f"synthetic weights read no files: name a preset, {role}=NAME"
            between(f"{role}.{name}", getattr(model, name), 1, MAX_INT, fix)
    if model.experts:
        between(f"{role}.experts_per_token", model.experts_per_token, 1, model.experts)
        between(f"{role}.expert_ffn", model.expert_ffn, 1, MAX_INT)
        between(f"{role}.dense_layers", model.dense_layers, 0, model.n_layers)
    if model.n_kv_heads and model.n_heads % model.n_kv_heads:
        what = f"{role}.n_heads is not a multiple of {role}.n_kv_heads"
        found, allowed = f"{model.n_heads} and {model.n_kv_heads}", "whole groups of query heads per KV head"
        raise UsageError(what, "", found, allowed, "take the numbers from the model's config.json")


def check_context(run: RunConf) -> None:
    """Checks of the model's context and vocabulary, after its files have been read."""
    model, vocab, sampling = run.model, run.model.vocab, run.sampling
    for key, tokens in (("logit_bias", sampling.logit_bias), ("bad_tokens", sampling.bad_tokens)):
        for token in tokens:
            between(f"sampling.{key} token", token, 0, vocab - 1, f"model {model.name} has {vocab} tokens")
    if len(set(sampling.bad_tokens)) >= vocab:
        what, found = "sampling.bad_tokens forbids every token", f"all {vocab}"
        raise UsageError(what, found=found, fix="leave at least one")
    of = f"model {model.name} has a context of {model.context} tokens"
    if model.context < 2:
        what = f"{of}, which leaves no room for a prompt and a new token"
        raise UsageError(what, "model.context", allowed="2 or more", fix="choose another model")
    prompt, new = getattr(run.task, "prompt_tokens", 1), getattr(run.task, "max_new_tokens", 1) or 1
    between("task.prompt_tokens", prompt, 1, model.context - 1, of)
    between("task.max_new_tokens", new, 1, model.context - prompt, f"{of}, prompt included")
