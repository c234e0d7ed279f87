"""The typed configuration: one dataclass per Hydra group.

Yaml and the command line are merged by Hydra into these schemas, then converted and checked once
(checks.py). Nothing past that door sees a DictConfig. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf


class Dtype(Enum):
    """How weights are held; `auto` takes what the device computes fastest without loss of range."""

    auto = "auto"
    fp64 = "fp64"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    int8 = "int8"
    nf4 = "nf4"


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
    """Which exact rule accepts them; `block` accepts at least as many, `token` is the reference."""

    block = "block"
    token = "token"


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


class Output(Enum):
    text = "text"
    json = "json"


class OnBadRow(Enum):
    fail = "fail"
    skip = "skip"


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
    """Where the models sit (placement.resolve makes a table of ranks of it).

    A device `auto` is the rank's own accelerator, else the CPU. `draft_degree` null is all of the target's
    ranks for replicated and sharded, one rank for own; lists of ranks say it one by one. `max_memory`
    (device index, cpu: "20GiB") and `offload_folder` are for splitting=layers. `timeout_s` is how long a rank
    may be late, silent or waited for before all end.
    """

    splitting: Splitting = Splitting.tensor
    draft: DraftSeat = DraftSeat.auto
    draft_degree: int | None = None
    target_ranks: list[int] | None = None
    draft_ranks: list[int] | None = None
    target_device: str = "auto"
    draft_device: str = "auto"
    max_memory: dict[str, str] = field(default_factory=dict)
    offload_folder: str | None = None
    timeout_s: float = 120.0


@dataclass
class TimesConf:
    """What times are made of, beside bytes; null is as calibrated on published runs (plan/speed.py).

    Of peak, a GEMV attains `bandwidth_share` and a long GEMM `flops_share`. A pass costs `step_us`, and
    `layer_us` a layer; a round `round_us`, and `check_us` if it has drafts. A law costs `law_ns` an entry of
    the vocabulary, and `accept_ns` if drafts are checked against it. A message is what the leader tells the
    other ranks. Maps go from a number of ranks (all_reduce_us), or of tokens in one pass (rows_cost, over
    the cost of one), to a figure; what lies between two of them is interpolated.
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
class ClusterConf:
    """What there is to run on: `nodes` machines with `gpus` GPUs each (gpu=cpu: processes that share one).

    What is null is looked up: `local` asks the machine at hand, and figures of a GPU that a preset has
    are that preset's. `gib` is what one GPU offers, less `reserve` of it; `gb_s` and `tflops` (16 bit, dense)
    are its data sheet's, `link_gb_s` is one direction's. `*_mib` are taken by libraries on every GPU.
    """

    name: str = "local"
    gpu: str | None = None
    nodes: int = 1
    gpus: int | None = None
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
class SamplingConf:
    """The sampling law. Every control acts on the target's and on the draft's law alike."""

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
class SpeculationConf:
    """How tokens are drafted and verified."""

    k: int = 4
    drafter: Drafting = Drafting.model
    verification: Verification = Verification.block
    adaptive: bool = False
    k_max: int = 16
    cost_ratio: float = 0.1
    ngram_min: int = 1
    ngram_max: int = 4


@dataclass
class TaskConf:
    """What every task has."""

    name: str = MISSING


@dataclass
class PromptedConf(TaskConf):
    """A task that continues prompts: from the config, a file, or where else it has them from (prompts)."""

    prompts: list[str] | None = None
    prompt_file: str | None = None
    on_bad_row: OnBadRow = OnBadRow.fail
    max_new_tokens: int = 128
    prefill_chunk: int = 512


@dataclass
class GenerateConf(PromptedConf):
    """task=generate: continue prompts from the config, a file, or standard input."""

    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    chat: bool = False
    system: str | None = None
    batch_size: int = 8
    trace: bool = False


@dataclass
class EvalConf(TaskConf):
    """task=eval: few-shot multiplications, answered by regular and by speculative sampling.

    `sampling=` says by which law: the score is highest with sampling=greedy; the ancestor had
    sampling.temperature=0.5. An entry of `pairs` is TARGET or TARGET/DRAFT, presets under conf/model;
    with none, the run's own model and draft are scored. The first n questions of each seed are scored for
    every n of `sizes`; `quick` asks 10 of one seed. `plot` null puts plot.png into the run folder.
    """

    pairs: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3])
    sizes: list[int] = field(default_factory=lambda: [1000])
    quick: bool = False
    shots: int = 4
    max_new_tokens: int = 6
    batch_size: int = 64
    plot: str | None = None


@dataclass
class CompareConf(PromptedConf):
    """task=compare: each prompt by regular and by speculative sampling, side by side.

    Prompts come from the config, a file or a pipe, else they are asked for on the terminal. One sampling
    runs after the other, then both are replayed side by side at the speed they had (`replay`); `race` lets
    them take turns instead, so that at any moment both have had the same time. `record` saves the picture:
    .svg and .html how it ends, .cast (asciinema) how it moves.
    """

    max_new_tokens: int = 128
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    chat: bool = False
    system: str | None = None
    race: bool = False
    replay: bool = True
    record: str | None = None


@dataclass
class MeasureConf(PromptedConf):
    """task=measure: how fast the target alone, the draft alone and the pair at each K of `ks` are.

    Prompts come from the config or a file, else they are fifteen sentences; `lengths` asks for prompts of
    random tokens instead, one of each length. Contenders take turns `repeats` times, after a warm-up that
    does not count. `plot` null puts plot.png into the run folder.
    """

    lengths: list[int] = field(default_factory=list)
    ks: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    repeats: int = 6
    max_new_tokens: int = 64
    ignore_eos: bool = True
    batch_size: int = 1
    plot: str | None = None


@dataclass
class CertifyConf(PromptedConf):
    """task=certify: is what speculation draws the target's law?

    `samples` texts of `max_new_tokens` are drawn of each prompt, by regular sampling, by speculation and by a
    rule that is wrong on purpose; up to `law_rounds` rounds of texts of `law_tokens` are computed exactly;
    greedy texts have `greedy_tokens`. A right sampler fails in at most `false_alarm` of runs.
    """

    samples: int = 128
    max_new_tokens: int = 8
    law_tokens: int = 24
    law_rounds: int = 64
    greedy_tokens: int = 24
    false_alarm: float = 0.001
    batch_size: int = 64


@dataclass
class AgreeConf(PromptedConf):
    """task=agree: how far draft and target agree greedily on each prompt, and where they part.

    The draft writes `chunk` tokens at a time, which the target reads in one pass, until they part or have
    agreed on `max_new_tokens`. `plot` null puts plot.png into the run folder.
    """

    max_new_tokens: int = 64
    chunk: int = 8
    ignore_eos: bool = False
    batch_size: int = 8
    plot: str | None = None


@dataclass
class PlanConf(TaskConf):
    """task=plan: does the pair fit, where should the draft sit, how fast will it be; no GPU, no weights.

    `acceptance` is the chance that a drafted token stands, given that those before it did. `image` is a
    picture of the bill (.png, .svg); `require_fit` leaves with exit code 1 unless the verdict is `fits`.
    """

    prompt_tokens: int = 512
    max_new_tokens: int = 128
    batch_size: int = 1
    prefill_chunk: int = 512
    acceptance: float = 0.8
    image: str | None = None
    require_fit: bool = False


@dataclass
class CalibrateConf(TaskConf):
    """task=calibrate: measures this machine; writes it as a cluster, cluster/`cluster_name`.yaml in `folder`.

    The folder is then named with --config-dir, and the cluster with cluster=`cluster_name`.
    """

    folder: str = "calibrated"
    cluster_name: str = "calibrated"
    repeats: int = 5


@dataclass
class RunConf:
    """The whole run."""

    model: ModelConf = field(default_factory=ModelConf)
    draft: ModelConf | None = None
    placement: PlacementConf = field(default_factory=PlacementConf)
    cluster: ClusterConf = field(default_factory=ClusterConf)
    sampling: SamplingConf = field(default_factory=SamplingConf)
    speculation: SpeculationConf = field(default_factory=SpeculationConf)
    task: TaskConf = field(default_factory=TaskConf)
    plan: PlanningConf = field(default_factory=PlanningConf)
    seed: int | None = None
    output: Output = Output.text
    out: str | None = "outputs"


TASKS: dict[str, type[TaskConf]] = {
    "generate": GenerateConf,
    "eval": EvalConf,
    "compare": CompareConf,
    "measure": MeasureConf,
    "certify": CertifyConf,
    "agree": AgreeConf,
    "plan": PlanConf,
    "calibrate": CalibrateConf,
}

SIZES = ("n_layers", "n_heads", "n_kv_heads", "head_dim", "dim", "ffn", "vocab", "context")

LOSSY = {
    "lenience": "lenience accepts more than the exact rule",
    "lenient": "lenience accepts more than the exact rule",
    "typical_acceptance": "typical acceptance changes the law",
    "typical": "typical acceptance changes the law",
    "posterior_threshold": "typical acceptance changes the law",
    "accept_threshold": "an acceptance threshold changes the law",
    "ensemble_weight": "an ensemble of the two laws is not the target's law",
    "assistant_ensemble_weight": "an ensemble of the two laws is not the target's law",
}


def register() -> None:
    """Tells Hydra the schemas; `conf/` refers to them by these names."""
    store = ConfigStore.instance()
    store.store(name="schema", node=RunConf)
    for name, schema in TASKS.items():
        store.store(group="task", name=f"{name}_schema", node=schema)


def known_keys(schema: type = RunConf, prefix: str = "") -> list[str]:
    """Every dotted key of the schema, every task's included: what an override may name."""
    keys: list[str] = []
    for entry in fields(schema):
        key = prefix + entry.name
        keys.append(key)
        nested = _nested(schema, entry.name)
        for inner in nested:
            keys += known_keys(inner, key + ".")
    return list(dict.fromkeys(keys))


def _nested(schema: type, name: str) -> list[type]:
    if schema is RunConf and name == "task":
        return list(TASKS.values())
    if schema is RunConf and name in ("model", "draft"):
        return [ModelConf]
    factory = next(f for f in fields(schema) if f.name == name).default_factory
    return [factory] if isinstance(factory, type) and is_dataclass(factory) else []


def resolved(run: RunConf) -> dict[str, Any]:
    """The run as plain data, for hashes and records."""
    plain = OmegaConf.to_container(OmegaConf.structured(run), resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def home_expanded(name: str) -> Path:
    """The path, with a leading ~ for the home folder; an unknown user's stays as it is."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)
