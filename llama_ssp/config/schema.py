"""One dataclass per Hydra group but the task, and the words that their values may be."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING


class Dtype(Enum):
    """How weights are held; `auto` takes what the device computes fastest without loss of range."""

    auto = "auto"
    fp64 = "fp64"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    int8 = "int8"
    nf4 = "nf4"


USUAL_COST_RATIO = 0.1  # a draft step over a target step, where it is neither given nor measured


class Weights(Enum):
    """Where weights come from: a checkpoint, or a seed (the real shape, no files needed)."""

    checkpoint = "checkpoint"
    synthetic = "synthetic"


class Drafting(Enum):
    """Who proposes tokens."""

    model = "model"
    ngram = "ngram"
    none = "none"


class Verification(Enum):
    """Which exact rule accepts them; `block` accepts at least as many, `token` is the reference.

    With `coupled` a seed gives the same text, in fp32, for any draft, any K, any placement, and without a
    draft; in 16 bit and less tokens that nearly tie may trade places.
    """

    block = "block"
    token = "token"
    coupled = "coupled"


class Overlap(Enum):
    """What a draft on ranks of its own does while the target verifies; in fp32 the text is the same."""

    auto = "auto"
    ahead = "ahead"
    off = "off"


# What the target does when a draft on ranks of its own is gone or silent. (Python keeps one word for itself.)
OnDraftLoss = Enum("OnDraftLoss", {"continue": "continue", "stop": "stop"})


class Bridging(Enum):
    """How a draft of another tokenizer is paired with the target; `off` refuses it (text/translation.py)."""

    auto = "auto"
    intersection = "intersection"
    text = "text"
    off = "off"


class Splitting(Enum):
    """How one model is spread over devices.

    `tensor` gives each rank a slice of every layer; `layers` gives each device of one process whole
    layers (accelerate); `deepspeed` lets DeepSpeed slice a model that every rank has loaded whole.
    """

    tensor = "tensor"
    layers = "layers"
    deepspeed = "deepspeed"


class DraftSeat(Enum):
    """Where the draft sits: beside the target (leader, replicated, sharded), or on ranks of its own."""

    auto = "auto"
    leader = "leader"
    replicated = "replicated"
    sharded = "sharded"
    own = "own"


class Steps(Enum):
    """How models take their steps: as their modules are, or compiled; `auto` compiles where that pays.

    The distribution is the same. In 16 bit the two round differently, as any two kernels do.
    """

    auto = "auto"
    eager = "eager"
    compiled = "compiled"


class Output(Enum):
    text = "text"
    json = "json"


class OnBadRow(Enum):
    fail = "fail"
    skip = "skip"


class Scheduler(Enum):
    """Who hands out machines: nobody, or Slurm."""

    none = "none"
    slurm = "slurm"


@dataclass
class ModelConf:
    """One model: where it is, how it is held, and its true shape (so that planning needs no file).

    A size of 0 (preset `local`) is read from the checkpoint's config.json.
    """

    name: str = MISSING
    repo: str | None = None
    revision: str | None = None
    path: str | None = None
    download: bool = False
    weights: Weights = Weights.checkpoint
    dtype: Dtype = Dtype.auto
    seed: int = 0
    agreement: float = 0.8
    scan: bool = False
    family: str = ""
    n_layers: int = 0
    n_heads: int = 0
    n_kv_heads: int = 0
    head_dim: int = 0
    dim: int = 0
    ffn: int = 0
    vocab: int = 0
    context: int = 0
    tied: bool = False
    sliding_window: int | None = None


@dataclass
class PlacementConf:
    """Where the models sit (distributed/placement.py makes a table of ranks of it).

    A device `auto` is the rank's own accelerator, else the CPU. `draft_degree` null is all of the target's
    ranks for replicated and sharded, one rank for own; lists of ranks say it one by one. `max_memory`
    (device index, cpu: "20GiB") and `offload_folder` are for splitting=layers. `timeout_s` is how long a rank
    may be late, silent or waited for before all end. A draft on ranks of its own is lost when it is gone, or
    has not answered for `draft_timeout_s`; `on_draft_loss` says whether the target then goes on alone.
    """

    splitting: Splitting = Splitting.tensor
    draft: DraftSeat = DraftSeat.auto
    draft_degree: int | None = None
    target_ranks: list[int] | None = None
    draft_ranks: list[int] | None = None
    target_device: str = "auto"
    draft_device: str = "auto"
    max_memory: dict[Any, str] = field(default_factory=dict)
    offload_folder: str | None = None
    timeout_s: float = 120.0
    on_draft_loss: OnDraftLoss = OnDraftLoss["continue"]
    draft_timeout_s: float = 30.0


@dataclass
class TimesConf:
    """What times are made of, beside bytes; null is as calibrated on published runs (planner/speed.py).

    Of peak, a GEMV attains `bandwidth_share` and a long GEMM `flops_share`. A pass costs `step_us`, and
    `layer_us` a layer; a round `round_us`, and `check_us` if it has drafts. A distribution costs `law_ns` an
    entry of the vocabulary, and `accept_ns` if drafts are checked against it. A message is what the leader
    tells the other ranks. Maps go from a number of ranks (all_reduce_us), or of tokens in one pass
    (rows_cost, over the cost of one), to a figure; what lies between two of them is interpolated.
    """

    source: str = ""
    bandwidth_share: float | None = None
    flops_share: float | None = None
    rows_cost: dict[int, float] = field(default_factory=dict)
    layer_us: float | None = None
    step_us: float | None = None
    round_us: float | None = None
    check_us: float | None = None
    law_ns: float | None = None
    accept_ns: float | None = None
    all_reduce_us: dict[int, float] = field(default_factory=dict)
    message_us: float | None = None


@dataclass
class SlurmConf:
    """What task=batch asks of Slurm; what is null is left to the cluster's own defaults.

    `time` is "H:MM:SS" or "D-HH:MM:SS"; an element of the array stops `signal_s` before it ends, and goes on
    in a new one. `mem` is a node's, `cpus_per_rank` a rank's; `gpu_type` is a name in the cluster's own gres.
    `setup` holds shell lines that run on the node first ("module load cuda"), `options` more of sbatch's
    options ("--exclusive"), `torchrun` more of torchrun's; `python` null is the interpreter of this command.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str | None = None
    mem: str | None = None
    cpus_per_rank: int | None = None
    gpu_type: str | None = None
    job_name: str | None = None
    signal_s: int = 120
    setup: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    torchrun: list[str] = field(default_factory=list)
    python: str | None = None


@dataclass
class ClusterConf:
    """What there is to run on: `nodes` machines with `gpus` GPUs each (gpu=cpu: processes that share one).

    task=batch may have `groups` of them at once, each with models of its own: here, or through the
    `scheduler`. What is null is looked up: `local` asks the machine at hand, and figures of a GPU that a
    preset has are that preset's. `gib` is what one GPU offers, less `reserve` of it; `gb_s` and `tflops`
    (16 bit, dense) are its data sheet's, `link_gb_s` is one direction's. `*_mib` are taken by libraries on
    every GPU.
    """

    name: str = "local"
    gpu: str | None = None
    nodes: int = 1
    gpus: int | None = None
    groups: int = 1
    scheduler: Scheduler = Scheduler.none
    slurm: SlurmConf = field(default_factory=SlurmConf)
    gib: float | None = None
    reserve: float = 0.1
    bf16: bool | None = None
    gb_s: float | None = None
    tflops: float | None = None
    link: str = ""
    link_gb_s: float | None = None
    context_mib: float | None = None
    cublas_mib: float | None = None
    nccl_mib: float | None = None
    graph_mib: float | None = None
    times: TimesConf = field(default_factory=TimesConf)


@dataclass
class PlanningConf:
    """What runs do with their own plan; `enforce` refuses those that do not fit, before loading."""

    enforce: bool = True
    acceptance: float = 0.8


@dataclass
class SamplingConfig:
    """The sampling distribution. Every control acts on the target's and on the draft's distribution alike."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_tokens: list[int] = field(default_factory=list)
    min_new_tokens: int = 0


@dataclass
class SpeculationConfig:
    """How tokens are drafted and verified.

    `adaptive` chooses K for each row, up to `k_max`, by its acceptance and by what steps cost: as measured
    when the run begins, so that another run may choose otherwise; or by `cost_ratio`, a draft step's share
    of a target step's time, which makes the run repeatable (no clock; in 16 bit and less only with the same
    batch and placement). `overlap` is for a draft on ranks of its own.
    """

    k: int = 4
    drafter: Drafting = Drafting.model
    verification: Verification = Verification.block
    adaptive: bool = False
    k_max: int = 16
    cost_ratio: float | None = None
    ngram_min: int = 1
    ngram_max: int = 4
    bridge: Bridging = Bridging.auto
    overlap: Overlap = Overlap.auto

    @property
    def may_draft(self) -> bool:
        """Whether K may be more than 0."""
        return self.k > 0 or self.adaptive
