"""Drafting ahead, walked: the leader and the draft's rank, in every order in which their work may fall.

The code that ships runs on both sides, each in a thread, one at a time: they change places where they meet
the link, and nowhere else. All that the draft can see of the leader meanwhile is whether the next request has
come; so a schedule says, round by round, how often the draft looks in vain. Under each schedule every branch
of the draws is followed (choices.py; a key stands for one uniform number, which both sides may read), and the
distribution of whole texts is compared with the target's (scenarios.py): total variation below 1e-12. The
controls are the faults of test_overlap.py, such as a stale proposal that is used.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from llama_ssp.config import Overlap
from llama_ssp.distributed.comm import ALONE
from llama_ssp.distributed.draft_messages import DraftClient, DraftServer, Message, MessageKind
from llama_ssp.distributed.roles import Roles
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.speculative.drafters.ahead import AheadDrafter
from llama_ssp.speculative.drafters.remote import RemoteDrafter
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.follower import Follower
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.verification import RULES
from tests.proofs.choices import ReplayDraws, distance, every_branch
from tests.proofs.scenarios import Outcome, Scenario, expected, models, written

PATIENCE_S = 3600.0  # nobody's clock decides anything here
SLIVER = 1e-14  # intervals that are there by rounding alone


@dataclass
class SharedDraws(ReplayDraws):
    """One tree of choices for both sides, in which a key stands for one uniform number, as it does in a run.

    A choice says in which part of its interval the number lies. Who asks again, with the same distribution or
    another, chooses within that part: so draws that share a key depend on each other just as they do in a
    run.
    """

    known: dict[tuple[int, int, int, int], tuple[float, float]] = field(default_factory=dict)

    def _choose(self, probs: list[float], slot: Any, row: int, column: int) -> int:
        key = (slot.keys[row], slot.bases[row], int(slot.purpose), slot.offset + column)
        low, high = self.known.get(key, (0.0, 1.0))
        ends = [sum(probs[: index + 1]) for index in range(len(probs))]
        parts = [(max(low, end - share), min(high, end)) for share, end in zip(probs, ends, strict=True)]
        weights = [right - left if right - left > SLIVER else 0.0 for left, right in parts]
        if sum(weight > 0 for weight in weights) > 1:
            self.drawn.discard(key)
            chosen = super()._choose([weight / sum(weights) for weight in weights], slot, row, column)
        else:
            chosen = max(range(len(probs)), key=weights.__getitem__)
        self.known[key] = parts[chosen]
        return chosen


@dataclass(frozen=True)
class Schedule:
    """`looks[i]` is how often the draft looks in vain for the ask of round i + 1; in rounds beyond, as often
    as it likes. With `deaf` the leader hears nothing before it waits, with `twice` all replies come again.
    """

    looks: tuple[int, ...]
    deaf: bool = False
    twice: bool = False


class Stage:
    """Two ends of a line, of which one has the floor."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.mail: dict[str, deque[bytes]] = {"leader": deque(), "draft": deque()}
        self.floor = {"leader": threading.Semaphore(1), "draft": threading.Semaphore(0)}
        self.ended: set[str] = set()
        self.waiting: set[str] = set()
        self.error: BaseException | None = None
        self.looked = 0
        self.round = 0

    def give_floor(self, side: str) -> None:
        """To the other side; until it comes back."""
        other = "draft" if side == "leader" else "leader"
        if other in self.ended:
            raise AssertionError(f"{side} waits for one that has ended")
        self.floor[other].release()
        self.floor[side].acquire()
        if self.error:
            raise SystemExit

    def play(self, leader: Callable[[], Any], draft: Callable[[], Any]) -> Any:
        """What the leader's part returns. Errors of either side are raised here."""
        found = []

        def act(side: str, part: Callable[[], Any]) -> None:
            self.floor[side].acquire()
            try:
                found.append((side, part()))
            except BaseException as error:
                self.error = self.error or error
            self.ended.add(side)
            self.floor["draft" if side == "leader" else "leader"].release()

        threads = [threading.Thread(target=act, args=one) for one in (("leader", leader), ("draft", draft))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error:
            raise self.error
        assert len(found) == 2
        return dict(found)["leader"]


class StagedLink:
    """One end."""

    def __init__(self, stage: Stage, side: str) -> None:
        self._stage, self._side = stage, side
        self._far = "draft" if side == "leader" else "leader"

    def send(self, frame: bytes) -> None:
        stage = self._stage
        stage.mail[self._far].append(frame)
        message = Message.unpack(frame)
        stage.waiting.discard(self._far)
        if message.kind is MessageKind.REPLY:
            stage.looked = 0
            if stage.schedule.twice:
                stage.mail[self._far].append(frame)
            stage.give_floor(self._side)  # the leader goes on as far as it can

    def has_frame(self) -> bool:
        return bool(self._stage.mail[self._side]) and self._sees()

    def receive(self, seconds: float) -> bytes | None:
        stage, mail = self._stage, self._stage.mail[self._side]
        if seconds <= 0:
            return mail.popleft() if self.has_frame() else None
        while not mail:
            stage.waiting.add(self._side)
            assert len(stage.waiting) < 2, "both wait"
            stage.give_floor(self._side)
        stage.waiting.discard(self._side)
        return mail.popleft()

    def close(self) -> None:
        pass

    def _sees(self) -> bool:
        """Whether what has been sent has come."""
        stage = self._stage
        if self._side == "leader":
            return not stage.schedule.deaf
        if stage.round < len(stage.schedule.looks) and stage.looked < stage.schedule.looks[stage.round]:
            stage.looked += 1
            return False
        stage.round += 1
        return True


def overlapped(
    s: Scenario, target: CausalModel, draft: CausalModel, draws: Any, schedule: Schedule, watch: Any = None
) -> Outcome:  # fmt: skip
    """One run of the shipping loop on both sides."""
    stage = Stage(schedule)
    asker = DraftClient(StagedLink(stage, "leader"), PATIENCE_S)
    answerer = DraftServer(StagedLink(stage, "draft"), ALONE)
    transform = SamplingTransform(s.sampling, tuple(s.ends), target.vocab)
    remote = RemoteDrafter(asker, draft.context, transform.vocab, torch.float64)
    leads = Roles(ALONE, ALONE, None, asker, apart=(1,))
    helps = Roles(ALONE, None, ALONE, answerer, apart=(1,))
    sender = AheadDrafter(ModelRunner(draft, s.chunk), transform, draws, ALONE, answerer, Overlap.ahead)
    engine = Engine(ModelRunner(target, s.chunk), remote, transform, RULES[s.rule], draws, leads)
    follower = Follower(None, sender, transform, draws, helps, target.context, torch.device("cpu"))

    outcome = stage.play(lambda: written(s, engine), lambda: written(s, follower))
    if watch is not None:
        watch(asker, sender.counts)
    return outcome


def schedules(k: int, rounds: int, whole: bool = True) -> Iterator[Schedule]:
    """Every one for so many rounds; a round has a pass for the guess, then k behind it.

    If not `whole`, two rounds: in the second the draft looks as often as in the first, or once more.
    """
    most = k + 2
    every = product(range(most), repeat=rounds)
    some = ((looks, (looks + more) % most) for looks in range(most) for more in (0, 1))
    for number, looks in enumerate(every if whole else some):
        yield Schedule(looks, deaf=bool(number % 2), twice=bool(number // 2 % 2))


@dataclass
class Seen:
    """What a walk went through."""

    schedules: int = 0
    runs: int = 0
    drafted: int = 0
    used: int = 0
    discarded: int = 0

    def __call__(self, asker: DraftClient, tally: Any) -> None:
        self.runs += 1
        self.drafted, self.used = self.drafted + tally.drafted, self.used + tally.used
        self.discarded += asker.discarded


def walk(s: Scenario, which: Iterator[Schedule]) -> tuple[float, Seen]:
    """The greatest total variation of any schedule's joint distribution from the target's."""
    target, draft = models(s)
    assert draft is not None
    probs, worst, seen = expected(s, target.module), 0.0, Seen()
    for schedule in which:
        found, _ = every_branch(
            lambda draws, schedule=schedule: overlapped(s, target, draft, draws, schedule, seen),
            source=SharedDraws,
        )
        seen.schedules += 1
        worst = max(worst, distance(found, probs))
    return worst, seen
