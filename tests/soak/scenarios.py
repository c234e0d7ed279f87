"""What is run, and what befalls it: drawn by a seed, so that a scenario can be played again."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

PAIRS = {
    "demo": (),
    "no draft": ("draft=none",),
    "n-gram": ("draft=none", "speculation=ngram"),
}
PLACEMENTS = {
    1: ("auto",),
    2: ("leader", "sharded", "replicated", "own"),
    3: ("leader", "sharded", "replicated", "own"),
}
SAMPLINGS = {
    "T = 1": (),
    "T = 0.5": ("sampling.temperature=0.5",),
    "greedy": ("sampling=greedy",),
    "nucleus": ("sampling.top_p=0.9", "sampling.top_k=50"),
    "penalties": ("sampling.repetition_penalty=1.2", "sampling.min_p=0.02"),
}
DRAFTING = {
    "K = 4": (),
    "K = 1": ("speculation.k=1",),
    "K = 7, token": ("speculation.k=7", "speculation.verification=token"),
    "adaptive": ("speculation.adaptive=true", "speculation.cost_ratio=0.2"),
}
TASKS = ("generate", "batch", "measure")
# Of the whole command: told to stop, or killed. Of one rank: killed, or stopped and never heard of again.
# Of the disk: it takes no more.
NOTHING, TERM, INT, KILL, KILL_RANK, STOP_RANK, DISK = (
    "nothing", "SIGTERM", "SIGINT", "SIGKILL", "a rank's SIGKILL", "a rank's SIGSTOP", "full disk",
)  # fmt: skip
FAULTS = (NOTHING, NOTHING, TERM, INT, KILL, KILL_RANK, STOP_RANK, DISK)
DRAFT_HEADS = 2  # of demo_draft: it cannot be split further
WITHOUT_DRAFT_MODEL = ("no draft", "n-gram")


@dataclass(frozen=True)
class Scenario:
    """One run of the command. `moment` is when the fault comes, of the time such a run may take."""

    task: str
    pair: str
    ranks: int
    placement: str
    sampling: str
    drafting: str
    rows: int
    fault: str
    moment: float
    seed: int

    def __str__(self) -> str:
        where = f"{self.ranks} x {self.placement}" if self.ranks > 1 else "1 rank"
        kind = (self.task, self.pair, where, self.sampling, self.drafting, f"{self.rows} rows")
        return f"{', '.join(kind)}, seed {self.seed}; {self.fault}" + (
            f" at {self.moment:.2f}" if self.fault != NOTHING else ""
        )

    @property
    def settings(self) -> tuple[str, ...]:
        """What decides the text, and nothing else."""
        return (
            *PAIRS[self.pair], *SAMPLINGS[self.sampling], *self._drafting, f"seed={self.seed}",
            "model.dtype=fp32", *(("draft.dtype=fp32",) if self.pair not in WITHOUT_DRAFT_MODEL else ()),
        )  # fmt: skip

    @property
    def _drafting(self) -> tuple[str, ...]:
        return () if self.pair == "no draft" else DRAFTING[self.drafting]

    @property
    def overrides(self) -> tuple[str, ...]:
        placed = (f"placement={self.placement}",) if self.ranks > 1 else ()
        if self.placement == "sharded":
            placed += (f"placement.draft_degree={DRAFT_HEADS}",)
        return (*self.settings, *placed, f"task={self.task}", f"task.batch_size={self.rows}")


def drawn(random: Random) -> Scenario:
    """Any of those that the command allows."""
    task, pair, ranks = random.choice(TASKS), random.choice(list(PAIRS)), random.choice((1, 1, 2, 3))
    placements = PLACEMENTS[ranks] if pair == "demo" or ranks == 1 else ("leader",)
    faults = [fault for fault in FAULTS if fits(fault, task, ranks)]
    return Scenario(
        task=task, pair=pair, ranks=ranks, placement=random.choice(placements),
        sampling=random.choice(list(SAMPLINGS)), drafting=random.choice(list(DRAFTING)),
        rows=random.choice((1, 2, 4)), fault=random.choice(faults), moment=random.random(),
        seed=random.randrange(2**31),
    )  # fmt: skip


def fits(fault: str, task: str, ranks: int) -> bool:
    """One rank is no rank among others; only a job writes as it goes."""
    return not (fault in (KILL_RANK, STOP_RANK) and ranks == 1) and not (fault == DISK and task != "batch")
