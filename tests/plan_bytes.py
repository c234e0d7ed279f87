"""The plan's bound against the memory that runs allocate: both roles, whole and over two gloo ranks.

The measurement is the allocator's own events, as torch's profiler records them (with the memory of kernels),
in addition to the weights, caches and tokens that exist before. Every case has processes of its own: several
profiles in one process miscount each other's blocks.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llama_ssp.config import Dtype, ModelConf, SamplingConfig, Weights
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.distributed.roles import Roles
from llama_ssp.models.loader import load
from llama_ssp.planner.activations import Kernels
from llama_ssp.planner.memory import DRAFT_PREFILL, DRAFT_STEPS, PREFILL, VERIFY, RankWork
from llama_ssp.planner.weights import ModelPart, RolePart, held
from llama_ssp.planner.workload import DRAFT, TARGET, Role, Workload
from llama_ssp.speculative.drafters.local import Drafter, ModelDrafter, Sampler
from llama_ssp.speculative.engine import Engine, RankEngine
from llama_ssp.speculative.follower import Follower
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt, Proposal, State
from llama_ssp.speculative.verification import RULES
from tests.distributed.processes import on_ranks
from tests.memory_trace import cache_bytes

ROWS, PROMPT, NEW, K, CHUNK, VOCAB = 2, 90, 30, 4, 32, 4000
ROOM = PROMPT + NEW
SHAPES: dict[str, dict[str, int]] = {
    TARGET: {"n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "head_dim": 32, "dim": 256, "ffn": 704},
    DRAFT: {"n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "head_dim": 32, "dim": 128, "ffn": 352},
}
PHASES = ("prefill", "decode", "verify")
DTYPES = (Dtype.fp32, Dtype.fp16, Dtype.bf16)
PLANNED = {
    (TARGET, "prefill"): PREFILL, (TARGET, "decode"): VERIFY, (TARGET, "verify"): VERIFY,
    (DRAFT, "prefill"): DRAFT_PREFILL, (DRAFT, "decode"): DRAFT_STEPS, (DRAFT, "verify"): DRAFT_STEPS,
}  # fmt: skip
ALLOWED_SHARE, ALLOWED_BYTES = 0.05, 64 * 2**20
CPU = torch.device("cpu")
PATIENCE_CASE_S = 60


@dataclass(frozen=True)
class Case:
    """A role's model in one phase. The draft drafts one token in decode, and K tokens in verify."""

    role: str
    phase: str
    dtype: Dtype
    world: int

    @property
    def conf(self) -> Role:
        sizes: dict[str, Any] = {"vocab": VOCAB, "context": 256, **SHAPES[self.role]}
        model = ModelConf(name=self.role, family="llama", weights=Weights.synthetic, **sizes)
        return Role(self.role, model, self.dtype)

    @property
    def k(self) -> int:
        return {"prefill": 0, "decode": int(self.role == DRAFT), "verify": K}[self.phase]


@dataclass(frozen=True)
class Row:
    """One rank of a case: bytes planned and allocated."""

    case: Case
    rank: int
    planned: int
    actual: int

    @property
    def allowed(self) -> int:
        """How far above the measurement the bound may be."""
        return max(int(ALLOWED_SHARE * self.actual), ALLOWED_BYTES)


CASES = [
    Case(role, phase, dtype, world)
    for world in (1, 2)
    for role in (TARGET, DRAFT)
    for phase in PHASES
    for dtype in DTYPES
]


class Patient:
    """Ranks that wait after a collective until no other thread holds its tensors.

    gloo's own thread holds the tensors of a collective a moment longer. If it were the last to hold them,
    they would be freed on that thread, which the profiler does not record, and would count for ever.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        before = tensor._use_count()
        self._ranks.all_reduce(tensor)
        _let_go(tensor, before)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        before = tensor._use_count()
        parts = self._ranks.all_gather(tensor)
        _let_go(tensor, before)
        for part in parts:
            _let_go(part, 1)
        return parts


def _let_go(tensor: Tensor, hands: int) -> None:
    """Waits until the tensor has this number of references."""
    patience = time.monotonic() + PATIENCE_CASE_S
    while tensor._use_count() > hands:
        if time.monotonic() > patience:
            raise RuntimeError(
                f"a tensor of a collective is in {tensor._use_count()} hands; expected {hands}"
            )
        time.sleep(0.0001)


def planned(case: Case, rank: int) -> int:
    """Weights and caches, and the bound of the phase."""
    role = case.conf
    own = RolePart.of(role, ModelPart.of(role.model, case.world, rank), ROOM)
    target, draft = (own, None) if case.role == TARGET else (None, own)
    batch = RankWork(
        target=target,
        draft=draft,
        vocab=VOCAB,
        work=Workload(rows=ROWS, prompt_tokens=PROMPT, new_tokens=NEW, k=case.k, prefill_chunk=CHUNK),
        room=ROOM,
        decides=rank == 0,
        drafts=True,
        kernels=Kernels(cpu=True, threads=torch.get_num_threads()),
    )
    passing = sum(batch.peaks()[PLANNED[case.role, case.phase]].values())
    return sum(held(own.part, role.dtype).values()) + own.caches_bytes(ROWS) + passing


def actual(case: Case, ranks: Ranks) -> int:
    role = case.conf
    model = load(role.model, None, role.dtype, CPU, TARGET, *[ranks] * (case.world > 1))
    sampler = Sampler(SamplingTransform(SamplingConfig(), (), VOCAB), CounterDraws(0))
    runner = ModelRunner(model, CHUNK)
    prompts = [Prompt(name, tuple(range(PROMPT))) for name in "ab"]
    state = State(prompts, ROOM, CPU)
    before = model.weights_bytes + state.token_BS.nbytes
    if case.phase == "prefill":
        return before + _peak(lambda: _warm(runner, state))
    _warm(runner, state)
    assert runner._cache is not None
    before += cache_bytes(runner._cache)
    if case.role == DRAFT:
        drafter = ModelDrafter(runner, sampler)
        return before + _peak(lambda: drafter.propose(state, (case.k,) * ROWS))
    crew = Roles(everyone=ranks, target=ranks, draft=None)
    engine: RankEngine
    if ranks.is_leader:
        engine = Engine(runner, Drafter(), sampler, RULES["block"], crew)
    else:
        engine = Follower(runner, None, sampler, crew, ROOM, CPU)
    proposal = _proposal(case.k, ranks.is_leader)
    before += sum(t.nbytes for t in (proposal.drafted_BK, proposal.draft_BKV) if t is not None)
    most = _peak(lambda: engine.verify(state, proposal))
    engine.flush()
    return before + most


def _warm(runner: ModelRunner, state: State) -> None:
    runner.start(ROWS, ROOM)
    runner.prefill(state.token_BS, [PROMPT - 1] * ROWS)


def _proposal(k: int, leads: bool) -> Proposal:
    drafted_BK = torch.arange(ROWS * k).view(ROWS, k)
    probs_BKV = torch.full((ROWS, k, VOCAB), 1 / VOCAB) if k and leads else None
    return Proposal(drafted_BK, probs_BKV, (k,) * ROWS)


def _peak(run: Any) -> int:
    """The most bytes alive at once of those that `run` allocates."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        kept = run()
    del kept
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def measured(ranks: Ranks, case: Case) -> int:
    return actual(case, Patient(ranks) if case.world > 1 else ALONE)


def rows_of(case: Case) -> list[Row]:
    found = on_ranks(case.world, measured, case)
    if errors := [one for one in found.values() if isinstance(one, Exception)]:
        raise errors[0]
    return [Row(case, rank, planned(case, rank), found[rank]) for rank in range(case.world)]
