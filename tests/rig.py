"""One call that runs the engine, and drafts that agree always, sometimes or never."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch

from llama_ssp.config import SamplingConfig
from llama_ssp.models import steps
from llama_ssp.models.heads.model import HeadModel
from llama_ssp.models.interface import Model
from llama_ssp.models.steps import SteppedModel
from llama_ssp.speculative.draft_length import AdaptiveDraftLength, Costs, DraftLength, FixedDraftLength
from llama_ssp.speculative.drafters.cross_vocab import IntersectionDrafter
from llama_ssp.speculative.drafters.head import head_drafter
from llama_ssp.speculative.drafters.local import Drafter, ModelDrafter, Sampler
from llama_ssp.speculative.drafters.ngram import NgramDrafter
from llama_ssp.speculative.engine import Engine, RankEngine
from llama_ssp.speculative.generate import Limits, Step, generate
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.verification import RULES, Rule
from llama_ssp.text.translation import Intersection

GREEDY = SamplingConfig(temperature=0.0)


def contrary(model: Any) -> Any:
    """The target's own logits moved by one token: its argmax differs from the target's everywhere."""
    plain = model.logits
    model.logits = lambda *pass_: plain(*pass_).roll(1, -1)
    return model


def perturbed(module: Any, amount: float) -> Any:
    """The module, changed in place by noise: it agrees sometimes."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(amount * parameter.std() * noise if parameter.ndim > 1 else 0.0)
    return module


def eager_step(model: SteppedModel) -> Any:
    """The step of a model whose programs are not compiled: their functions as they are."""
    kinds = steps.kinds_of(model.decoder, model.config)
    sections = steps.sections_of(model.decoder, kinds, tapped=bool(model.taps))
    calls = [(steps.run_section, *section) for section in sections]
    return partial(steps.run_programs, calls, sorted(model.taps), model.ranks)


@dataclass
class Run:
    """What came out: the generated tokens of each row, why it ended, and how drafting went."""

    texts: list[list[int]]
    finish: list[str | None]
    rounds: int
    drafted: int
    accepted: int
    longest: list[int]
    target_forwards: int


def engine_of(
    target: Model, draft: Model | HeadModel | str | None = None, rule: Rule | str = "block", *,
    sampling: SamplingConfig | None = None, ends: Iterable[int] = (), draws: Any = 0,
    vocab: int | None = None, bridge: Intersection | None = None, chunk: int = 512, rewinds: int = 16,
    top: int | None = None,
) -> Engine:  # fmt: skip
    """The engine of one process. `draft` is a model, a trained head, "ngram", or None.

    `draws` is a seed, or a source of draws; `bridge` leads from the draft's tokenizer to the target's.
    `rewinds` is the largest K; `top` is speculation.draft_top.
    """
    source = CounterDraws(draws) if isinstance(draws, int) else draws
    replay, vocab = getattr(source, "replay", None), vocab or target.vocab
    transform = SamplingTransform(sampling or SamplingConfig(), tuple(sorted(ends)), vocab, replay)
    target_runner = ModelRunner(target, chunk, rewinds)
    drafter: Drafter = Drafter()
    sampler = Sampler(transform, source, torch.promote_types(target.dtype, torch.float32), top)
    if draft == "ngram":
        drafter = NgramDrafter(1, 4, sampler)
    elif isinstance(draft, HeadModel):
        drafter = head_drafter(draft, target_runner, sampler)
    elif bridge is not None:
        drafter = IntersectionDrafter(ModelRunner(draft, chunk, rewinds), sampler, bridge)
    elif draft is not None:
        drafter = ModelDrafter(ModelRunner(draft, chunk, rewinds), sampler)
    decides = RULES[rule] if isinstance(rule, str) else rule
    return Engine(target_runner, drafter, sampler, decides)


@dataclass
class Queue:
    """Refills rows in order, and keeps what each prompt got."""

    prompts: list[Prompt]
    texts: dict[str, list[int]] = field(default_factory=dict)

    def admit(self, engine: RankEngine, state: State) -> list[int]:
        free = [row for row, reason in enumerate(state.finished) if reason is not None]
        self.texts |= {state.prompts[row].id: state.generated(row) for row in free}
        filled = {row: self.prompts.pop(0) for row in free[: len(self.prompts)]}
        if filled:
            engine.admit(state, filled)
        return list(filled)


def steps_of(
    engine: RankEngine, prompts: list[Prompt], new: int, drafting: DraftLength | int = 0,
    ends: frozenset[int] = frozenset(), most: int | None = None, queue: Queue | None = None, longest: int = 0,
) -> tuple[State, list[Step]]:  # fmt: skip
    """One batch to its end, or for `most` rounds: the state, and every round. `drafting` may be a fixed K.

    A queue has texts of `longest` tokens at most.
    """
    state = engine.prefill(prompts, new, longest)
    lookahead = FixedDraftLength(drafting, len(prompts)) if isinstance(drafting, int) else drafting
    steps = list(islice(generate(engine, state, Limits(new, ends), lookahead, queue), most))
    if len(steps) == most:
        engine.flush()
    return state, steps


def speculate(
    target: Model, prompts: list[Prompt], draft: Model | str | None, *, k: int, max_new: int = 24,
    ends: frozenset[int] = frozenset(), seed: int = 0, adaptive: bool = False,
    draws: Any = None, sampling: SamplingConfig = GREEDY, **how: Any,
) -> Run:  # fmt: skip
    """One batch through an engine of its own; `how` as in `engine_of`."""
    how = {"ends": ends, "draws": draws or seed, "sampling": sampling, **how}
    engine = engine_of(target, draft, **how)
    return drive(engine, prompts, k=k, max_new=max_new, ends=ends, adaptive=adaptive)


def drive_refilled(engine: RankEngine, prompts: list[Prompt], rows: int, **how: Any) -> dict[str, list[int]]:
    """All prompts through a few rows, each refilled as soon as its text ends; what each got."""
    queue = Queue(prompts[rows:])
    drive(engine, prompts[:rows], queue=queue, **how)
    return queue.texts


def drive(
    engine: RankEngine, prompts: list[Prompt], *, k: int, max_new: int = 24,
    ends: frozenset[int] = frozenset(), adaptive: bool = False, **how: Any,
) -> Run:  # fmt: skip
    """One batch through any rank's engine; `how` as in `steps_of`."""
    lookahead: DraftLength = FixedDraftLength(k, len(prompts))
    if adaptive:
        lookahead = AdaptiveDraftLength(Costs.of_ratio(0.1, k), len(prompts))
    state, steps = steps_of(engine, prompts, max_new, lookahead, ends, **how)
    rows = [row for step in steps for row in step.rows]
    texts = [state.generated(row) for row in range(state.rows)]
    counts = len(steps), sum(len(row.drafted) for row in rows), sum(row.accepted for row in rows)
    longest = [max(len(row.drafted) for row in step.rows) for step in steps]
    return Run(texts, list(state.finished), *counts, longest, engine.target_forwards)
