"""One dataclass for each Hydra group except the task, and the choices of their fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

MAX_K = 64
MAX_SIBLINGS = 8
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


# The choices of keys; the key's description says what each means.
Dtype = StrEnum("Dtype", ["auto", "fp64", "fp32", "bf16", "fp16", "int8", "int4", "nf4", "packed"])
Weights = StrEnum("Weights", ["checkpoint", "synthetic"])
Drafting = StrEnum("Drafting", ["model", "ngram", "none"])
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

USUAL_COST_RATIO = 0.1  # a draft step over a target step, where it is neither given nor measured


@dataclass
class ModelConf:
    """One model: its files, its number format, and its shape, so that planning needs no file.

    A size of 0 is read from the checkpoint's config.json.

    Attributes:
        name: The name in tables and records.
        repo: A repository on the Hugging Face hub with files of this shape; model=ORG/NAME needs no preset.
        revision: A commit, tag or branch of the repository; null is its main branch.
        path: A folder or GGUF file with a model of this shape; model=FOLDER needs no preset.
        weights: checkpoint reads files; synthetic builds the same shape from a seed, without files.
        dtype: How weights are held. auto is what the device computes fastest without loss of range; int8,
            int4 and nf4 quantise while reading; packed keeps the codes of a quantised checkpoint.
        seed: The seed of synthetic weights.
        agreement: The mean acceptance probability of a synthetic draft at temperature 1.
        family: The architecture, as config.json's model_type.
        n_layers: Layers.
        n_heads: Query heads.
        n_kv_heads: Heads of keys and values.
        head_dim: Width of an attention head.
        dim: Width of the model.
        ffn: Width of the MLP.
        experts: Experts of a layer; 0 is none.
        experts_per_token: Experts that a token is sent to.
        expert_ffn: Width of an expert.
        dense_layers: Layers without experts, in a model that has them.
        code_bits: Bits of a code of a quantised checkpoint; 0 is none.
        code_group: Inputs that share a scale; 0 is a whole row.
        code_bytes: Bytes of a scale with its zero.
        code_mix: The sizes of each matrix where they differ (models/formats/kept.py).
        head_inputs: Numbers of the target's hidden states that a trained head reads; 0 is no head.
        head_vocab: Tokens that a trained head can draft.
        head_block: Drafts of one pass of a head that drafts a block; 0 is a head with one draft a pass.
        vocab: Tokens of the vocabulary.
        context: The longest text, in tokens.
        tied: The output matrix is the embedding.
        sliding_window: Tokens that a layer with a window looks back at; null is none.
        attention_bias: Attention's linear layers have biases; null is as usual in the family.
        mlp_bias: The MLP's linear layers have biases; null is as usual in the family.
    """

    name: str = MISSING
    repo: str | None = None
    revision: str | None = None
    path: str | None = None
    weights: Weights = Weights.checkpoint
    dtype: Dtype = Dtype.auto
    seed: int = number(0, 0, MAX_SEED)
    agreement: float = share(0.8)
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
    head_block: int = number(0, 0, 64)
    vocab: int = number(0, 0, MAX_INT)
    context: int = number(0, 0, MAX_INT)
    tied: bool = False
    sliding_window: int | None = number(None, 1, MAX_INT, "null is none")
    attention_bias: bool | None = None
    mlp_bias: bool | None = None

    @property
    def is_head(self) -> bool:
        """Whether it is a trained head, which reads the target's hidden states."""
        return self.head_inputs > 0


@dataclass
class PlacementConf:
    """The ranks and devices of the models (distributed/placement.py resolves the ranks).

    All ranks end when one does not answer.

    Attributes:
        splitting: tensor gives each rank a slice of every layer; layers gives each device of one process
            whole layers; deepspeed has DeepSpeed slice a model that every rank has read whole.
        draft: Where the draft is: on the leader, replicated or sharded over the target's ranks, or on ranks
            of its own; auto asks the plan.
        draft_degree: Ranks of the draft; null is all of the target's where it shares them, and one of its
            own.
        target_ranks: The target's ranks, one by one.
        draft_ranks: The draft's ranks, one by one.
        target_device: auto (the rank's own accelerator, else the CPU), cpu, cuda or cuda:N.
        draft_device: The same for the draft.
        max_memory: Bytes of each device for splitting=layers: 'placement.max_memory={0: 20GiB, cpu: 60GiB}'.
        offload_folder: The folder for layers that fit on no device, with splitting=layers.
        timeout_s: Seconds after which a rank that does not answer is lost.
        on_draft_loss: What the target does when a draft on ranks of its own is lost: continue alone, or stop.
        draft_timeout_s: Seconds after which a draft on ranks of its own is lost.
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

    Maps go from a number of ranks, or of tokens, to a figure; values between are interpolated.

    Attributes:
        source: Where the figures are from.
        bandwidth_share: Share of the peak bandwidth that a GEMV attains.
        flops_share: Share of the peak FLOPS that a long GEMM attains.
        rows_cost: By tokens in one pass: the cost relative to one.
        layer_us: Microseconds of a layer, in addition to the reading of its bytes.
        step_us: Microseconds of a forward pass, in addition to its layers.
        round_us: Microseconds of a round, in addition to its passes.
        check_us: Further microseconds of a round with drafts.
        law_ns: Nanoseconds of a distribution, for each token of the vocabulary.
        accept_ns: The same where drafts are verified.
        all_reduce_us: By ranks: microseconds of an all-reduce.
        message_us: Microseconds of the leader's broadcast.
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

    An element of the array stops `signal_s` before its end, and goes on in a new one.

    Attributes:
        partition: The partition.
        account: The account.
        qos: The quality of service.
        constraint: Features that nodes must have.
        time: The time limit, as H:MM:SS or D-HH:MM:SS.
        mem: Memory of a node, such as 64G.
        cpus_per_rank: CPU cores of a rank; null is the cluster's own default for a node.
        gpu_type: The GPUs' name in the cluster's own gres.
        job_name: The job's name.
        signal_s: Seconds before the time limit at which work stops.
        setup: Shell lines that run first, such as "module load cuda"; one that fails ends the job.
        options: Further options of sbatch, such as --exclusive.
        python: The interpreter on the nodes; null is this command's.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str | None = None
    mem: str | None = None
    cpus_per_rank: int | None = number(1, 1, 4096)
    gpu_type: str | None = None
    job_name: str | None = None
    signal_s: int = number(120, 1, 65535, "seconds to stop before the time limit")
    setup: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    python: str | None = None


@dataclass
class ClusterConf:
    """The machines: `nodes` with `gpus` GPUs each.

    Null is looked up: on this machine for `local`, or in the preset with the same GPU.

    Attributes:
        name: The name in tables and records.
        gpu: The GPU's name; cpu is processes that share one CPU.
        nodes: Machines.
        gpus: GPUs of a machine; null is what there is.
        groups: Groups of ranks, each with models of its own, that share a job of task=batch.
        scheduler: What starts the groups: none is this machine, or slurm.
        gib: Memory of a GPU, in GiB.
        reserve: Share of it that stays free.
        bf16: The GPU computes in bf16.
        gb_s: Memory bandwidth of a GPU by its data sheet, in GB/s.
        tflops: Peak of a GPU in 16 bit without sparsity, in TFLOPS.
        link: The kind of link between GPUs.
        link_gb_s: Bandwidth of the link in one direction, in GB/s.
        context_mib: Memory that a process takes on its GPU, in MiB.
        cublas_mib: Memory that cuBLAS takes on a GPU, in MiB.
        nccl_mib: Memory that NCCL takes on a GPU, in MiB.
        graph_mib: Memory that one CUDA graph takes on a GPU, in MiB.
        price_per_gpu_hour: Price of a GPU for an hour, in any currency; null is not known.
        slurm: Slurm's options.
        times: The constants of predicted times.
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
    price_per_gpu_hour: float | None = number(None, 0.0, 1e6)
    times: TimesConf = field(default_factory=TimesConf)


@dataclass
class PlanningConf:
    """The plan that every run is compared with.

    Attributes:
        enforce: Refuse a run that does not fit, before anything is loaded.
        acceptance: The acceptance probability that a run is planned with; task=plan has a key of its own.
    """

    enforce: bool = True
    acceptance: float = share(0.8)


@dataclass
class SamplingConfig:
    """The sampling distribution. Every control acts on the target's and on the draft's distribution.

    Attributes:
        temperature: Divides the logits; 0 is greedy.
        top_k: Keep the K likeliest tokens; 0 keeps all.
        top_p: Keep the likeliest tokens up to this share of the probability; 1 keeps all.
        min_p: Drop tokens less likely than this share of the likeliest one's probability; 0 drops none.
        repetition_penalty: Divides positive logits of tokens in the text so far, multiplies negative ones; 1
            is none.
        frequency_penalty: Is taken off a token's logit for each time that it was generated.
        presence_penalty: Is taken off the logit of a token that was generated.
        logit_bias: Is added to logits, by token id: 'sampling.logit_bias={5: -2.0}'.
        bad_tokens: Ids of tokens that are never generated.
        min_new_tokens: Tokens before an end token may come.
    """

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

    `adaptive` chooses K by acceptance and the cost of steps. They are measured when the run begins, so that
    another run may choose otherwise; or given by `cost_ratio`, which makes the run repeatable (without a
    clock; in 16 bit and less only with the same batch and placement).

    Attributes:
        k: Drafted tokens a round (K); 0 is regular sampling.
        siblings: Further tokens drawn at each draft's position, which makes a tree; with adaptive=true the
            largest number.
        drafter: What proposes tokens: the draft model, n-grams of the text so far, or nothing.
        verification: The exact rule: block accepts at least as many tokens as token, the reference.
        adaptive: Choose K for each row from measurements.
        k_max: The largest K of adaptive.
        cost_ratio: The time of a draft step over a target step; null measures it, or takes 0.1 where nothing
            is measured: in eval, certify and batch, over several ranks, with n-grams, and with a draft of
            another tokenizer.
        ngram_min: Tokens of the shortest n-gram that is looked up.
        ngram_max: Tokens of the longest n-gram that is looked up.
        bridge: Whether a draft of another tokenizer drafts by the tokens that both have: auto does if these
            are half of a sample text or more, intersection always, off never.
        overlap: What a draft on ranks of its own does while the target verifies: draft ahead, or off.
    """

    k: int = number(4, 0, MAX_K, "0 is plain decoding")
    siblings: int = number(0, 0, MAX_SIBLINGS, "0 drafts chains")
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

    @property
    def longest(self) -> int:
        """The most drafts of a round."""
        return self.k_max if self.adaptive else self.k

    @property
    def most_siblings(self) -> int:
        """The most siblings of a round, of all its drafts."""
        return self.longest * self.siblings
