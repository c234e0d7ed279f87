"""What a value may be: ranges and types of the configuration, checked once at the door. No torch."""

from __future__ import annotations

import math

from omegaconf import DictConfig, OmegaConf

from llama_ssp.config import TASKS, BatchConf, EvalConf, PlanConf, PromptedConf, RunConf, few_resolvers
from llama_ssp.config.validation.cluster import check_cluster
from llama_ssp.config.validation.groups import (
    MAX_SEED,
    check_model,
    check_placement,
    check_sampling,
    check_speculation,
)
from llama_ssp.config.validation.tasks import check_task
from llama_ssp.config.validation.values import between, check_types
from llama_ssp.errors import UsageError


def to_run(cfg: DictConfig) -> RunConf:
    """The one conversion from Hydra's merged config to dataclasses, checked."""
    with few_resolvers():
        run = OmegaConf.to_object(cfg)
    if not isinstance(run, RunConf):
        raise UsageError("the configuration does not start from the schema", where="conf/run.yaml")
    check(run)
    return run


def check(run: RunConf) -> None:
    """Refuses values outside their range, naming key, value, range and remedy."""
    check_types(run, "")
    if TASKS.get(run.task.name) is not type(run.task):  # the name becomes part of a folder's name
        raise UsageError(
            "task.name is no task", found=repr(run.task.name), allowed=", ".join(TASKS),
            fix="choose a task with task=NAME, and leave task.name",
        )  # fmt: skip
    check_sampling(run.sampling)
    check_speculation(run)
    for role, model in (("model", run.model), ("draft", run.draft)):
        if model is not None:
            check_model(role, model)
    check_task(run)
    if run.sampling.min_new_tokens > getattr(run.task, "max_new_tokens", math.inf):
        raise UsageError(
            "sampling.min_new_tokens exceeds task.max_new_tokens",
            found=run.sampling.min_new_tokens,
            allowed=f"0..{getattr(run.task, 'max_new_tokens', '')}",
            fix="lower the one or raise the other",
        )
    if run.seed is not None:
        between("seed", run.seed, 0, MAX_SEED, "choose another seed, or leave it out to draw one")
    between("plan.acceptance", run.plan.acceptance, 0.0, 1.0)
    check_cluster(run.cluster)
    check_placement(run.placement)


def check_context(run: RunConf) -> None:
    """What depends on the model's context and vocabulary, once its files have been read."""
    vocab = run.model.vocab
    for key, tokens in (("logit_bias", run.sampling.logit_bias), ("bad_tokens", run.sampling.bad_tokens)):
        for token in tokens:
            fix = f"model {run.model.name} has {vocab} tokens"
            between(f"sampling.{key} token", token, 0, vocab - 1, fix)
    if len(set(run.sampling.bad_tokens)) >= vocab:
        raise UsageError(
            "sampling.bad_tokens forbids every token", found=f"all {vocab}", fix="leave at least one"
        )
    of = f"model {run.model.name} has a context of {run.model.context} tokens"
    if run.model.context < 2:
        raise UsageError(
            f"{of}, which leaves no room for a prompt and a new token", where="model.context",
            allowed="2 or more", fix="choose another model",
        )  # fmt: skip
    prompt = run.task.prompt_tokens if isinstance(run.task, PlanConf) else 1
    between("task.prompt_tokens", prompt, 1, run.model.context - 1, of)
    if isinstance(run.task, PromptedConf | BatchConf | EvalConf | PlanConf):
        most = run.model.context - prompt
        between("task.max_new_tokens", run.task.max_new_tokens, 1, most, f"{of}, prompt included")
