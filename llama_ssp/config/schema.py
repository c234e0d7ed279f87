"""One dataclass for each Hydra group except the task, and the choices of their fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

MAX_K = 64
MAX_SEED = 2**63 - 1
MAX_INT = 2**31 - 1


def number(
    default: Any, low: float, high: float, fix: str = "", above: bool = False, least_key: int = 0
) -> Any:
    """A field with numbers in [low, high], with `above` in (low, high]; validation/values.py checks it.

    Of a list every entry, of a map every value, with keys from `least_key` on. `default` is a value or makes
    one; `fix` is for the message.
    """
    made: dict[str, Any] = {"default_factory": default} if callable(default) else {"default": default}
    return field(**made, metadata={"range": (low, high, fix, above, least_key)})


def share(default: float | None, fix: str = "") -> Any:
    return number(default, 0.0, 1.0, fix)


# How weights are held; `auto` takes what the device computes fastest without loss of range.
# `packed` keeps the codes of a quantised checkpoint, and computes with them in bf16; `int4` has groups of 32.
Dtype = StrEnum("Dtype", ["auto", "fp64", "fp32", "bf16", "fp16", "int8", "int4", "nf4", "packed"])
# Where weights come from: a checkpoint, or a seed (the real shape, no files needed).
Weights = StrEnum("Weights", ["checkpoint", "synthetic"])
# What proposes tokens.
Drafting = StrEnum("Drafting", ["model", "ngram", "none"])
# The exact rule that accepts tokens; `block` accepts at least as many as `token`, the reference. With
# `coupled` a seed gives the same text, in fp32, for any draft, any K, any placement, and without a draft; in
# 16 bit and less, near ties may be decided otherwise.
Verification = StrEnum("Verification", ["block", "token", "coupled"])
# What a draft on ranks of its own does while the target verifies; in fp32 the text is the same.
Overlap = StrEnum("Overlap", ["auto", "ahead", "off"])
# Which distribution log-probabilities are of: the target's own, unfiltered at temperature 1; or the one that
# tokens are sampled from, after temperature, filters and penalties.
LogprobsOf = StrEnum("LogprobsOf", ["target", "sampled"])
# What the target does when a draft on ranks of its own is lost.
OnDraftLoss = StrEnum("OnDraftLoss", ["continue", "stop"])
# How a draft of another tokenizer is paired with the target; `off` refuses it (text/translation.py).
Bridging = StrEnum("Bridging", ["auto", "intersection", "text", "off"])
# How one model is spread over devices: `tensor` gives each rank a slice of every layer; `layers` gives each
# device of one process whole layers (accelerate); `deepspeed` lets DeepSpeed slice a model that every rank
# has loaded whole.
Splitting = StrEnum("Splitting", ["tensor", "layers", "deepspeed"])
# The draft's ranks: the target's (leader, replicated, sharded), or its own.
DraftSeat = StrEnum("DraftSeat", ["auto", "leader", "replicated", "sharded", "own"])
# Whether steps are compiled; `auto` compiles where that pays. The distribution is the same. In 16 bit eager
# and compiled steps round differently.
Steps = StrEnum("Steps", ["auto", "eager", "compiled"])
# `json` ends with one document; `jsonl` has a line for each text as soon as it ends, and no document.
Output = StrEnum("Output", ["text", "json", "jsonl"])
OnBadRow = StrEnum("OnBadRow", ["fail", "skip"])
# What assigns machines to jobs.
Scheduler = StrEnum("Scheduler", ["none", "slurm"])

USUAL_COST_RATIO = 0.1  # a draft step over a target step, where it is neither given nor measured


@dataclass
class ModelConf:
    """One model: its files, its number format, and its shape, so that planning needs no file.

    A size of 0 (preset `local`) is read from the checkpoint's config.json. Of a model with experts,
    `dense_layers` is how many layers have none, but an MLP of width `ffn`. Of a quantised checkpoint:
    bits of a code, inputs that share a scale (0: all of a row), and bytes of a scale with its zero; where
    matrices differ, `code_mix` has the sizes of each (models/formats/gguf_model.py). Of a trained head that
    drafts: how many numbers of the target's hidden states it reads, and how many tokens it can draft.
    """

    name: str = MISSING
    repo: str | None = None
    revision: str | None = None
    path: str | None = None
    weights: Weights = Weights.checkpoint
    dtype: Dtype = Dtype.auto
    seed: int = number(0, 0, MAX_SEED)
    agreement: float = share(0.8)
    scan: bool = False
    family: str = ""
    n_layers: int = number(0, 0, MAX_INT)
    n_heads: int = number(0, 0, MAX_INT)
    n_kv_heads: int = number(0, 0, MAX_INT)
    head_dim: int = number(0, 0, MAX_INT)
    dim: int = number(0, 0, MAX_INT)
    ffn: int = number(0, 0, MAX_INT)
    experts: int = number(0, 0, MAX_INT)
    experts_per_token: int = number(0, 0, MAX_INT)
    expert_ffn: int = number(0, 0, MAX_INT)
    dense_layers: int = number(0, 0, MAX_INT)
    code_bits: int = number(0, 0, 8)
    code_group: int = number(0, 0, MAX_INT)
    code_bytes: int = number(0, 0, 64)
    code_mix: str = ""
    head_inputs: int = number(0, 0, MAX_INT)
    head_vocab: int = number(0, 0, MAX_INT)
    vocab: int = number(0, 0, MAX_INT)
    context: int = number(0, 0, MAX_INT)
    tied: bool = False
    sliding_window: int | None = number(None, 1, MAX_INT, "null is none")

    @property
    def is_head(self) -> bool:
        """Whether it is a trained head, which reads the target's hidden states."""
        return self.head_inputs > 0


@dataclass
class PlacementConf:
    """The ranks and devices of the models (distributed/placement.py resolves the ranks).

    A device `auto` is the rank's own accelerator, else the CPU. `draft_degree` null is all of the target's
    ranks for replicated and sharded, one rank for own; `target_ranks` and `draft_ranks` list them one by one.
    `max_memory` (device index, cpu: "20GiB") and `offload_folder` are for splitting=layers. All ranks end
    when one does not answer for `timeout_s`. A draft on ranks of its own is lost when its process ends, or
    does not answer for `draft_timeout_s`; `on_draft_loss` says whether the target then continues alone.
    """

    splitting: Splitting = Splitting.tensor
    draft: DraftSeat = DraftSeat.auto
    draft_degree: int | None = number(None, 1, 4096)
    target_ranks: list[int] | None = number(None, 0, 4095)
    draft_ranks: list[int] | None = number(None, 0, 4095)
    target_device: str = "auto"
    draft_device: str = "auto"
    max_memory: dict[Any, str] = field(default_factory=dict)
    offload_folder: str | None = None
    timeout_s: float = number(120.0, 1.0, 86400.0, "seconds; raise it for slow machines")
    on_draft_loss: OnDraftLoss = OnDraftLoss["continue"]
    draft_timeout_s: float = number(30.0, 0.1, 86400.0, "seconds until it is lost")


@dataclass
class TimesConf:
    """The constants of predicted times; null is as calibrated on published runs (planner/speed.py).

    Of peak, a GEMV attains `bandwidth_share` and a long GEMM `flops_share`. A pass costs `step_us`, and
    `layer_us` a layer; a round `round_us`, and `check_us` with drafts. A distribution costs `law_ns` for each
    token of the vocabulary, and `accept_ns` where drafts are verified. A message is the leader's broadcast.
    Maps go from a number of ranks (all_reduce_us), or of tokens in one pass (rows_cost, relative to one), to
    a figure; values between are interpolated.
    """

    source: str = ""
    bandwidth_share: float | None = number(None, 0.0, 2.0, above=True)
    flops_share: float | None = number(None, 0.0, 2.0, above=True)
    rows_cost: dict[int, float] = number(dict, 0.0, 1e9, least_key=1)
    layer_us: float | None = number(None, 0.0, 1e9)
    step_us: float | None = number(None, 0.0, 1e9)
    round_us: float | None = number(None, 0.0, 1e9)
    check_us: float | None = number(None, 0.0, 1e9)
    law_ns: float | None = number(None, 0.0, 1e9)
    accept_ns: float | None = number(None, 0.0, 1e9)
    all_reduce_us: dict[int, float] = number(dict, 0.0, 1e9, least_key=1)
    message_us: float | None = number(None, 0.0, 1e9)


@dataclass
class SlurmConf:
    """Slurm's options for task=batch; null is the cluster's own default.

    `time` is "H:MM:SS" or "D-HH:MM:SS"; an element of the array stops `signal_s` before its end, and goes on
    in a new one. `mem` is a node's, `cpus_per_rank` a rank's; `gpu_type` is a name in the cluster's own gres.
    `setup` are shell lines that run first on the node ("module load cuda"), `options` further options of
    sbatch ("--exclusive"), `torchrun` of torchrun; `python` null is the interpreter of this command.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str | None = None
    mem: str | None = None
    cpus_per_rank: int | None = number(None, 1, 4096)
    gpu_type: str | None = None
    job_name: str | None = None
    signal_s: int = number(120, 1, 65535, "seconds to stop before the time limit")
    setup: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    torchrun: list[str] = field(default_factory=list)
    python: str | None = None


@dataclass
class ClusterConf:
    """The machines: `nodes` with `gpus` GPUs each (gpu=cpu: processes that share one).

    task=batch may have `groups` of them at once, each with models of its own: here, or through the
    `scheduler`. Null is looked up: on this machine for `local`, or in the preset with the same GPU. `gib` is
    a GPU's memory, less `reserve` of it; `gb_s` and `tflops` (16 bit, dense) are its data sheet's,
    `link_gb_s` is one direction's. Libraries take `*_mib` on every GPU.
    """

    name: str = "local"
    gpu: str | None = None
    nodes: int = number(1, 1, 1024)
    gpus: int | None = number(None, 1, 1024, "null is what there is")
    groups: int = number(1, 1, 100_000)
    scheduler: Scheduler = Scheduler.none
    slurm: SlurmConf = field(default_factory=SlurmConf)
    gib: float | None = number(None, 0.0, 2.0**20, "null looks it up", above=True)
    reserve: float = number(0.1, 0.0, 0.9)
    bf16: bool | None = None
    gb_s: float | None = number(None, 0.0, 2.0**20, "null looks it up", above=True)
    tflops: float | None = number(None, 0.0, 2.0**20, "null looks it up", above=True)
    link: str = ""
    link_gb_s: float | None = number(None, 0.0, 2.0**20, "null looks it up", above=True)
    context_mib: float | None = number(None, 0.0, 2.0**20)
    cublas_mib: float | None = number(None, 0.0, 2.0**20)
    nccl_mib: float | None = number(None, 0.0, 2.0**20)
    graph_mib: float | None = number(None, 0.0, 2.0**20)
    times: TimesConf = field(default_factory=TimesConf)


@dataclass
class PlanningConf:
    """The plan of a run; `enforce` refuses one that does not fit, before loading."""

    enforce: bool = True
    acceptance: float = share(0.8)


@dataclass
class SamplingConfig:
    """The sampling distribution. Every control acts on the target's and on the draft's distribution."""

    temperature: float = 1.0
    top_k: int = number(0, 0, MAX_INT, "0 turns it off")
    top_p: float = number(1.0, 0.0, 1.0, "1 turns it off", above=True)
    min_p: float = share(0.0, "0 turns it off")
    repetition_penalty: float = number(1.0, 0.01, 100.0, "1 turns it off")
    frequency_penalty: float = number(0.0, -100.0, 100.0)
    presence_penalty: float = number(0.0, -100.0, 100.0)
    logit_bias: dict[int, float] = number(dict, -1e4, 1e4, "to forbid a token use sampling.bad_tokens")
    bad_tokens: list[int] = number(list, 0, MAX_INT)
    min_new_tokens: int = number(0, 0, MAX_INT)


@dataclass
class SpeculationConfig:
    """How tokens are drafted and verified.

    `adaptive` chooses K for each row, up to `k_max`, by its acceptance and the cost of steps: measured when
    the run begins, so that another run may choose otherwise; or given by `cost_ratio`, the time of a draft
    step over a target step, which makes the run repeatable (without a clock; in 16 bit and less only with the
    same batch and placement). `overlap` is for a draft on ranks of its own.
    """

    k: int = number(4, 0, MAX_K, "0 is plain decoding")
    drafter: Drafting = Drafting.model
    verification: Verification = Verification.block
    adaptive: bool = False
    k_max: int = number(16, 1, MAX_K)
    cost_ratio: float | None = number(None, 0.0, 10.0, "null measures it")
    ngram_min: int = number(1, 1, 32)
    ngram_max: int = number(4, 1, 32)
    bridge: Bridging = Bridging.auto
    overlap: Overlap = Overlap.auto

    @property
    def may_draft(self) -> bool:
        """Whether K may be more than 0."""
        return self.k > 0 or self.adaptive
