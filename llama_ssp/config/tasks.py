"""What each task can be asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from llama_ssp.config.schema import OnBadRow


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
    """task=generate: continue prompts from the config, a file, or standard input.

    `chat` puts each prompt into the target's chat template, after `system` if that is given. Names of special
    tokens in a prompt are text, unless `special_tokens` reads them as those tokens (without `chat`).
    """

    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    chat: bool = False
    system: str | None = None
    special_tokens: bool = False
    batch_size: int = 8
    trace: bool = False


@dataclass
class EvalConf(TaskConf):
    """task=eval: few-shot multiplications, answered by regular and by speculative sampling.

    `sampling=` says by which distribution: the score is highest with sampling=greedy; the ancestor had
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
    runs after the other. `record` saves the picture of how they ended, as .svg or .html.
    """

    max_new_tokens: int = 128
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    chat: bool = False
    system: str | None = None
    special_tokens: bool = False
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
    """task=certify: is what speculation draws the target's distribution?

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

    `acceptance` is the chance that a drafted token stands, given that those before it did. `require_fit`
    leaves with exit code 1 unless the verdict is `fits`.
    """

    prompt_tokens: int = 512
    max_new_tokens: int = 128
    batch_size: int = 1
    prefill_chunk: int = 512
    acceptance: float = 0.8
    require_fit: bool = False


@dataclass
class CalibrateConf(TaskConf):
    """task=calibrate: measures this machine; writes it as a cluster, cluster/calibrated.yaml in `folder`.

    The folder is then named with --config-dir, and the cluster with cluster=calibrated.
    """

    folder: str = "calibrated"
    repeats: int = 5


@dataclass
class BatchConf(TaskConf):
    """task=batch: every record of a file answered once, whatever is killed when.

    `input` is JSONL, plain or in OpenAI's batch format, or text of one prompt a line; `output` has an answer
    a line, in the same order. `work` holds the job until then (null: OUTPUT.work). Records are committed one
    by one and published by shards of `shard_size`, which several processes may share. A record during which
    `retries` attempts died, alone, is set aside. `status` only tells how far the job is; `submit` hands it to
    the scheduler that the cluster names.
    """

    input: str | None = None
    output: str | None = None
    work: str | None = None
    chat: bool = False
    system: str | None = None
    max_new_tokens: int = 128
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    on_bad_row: OnBadRow = OnBadRow.fail
    batch_size: int = 8
    prefill_chunk: int = 512
    shard_size: int = 256
    retries: int = 3
    status: bool = False
    submit: bool = False


TASKS: dict[str, type[TaskConf]] = {
    "generate": GenerateConf,
    "batch": BatchConf,
    "eval": EvalConf,
    "compare": CompareConf,
    "measure": MeasureConf,
    "certify": CertifyConf,
    "agree": AgreeConf,
    "plan": PlanConf,
    "calibrate": CalibrateConf,
}
