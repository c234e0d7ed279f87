"""A pair opened under a placement, on ranks that are threads or processes, and runs on it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from llama_ssp import config
from llama_ssp.config import Dtype, ModelConf, PlacementConf, RunConf, SamplingConfig, SpeculationConfig
from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.placement import resolve
from llama_ssp.models.checkpoint import complete
from llama_ssp.pair import assembly
from llama_ssp.pair.assembly import ModelCache, RankModels, engine_for
from llama_ssp.pair.placements import model_placements
from llama_ssp.placing.decision import as_asked
from llama_ssp.placing.pairs import PairSpec
from llama_ssp.speculative.engine import RankEngine
from llama_ssp.speculative.state import Prompt
from tests.distributed.threads import ranks_of, together
from tests.families import VOCAB, ragged_prompts
from tests.rig import GREEDY, Run, drive, drive_refilled

RAGGED = ragged_prompts(9, 4, 1, 6)


@dataclass(frozen=True)
class Case:
    k: int
    rows: int = 4
    sampling: SamplingConfig = field(default_factory=lambda: GREEDY)
    verification: config.Verification = config.Verification.block
    adaptive: bool = False
    max_new: int = 16
    ends: frozenset[int] = frozenset()
    rounds: int | None = None  # stops after so many
    overlap: config.Overlap = config.Overlap.auto
    draft_top: int | None = None

    @property
    def loop(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("k", "max_new", "ends", "adaptive")}


def entry_of(target: Path, draft: Path, placement: PlacementConf, world: int) -> PairSpec:
    model, small = (
        complete(ModelConf(name="local", path=str(path), dtype=Dtype.fp32), role)[0]
        for path, role in ((target, "model"), (draft, "draft"))
    )
    run = RunConf(model=model, draft=small, placement=placement)
    decision = as_asked(run, resolve(placement, world, run.has_draft_model))
    return PairSpec(run, target, draft, decision)


def opened(target: Path, draft: Path, placement: PlacementConf, ranks: Ranks) -> tuple[RankModels, RunConf]:
    entry = entry_of(target, draft, placement, ranks.world)
    return ModelCache(ranks, placement).open(model_placements(entry)), entry.run


class OverRanks:
    """A pair under a placement, on ranks that are threads: `held` is each rank's part."""

    def __init__(self, target: Path, draft: Path, placement: PlacementConf, world: int) -> None:
        self.ranks, lock = ranks_of(world), threading.Lock()

        def alone(load: Callable[..., Any], *args: Any, **named: Any) -> Any:
            with lock:  # building modules is not for threads
                return load(*args, **named)

        jobs = [partial(opened, target, draft, placement, rank) for rank in self.ranks]
        loaders = {name: partial(alone, getattr(assembly, name)) for name in ("load", "load_head")}
        with patch.multiple(assembly, **loaders):
            self.held: list[tuple[RankModels, RunConf]] = together(jobs, self.ranks)

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """What `job(pair, run, *args)` returns on each rank."""
        return together([partial(job, *held, *args) for held in self.held], self.ranks)


def written(pair: RankModels, run: RunConf, case: Case, prompts: list[Prompt] = RAGGED) -> Run:
    """What the case gives. Ranks that neither decide nor lead a draft draw nothing; their seed is another."""
    engine = engine_of(pair, run, case)
    return drive(engine, prompts[: case.rows], most=case.rounds, **case.loop)


def refilled(pair: RankModels, run: RunConf, case: Case) -> list[list[int]]:
    """The same prompts through two rows, each refilled as soon as its text ends."""
    engine = engine_of(pair, run, case)
    texts = drive_refilled(engine, RAGGED, 2, longest=9 + case.max_new, **case.loop)
    return [texts[prompt.id] for prompt in RAGGED]


def engine_of(pair: RankModels, run: RunConf, case: Case) -> RankEngine:
    spec = SpeculationConfig(
        k=case.k, verification=case.verification, adaptive=case.adaptive, k_max=6, overlap=case.overlap,
        draft_top=case.draft_top,
    )  # fmt: skip
    tokens: Any = SimpleNamespace(size=VOCAB, paired=None)  # what an engine asks of a tokenizer
    how = replace(run, sampling=case.sampling, speculation=spec)
    draws = pair.roles.leads or (pair.roles.draft is not None and pair.roles.draft.is_leader)
    return engine_for(pair, how, tokens, case.ends, 7 if draws else 8)
