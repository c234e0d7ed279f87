"""Which models run with compiled steps (engine=auto|eager|compiled), why others do not, and what draws then.

What is decided rests on the configuration and the machine alone, never on a clock: compiled and eager steps
round differently in 16 bit, and a text should not hang on how busy the machine was.
"""

from __future__ import annotations

import logging

import torch

from llama_ssp.config import Dtype, ModelConf, RunConf, Splitting, Steps
from llama_ssp.coupled import source
from llama_ssp.draws import CounterDraws
from llama_ssp.kernels.build import compiler
from llama_ssp.kernels.deciding import by_kernel
from llama_ssp.load.causal import CausalModel
from llama_ssp.load.compiled import CompiledModel
from llama_ssp.plan import parameters
from llama_ssp.verify import Rule

log = logging.getLogger(__name__)

COMPILED_DTYPES = (Dtype.bf16, Dtype.fp32, Dtype.int8)
# What compiled steps save, and what compiling costs, on two cores (bench/fast.py): for `auto` alone.
SAVED_S_PER_BYTE, SAVED_S_PER_LAYER = 1 / 20e9, 2e-4
COMPILING_S, COMPILING_S_PER_LAYER = 20.0, 2.5


def compiles(
    run: RunConf, role: str, model: ModelConf, device: torch.device, dtype: Dtype, splitting: Splitting,
    degree: int,
) -> bool:  # fmt: skip
    """Whether this role's steps are compiled. Where that was asked for and cannot be, the log says why."""
    if run.engine is Steps.eager:
        return False
    reason = impossible(device, dtype, splitting, degree)
    if reason is None and run.engine is Steps.auto:
        reason = unproven(device) or unprofitable(run, model, dtype)
        if reason is None:
            log.info("engine: %s %s has compiled steps", role, model.name)
    elif reason is not None:
        level = logging.DEBUG if run.engine is Steps.auto else logging.WARNING
        log.log(level, "engine: %s %s runs eagerly: %s", role, model.name, reason)
    return reason is None


def quickens(run: RunConf, dtype: Dtype, splitting: Splitting) -> bool:
    """Whether 8-bit layers have our kernel, also where steps cannot be compiled: over ranks."""
    return run.engine is Steps.compiled and dtype is Dtype.int8 and splitting is Splitting.tensor


def impossible(device: torch.device, dtype: Dtype, splitting: Splitting, degree: int) -> str | None:
    """What keeps steps from being compiled; None where nothing is known to."""
    if degree > 1 or splitting is not Splitting.tensor:
        return "the model is spread over ranks or devices"
    if dtype not in COMPILED_DTYPES:
        return f"steps are compiled in bf16, fp32 and int8, not in {dtype.value}"
    if device.type == "cpu" and compiler() is None:
        return "there is no C++ compiler (CXX, g++ or clang++)"
    return None


def unproven(device: torch.device) -> str | None:
    """What `auto` leaves alone until it has been seen to work there."""
    return None if device.type == "cpu" else f"graphs on {device.type} have to be asked for: engine=compiled"


def unprofitable(run: RunConf, model: ModelConf, dtype: Dtype) -> str | None:
    """Whether a run of so many tokens would spend more on compiling than it saves."""
    width = {Dtype.bf16: 2, Dtype.int8: 1}.get(dtype, 4)
    saved = SAVED_S_PER_BYTE * width * parameters(model) + SAVED_S_PER_LAYER * model.n_layers
    cost = COMPILING_S + COMPILING_S_PER_LAYER * model.n_layers
    tokens = tokens_at_once(run)
    if tokens * saved < cost:
        return f"{tokens} tokens save less than compiling takes"
    return None


def draws_for(target: CausalModel | None, rule: Rule, seed: int) -> CounterDraws:
    """What this rank draws from: beside steps that are compiled for a CPU, by a kernel as well."""
    draws = source(rule, seed)
    beside = isinstance(target, CompiledModel) and target.device.type == "cpu"
    return by_kernel(draws) if beside else draws


def tokens_at_once(run: RunConf) -> int:
    """How many steps a run has at least, by its settings."""
    repeats: int = getattr(run.task, "repeats", 1)
    new: int = getattr(run.task, "max_new_tokens", 0)
    return repeats * new
