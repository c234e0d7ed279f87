"""Which steps are compiled, for the plan and for the run alike. No torch.

The configuration, the machine and what has been compiled on it decide, never a clock: compiled and eager
steps round differently in 16 bit, and a text should not depend on how busy the machine was.
"""

from dataclasses import fields
from pathlib import Path

from llama_ssp.config import OWN_CODES, Dtype, ModelConf, RunConf, Splitting, Steps
from llama_ssp.models.kept_files import mark_of
from llama_ssp.models.kernels.kernel_sizes import WIDEST_HEAD, attends_on_cpu
from llama_ssp.models.sharding import architecture, is_planned, kinds_of_heads
from llama_ssp.planner.storage import BYTES
from llama_ssp.planner.weights import parameters
from llama_ssp.planner.workload import Role, StepRule

COMPILED_DTYPES = (Dtype.bf16, Dtype.fp32, Dtype.int8, *OWN_CODES)
ON_GPUS_TOO = (Dtype.fp16, Dtype.nf4)
# What compiled steps save, and what it takes to compile them, or to load them later, on two cores: by these
# it is decided which steps are compiled.
SAVED_S_PER_BYTE = 1 / 20e9
SAVED_S_PER_LAYER = 2e-4
COMPILING_S = 25.0
LOADING_S = 1.5
FEW_TOKENS = 2000  # a longer run, a chat and a batch job go by their settings alone
COMPILES_ONCE = "save less than compiling takes; engine=compiled does it once, for later runs, too"
NAMES = (
    "name",
    "repo",
    "revision",
    "commit",
    "licence",
    "path",
    "package",
    "file",
    "sha256",
    "seed",
    "agreement",
    "dtype",
)


def why_eager(
    engine: Steps, tokens: int, model: ModelConf, dtype: Dtype, splitting: Splitting, on_cpu: bool
) -> str | None:
    """Why the model's steps run eagerly; None if they are compiled. `tokens`: what the task generates."""
    if engine is Steps.eager:
        return "engine=eager"
    if splitting is not Splitting.tensor:
        return f"placement.splitting={splitting.value}"
    if not is_planned(model):
        return f"architecture {architecture(model)} has no row in models/families.py"
    if model.head_block or model.head_shares_cache:
        return "a DFlash head runs eagerly" if model.head_block else "an assistant of a Gemma 4 runs eagerly"
    if dtype not in COMPILED_DTYPES and (on_cpu or dtype not in ON_GPUS_TOO):
        return f"steps in {dtype.value} are not compiled{' on a CPU' if on_cpu else ''}"
    for _, width in kinds_of_heads(model):
        if on_cpu and not attends_on_cpu(width):
            return f"heads of {width} numbers; the CPU's kernel takes even sizes up to {WIDEST_HEAD}"
    if engine is not Steps.auto or not on_cpu:
        return None

    size = BYTES[dtype] * parameters(model)
    saved_s = tokens * (SAVED_S_PER_BYTE * size + SAVED_S_PER_LAYER * model.n_layers)
    if saved_s >= COMPILING_S:
        return None
    if saved_s < LOADING_S or tokens >= FEW_TOKENS:
        return f"{tokens} tokens save less than compiling takes"
    return None if compiled_before(model, dtype).exists() else f"{tokens} tokens {COMPILES_ONCE}"


def compiled_before(model: ModelConf, dtype: Dtype) -> Path:
    """Returns the file that is there if steps of a model of these sizes were compiled on this machine."""
    sizes = {field.name: getattr(model, field.name) for field in fields(model) if field.name not in NAMES}
    return mark_of(f"{sizes} {dtype.value}")


def needs_trial(engine: Steps, on_cpu: bool) -> bool:
    """Whether compiled steps of a model over several ranks have to pass a trial first (pair/trial.py)."""
    return engine is Steps.auto and not on_cpu


def step_rule(engine: Steps, tokens: int, on_cpu: bool) -> StepRule:
    """Returns which steps are compiled, for a plan. `tokens`: what the task generates."""

    def reason(role: Role, splitting: Splitting) -> str | None:
        return why_eager(engine, tokens, role.model, role.dtype, splitting, on_cpu)

    return StepRule(why_eager=reason, needs_trial=needs_trial(engine, on_cpu))


def tokens_generated(run: RunConf) -> int:
    """How many tokens the process generates: as it is told, else by the task; of a chat or a job, a guess."""
    return run.plan.tokens or max(run.task.repeats * run.task.max_new_tokens, run.task.usual_tokens)
