"""A draft that runs ahead changes nothing but time: under every order of events, the target's distribution.

The code that ships runs on both sides, each in a thread, one at a time: they change places where they meet
the link, and nowhere else. All that the draft can see of the leader meanwhile is whether the next request has
come; so a schedule says, round by round, how often the draft looks in vain.

Enumerated: for thirteen scenarios, the orders in which the leader and the draft's rank may do their first
rounds, and under each of them every branch of the draws (choices.py; a key stands for one uniform number,
which both sides may read). Compared: the joint distribution of whole texts with the target's own
(scenarios.py), total variation below 1e-12 in fp64; and texts of real draws with those of one process.
Controls: a stale proposal, one for another prefix, one that was sent before its request and is for another
text, another text's distribution, and a use that depends on an uncommitted token each give another
distribution; a guess that is used behind another correction gives another text.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.config import Overlap, SamplingConfig
from llama_ssp.distributed.comm import ALONE
from llama_ssp.distributed.draft_messages import DraftClient, DraftServer, Message, MessageKind
from llama_ssp.distributed.roles import Roles
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.planner.search import draft_bytes
from llama_ssp.speculative.draft_length import FixedDraftLength
from llama_ssp.speculative.drafters import ahead, remote
from llama_ssp.speculative.drafters.ahead import AheadDrafter, Memo
from llama_ssp.speculative.drafters.local import Drawn, Sampler
from llama_ssp.speculative.drafters.remote import RemoteDrafter
from llama_ssp.speculative.engine import Engine, RankEngine
from llama_ssp.speculative.follower import Follower
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws, Purpose, Slot
from llama_ssp.speculative.sampling import SamplingTransform, likeliest
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.stats import RowStep
from llama_ssp.speculative.verification import RULES
from tests.proofs.choices import ReplayDraws, distance, every_branch
from tests.proofs.mutants import Mutant
from tests.proofs.scenarios import BASE, Scenario, expected, models, play, written
from tests.rig import Queue

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

    Who looks in vain after its last pass sends its proposal before the request. The leader goes on with it
    at once; with `deaf` it first hears of it when it waits for the next one.
    """

    looks: tuple[int, ...]
    deaf: bool = False
    twice: bool = False


class Stage:
    """Two ends of a line, of which one has the floor."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.mail: dict[str, deque[Tensor]] = {"leader": deque(), "draft": deque()}
        self.floor = {"leader": threading.Semaphore(1), "draft": threading.Semaphore(0)}
        self.ended: set[str] = set()
        self.waiting: set[str] = set()
        self.error: BaseException | None = None
        self.looked = 0
        self.round = -1  # of the last ask that the draft has taken up

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
    def __init__(self, stage: Stage, side: str) -> None:
        self._stage, self._side = stage, side
        self._far = "draft" if side == "leader" else "leader"

    def send(self, head: bytes, payload: Tensor | None = None) -> None:
        stage = self._stage
        load = b"" if payload is None else payload.numpy().tobytes()
        frame = torch.frombuffer(bytearray(head + load), dtype=torch.uint8)
        stage.mail[self._far].append(frame)
        message = Message.unpack(frame)
        stage.waiting.discard(self._far)
        if message.kind in (MessageKind.REPLY, MessageKind.EARLY):
            if stage.schedule.twice:
                stage.mail[self._far].append(frame)
            if message.kind is MessageKind.REPLY or not stage.schedule.deaf:
                stage.give_floor(self._side)  # the leader goes on as far as it can

    def has_frame(self) -> bool:
        return bool(self._stage.mail[self._side]) and self._sees()

    def receive(self, seconds: float, pinned: bool = False) -> Tensor | None:
        stage, mail = self._stage, self._stage.mail[self._side]
        if seconds <= 0:
            return mail.popleft() if self.has_frame() else None
        while not mail:
            stage.waiting.add(self._side)
            assert len(stage.waiting) < 2, "both wait"
            stage.give_floor(self._side)
        stage.waiting.discard(self._side)
        if self._side == "draft":
            stage.round += 1
            stage.looked = 0
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
        return True


def overlapped(
    s: Scenario, target: CausalModel, draft: CausalModel, draws: Any, schedule: Schedule, watch: Any = None,
    write: Callable[[Scenario, RankEngine], Any] = written,
) -> Any:  # fmt: skip
    """Returns what `write` returns on the leader: the outcome of a batch, unless it is another function."""
    stage = Stage(schedule)
    asker = DraftClient(link=StagedLink(stage, "leader"), patience_s=PATIENCE_S)
    answerer = DraftServer(StagedLink(stage, "draft"), ALONE)
    transform = SamplingTransform(s.sampling, tuple(s.ends), target.vocab)
    remote = RemoteDrafter(asker, draft.context, transform.vocab, torch.float64)
    leads = Roles(everyone=ALONE, target=ALONE, draft=None, client=asker, apart=(1,))
    helps = Roles(everyone=ALONE, target=None, draft=ALONE, server=answerer, apart=(1,))
    sampler = Sampler(transform, draws, top=s.top)
    sender = AheadDrafter(ModelRunner(draft, s.chunk), sampler, ALONE, answerer, Overlap.ahead)
    engine = Engine(ModelRunner(target, s.chunk), remote, sampler, RULES[s.rule], leads)
    follower = Follower(None, sender, sampler, helps, target.context, torch.device("cpu"))

    outcome = stage.play(lambda: write(s, engine), lambda: write(s, follower))
    if watch is not None:
        watch(asker, sender.counts)
    return outcome


def schedules(k: int, rounds: int, whole: bool = True) -> Iterator[Schedule]:
    """Every one for so many rounds; a round has a pass for the guess, then k behind it, and a look after all.

    If not `whole`, two rounds: in the second the draft looks as often as in the first, or once more.
    """
    most = k + 3
    every = product(range(most), repeat=rounds)
    some = ((looks, (looks + more) % most) for looks in range(most) for more in (0, 1))
    for number, looks in enumerate(every if whole else some):
        yield Schedule(looks, deaf=bool(number % 2), twice=bool(number // 2 % 2))


@dataclass
class Seen:
    schedules: int = 0
    runs: int = 0
    drafted: int = 0
    used: int = 0
    discarded: int = 0
    early: int = 0

    def __call__(self, asker: DraftClient, tally: Any) -> None:
        self.runs += 1
        self.drafted, self.used = self.drafted + tally.drafted, self.used + tally.used
        self.discarded += asker.discarded
        self.early += asker.early


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


CUT = SamplingConfig(top_p=0.75)  # some distributions are certain then, and trees smaller
CUT_LESS = SamplingConfig(top_p=0.85)
TWO, OTHER_TWO = ((1,), (0, 1, 1)), ((1, 1, 0), (0,))

# A scenario, and for how many rounds schedules differ.
WALKS: dict[str, tuple[Scenario, int]] = {
    "one row, K = 1": (Scenario(vocab=2, k=1, new=4), 2),
    "one row, K = 2": (Scenario(vocab=2, k=2, new=6, sampling=CUT_LESS), 2),
    "one row, token rule": (Scenario(vocab=2, k=2, new=6, sampling=CUT_LESS, rule="token"), 2),
    "every guess is right": (Scenario(vocab=2, k=2, new=6, draft="same"), 2),
    "two rows, K = 2": (Scenario(prompts=TWO, vocab=2, k=2, new=5, draft="same", sampling=CUT), 3),
    "two rows, EOS": (
        Scenario(prompts=OTHER_TWO, vocab=2, k=1, new=4, ends=frozenset({1}), sampling=CUT), 2,
    ),
    "two rows, the context ends": (Scenario(prompts=TWO, vocab=2, k=2, new=10, context=6, sampling=CUT), 2),
    "two rows, adaptive K": (
        Scenario(prompts=TWO, vocab=2, k=2, new=5, adaptive=True, draft="same", sampling=CUT_LESS), 1,
    ),
    "a stop sequence": (Scenario(vocab=2, k=2, new=6, stop=(0, 1), sampling=CUT_LESS), 2),
    "the draft's context ends": (Scenario(draft_context=5, vocab=2, k=2, new=6, sampling=CUT), 2),
    "all that the draft has is forbidden": (replace(BASE["all that the draft has is forbidden"], k=1), 2),
    "likeliest tokens": (Scenario(vocab=3, k=1, new=4, top=2, draft="same"), 1),
    "two rows, likeliest tokens": (Scenario(prompts=TWO, vocab=2, k=1, new=4, draft="same", top=1), 1),
}  # fmt: skip
# Where a proposal that is complete has as many drafts as are then requested: texts do not end meanwhile.
EARLY_IN = ("one row, K = 1", "one row, K = 2", "every guess is right", "two rows, likeliest tokens")
# With these every order of two rounds is tried; elsewhere, what else differs meets every order of one.
WHOLE = ("one row, K = 1", "one row, K = 2", "two rows, K = 2", "two rows, adaptive K")
# Ends come first, or the guess is forbidden.
RARELY_READY = (
    "two rows, EOS", "a stop sequence", "the draft's context ends", "all that the draft has is forbidden",
)  # fmt: skip


def test_an_interleaving_has_the_targets_distribution():
    scenario, _ = WALKS["two rows, K = 2"]
    error, seen = walk(scenario, iter(schedules(2, 1)))
    assert error < 1e-12 and seen.schedules == 5 and seen.used > 0


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", WALKS)
def test_every_interleaving_has_the_targets_distribution(name: str):
    (scenario, rounds), whole = WALKS[name], name in WHOLE
    error, seen = walk(scenario, schedules(scenario.k, rounds, whole))
    assert error < 1e-12
    assert seen.schedules == ((scenario.k + 3) ** rounds if whole else 2 * (scenario.k + 3))
    assert seen.drafted > 0 and (seen.used > 0 or name in RARELY_READY)
    assert seen.early > 0 or name not in EARLY_IN


def test_a_memo_stands_for_its_own_prompt_and_text_alone():
    """Two prompts may have the same text; their drafts differ, as each has draws of its own."""

    def batch(*prompts: tuple[str, tuple[int, ...]]) -> State:
        return State([Prompt(*prompt) for prompt in prompts], 9, torch.device("cpu"))

    memo = Memo(batch(("a", (1, 2)), ("b", (1, 2))), (2, 2))
    now = batch(("a", (1, 2)), ("c", (1, 2)))
    assert [memo.stands(now, row) for row in (0, 1)] == [True, False]
    now.append({0: [1]})
    assert not memo.stands(now, 0)
    other = batch(("b", (1, 2)), ("b", (1, 2)))
    assert [memo.stands(other, row) for row in (0, 1)] == [False, True]


def test_rows_of_two_memos_are_merged_whole():
    """Each row's token comes with the very probabilities it was drawn from."""
    generator = torch.Generator().manual_seed(1)
    one, other = (
        Drawn(torch.randint(5, (3,), generator=generator) + 5 * n, torch.rand(3, 5, generator=generator))
        for n in range(2)
    )
    chosen = [True, False, True]
    found = ahead.merged(chosen, one, other)
    for row, first in enumerate(chosen):
        wanted = one if first else other
        for part in ("token_B", "probs_BV"):
            assert torch.equal(getattr(found, part)[row], getattr(wanted, part)[row])


def test_as_many_drafts_are_ready_as_there_was_time_for():
    scenario, used = WALKS["every guess is right"][0], []
    for looks in (0, 1, 2, 3):
        seen = Seen()
        overlapped(scenario, *models(scenario), SharedDraws([]), Schedule((looks,) * 9), seen)
        used.append(seen.used)
    assert used == [0, 0, 1, 2]  # a pass for the guess, then a draft a pass


LONG, ALWAYS = Scenario(vocab=5, k=3, new=40), Schedule((16,) * 60)
TWO_TEXTS = Scenario(prompts=TWO, vocab=5, k=3, new=12, ends=frozenset({4}))


def is_alike(scenario: Scenario, seed: int, schedule: Schedule) -> bool:
    """Whether texts of real draws are those of one process, draw for draw."""
    run = overlapped(scenario, *models(scenario), CounterDraws(seed), schedule)
    return run == play(scenario, *models(scenario), CounterDraws(seed))


def test_the_text_is_that_of_one_process():
    """What is drafted ahead takes the keys that the proposal would have taken; also over a long text."""
    for seed in range(6):
        for looks in (0, 2, 5):
            schedule = Schedule((looks,) * 20, deaf=seed % 2 > 0, twice=seed % 3 > 0)
            assert is_alike(TWO_TEXTS, seed, schedule)
    assert is_alike(LONG, 1, ALWAYS) and is_alike(LONG, 4, ALWAYS)


def rounds_of(
    s: Scenario, engine: RankEngine, lookahead: FixedDraftLength, limits: Limits, queue: Queue | None = None
) -> list[RowStep]:
    """Returns what each row got in each round; rows are refilled from the queue."""
    prompts = [Prompt(str(row), ids) for row, ids in enumerate(s.prompts)]
    state = engine.prefill(prompts, s.new)
    steps = generate(engine, state, limits, lookahead, queue)
    return [row for step in steps for row in step.rows]


# The draft is the target: all that is drafted from the distribution of a row's own text stands.
ALIKE = Scenario(prompts=((1, 0), (0, 1)), vocab=5, k=2, new=42, draft="same")


def test_a_refilled_row_uses_nothing_that_was_drafted_for_the_text_before():
    """A text ends by its limit just where its guess is right, so that drafts for it are ready."""
    seen = Seen()

    def write(s: Scenario, engine: RankEngine) -> list[RowStep]:
        limits, queue = Limits(s.new, by_row={0: 6}), Queue([Prompt("later", (3, 2, 4))])
        return rounds_of(s, engine, FixedDraftLength(s.k, 2), limits, queue)

    rows = overlapped(ALIKE, *models(ALIKE), CounterDraws(1), ALWAYS, seen, write)
    drafts_of_first_rounds = 2 * 3  # of three texts; nothing is ready there
    assert [row.accepted for row in rows] == [len(row.drafted) for row in rows]
    assert seen.used == sum(row.accepted for row in rows) - drafts_of_first_rounds


def test_ready_drafts_that_are_not_wanted_leave_no_trace():
    """The first row's K falls from 3 to 1, again and again; each guess is right all the same."""
    seen = Seen()

    class Falling(FixedDraftLength):
        def choose(self) -> list[int]:
            self.k = 4 - self.k
            return [self.k, 2]

    def write(s: Scenario, engine: RankEngine) -> list[RowStep]:
        return rounds_of(s, engine, Falling(1, 2), Limits(s.new))

    rows = overlapped(ALIKE, *models(ALIKE), CounterDraws(1), ALWAYS, seen, write)
    rounds = len(rows) // 2
    assert rounds == 14
    assert [row.accepted for row in rows] == [len(row.drafted) for row in rows]
    # Of the first row's drafts one a round is ready: where K rises, as many as in the round before.
    assert seen.used == (1 + 2) * (rounds - 1)


@pytest.mark.parametrize("zeros", [0, 5, 11, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_probabilities_arrive_to_the_last_bit(zeros: int, dtype: torch.dtype):
    probs = torch.rand(12, dtype=dtype)
    probs[:zeros] = 0
    probs = probs.view(1, 2, 6)
    damaged = probs.clone()
    damaged[:, 1] = torch.nan  # the leader has to see it
    # The least is a probability, too.
    for sent in (probs, probs.pow(40), probs * torch.finfo(dtype).tiny, damaged):
        how, load = remote.written(sent)
        arrived = remote.read(how, load, (1, 2, 6), dtype, sent.device)
        assert arrived.isnan().equal(sent.isnan()) and arrived.nan_to_num(2.0).equal(sent.nan_to_num(2.0))
        assert load.nbytes <= sent.nbytes


@pytest.mark.parametrize("top", [1, 2, 19, 21, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_likeliest_probabilities_arrive_to_the_last_bit(top: int, dtype: torch.dtype):
    """As many of each distribution, whatever is 0; where they are most of it, all are sent."""
    whole = torch.rand(2, 3, 40, dtype=dtype, generator=torch.Generator().manual_seed(1))
    few = likeliest(whole / whole.sum(-1, keepdim=True), top)
    certain = likeliest(whole, 1)
    tied = likeliest(torch.ones_like(whole), top)
    damaged = few.clone()
    damaged[1, 1] = torch.nan  # the leader has to see it, at whichever token it looks
    for sent in (few, certain, tied, damaged):
        form, load = remote.written(sent, top)
        arrived = remote.read(form, load, (2, 3, 40), dtype, sent.device)
        assert arrived.isnan().equal(sent.isnan()) and arrived.nan_to_num(2.0).equal(sent.nan_to_num(2.0))
        if dtype is torch.float32:
            assert load.nbytes == 2 * 3 * draft_bytes(40, top), "what is planned is sent"


def test_what_a_proposal_is_for_says_its_text_and_its_prompt():
    """Rows without drafts are for nothing: their texts may have ended, or been replaced."""

    def of(name: str, *texts: tuple[int, ...]) -> State:
        return State([Prompt(name, text) for text in texts], 9, torch.device("cpu"))

    wanted = remote.tags(of("a", (1, 2), (3,)), (2, 0))
    assert wanted[3:] == [0, 0, 0] and wanted == remote.tags(of("a", (1, 2), (3, 4)), (2, 0))
    for other, count in (
        (of("b", (1, 2), (3,)), (2, 0)),
        (of("a", (2, 1), (3,)), (2, 0)),
        (of("a", (1, 2, 0), (3,)), (2, 0)),
        (of("a", (1, 2), (3,)), (1, 0)),
    ):
        assert remote.tags(other, count) != wanted


def test_two_distributions_alike_are_raced_to_the_same_token():
    """Those that overlap by 0.9 give the same token nearly as often; by inverted CDFs they do not."""
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(400, 300, generator=generator)
    one = torch.softmax(logits, -1)
    other = torch.softmax(logits + 0.25 * torch.randn(400, 300, generator=generator), -1)
    apart = float((one - other).abs().sum(-1).mean() / 2)
    assert 0.05 < apart < 0.15
    slot = Slot(tuple(range(400)), (7,) * 400, Purpose.CORRECT)
    alike = [
        float((draws.categorical(one, how) == draws.categorical(other, how)).double().mean())
        for draws, how in ((CounterDraws(0), slot), (CounterDraws(0), replace(slot, purpose=Purpose.DRAFT)))
    ]
    assert alike[0] > (1 - apart) / (1 + apart) - 0.05 and alike[0] > alike[1] + 0.2


# Controls: faults that must show in the distribution.

MEMO = "speculative.drafters.ahead:Memo.stands"
TAGS = "speculative.drafters.remote:tags speculative.drafters.ahead:tags"


def the_one_before(reply: Any, client: Any, tags: Any, pinned: bool) -> Any:
    """The reply to an earlier request is taken for the one to this."""
    newest = reply(client, tags, pinned)
    older, vars(client)["older"] = vars(client).get("older", newest), newest
    return older


def if_it_pleases(stands: Any, memo: Any, state: Any, row: int) -> bool:
    """Looks at what was drafted, not only at what was committed."""
    return stands(memo, state, row) and bool(memo.drawn) and int(memo.drawn[0].token_B[row]) == 0


def with_own_draws(extended: Any, state: State, blocks: list[list[int]]) -> Any:
    """Drafts ahead by other keys than the proposal's."""
    later = extended(state, blocks)
    later.slot = lambda purpose, offset=0: State.slot(later, purpose, offset + 8)
    return later


def of_another_text(stands: Any, memo: Any, state: Any, row: int) -> bool:
    """What was drafted ahead is declared with the distribution of another text."""
    if stands(memo, state, row):
        memo.drawn = [replace(drawn, probs_BV=drawn.probs_BV.flip(-1)) for drawn in memo.drawn]
    return bool(stands(memo, state, row))


# All that can be drafted ahead is, for K = 1 and 2, and its request has come by then; or it comes later.
PATIENT, MORE_PATIENT, EARLY = Schedule((2,) * 6), Schedule((3,) * 6), Schedule((9,) * 6)
FIRST = WALKS["one row, K = 1"][0]
WHIM = Mutant("a use that depends on an uncommitted token", MEMO, (), if_it_pleases)
RIGHT = WALKS["every guess is right"][0]
FAULTS: dict[str, tuple[Scenario, Schedule, list[Mutant]]] = {
    "a stale proposal is used": (
        FIRST,
        Schedule((0,) * 6),
        [
            Mutant("the reply before", "distributed.draft_messages:DraftClient.reply", (), the_one_before),
            Mutant("no tags", TAGS, (), lambda _, state, count: [0] * (3 * state.rows)),
        ],
    ),
    "what was sent before its request is used for any text": (
        FIRST,
        EARLY,
        [Mutant("no tags", TAGS, (), lambda _, state, count: [0] * (3 * state.rows))],
    ),
    "a proposal for another prefix is used": (FIRST, PATIENT, [Mutant("", MEMO, (), lambda *_: True)]),
    "another text's distribution": (FIRST, PATIENT, [Mutant("", MEMO, (), of_another_text)]),
    WHIM.name: (
        RIGHT, MORE_PATIENT, [WHIM, Mutant("", "speculative.state:State.extended", (), with_own_draws)],
    ),
}  # fmt: skip


def shows(scenario: Scenario, schedule: Schedule, mutants: list[Mutant]) -> bool:
    with ExitStack() as stack:
        for mutant in mutants:
            stack.enter_context(mutant.planted())
        return walk(scenario, iter([schedule]))[0] > 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_shows(name: str):
    assert shows(*FAULTS[name])


@pytest.mark.slow
def test_keys_make_the_choice_harmless_by_themselves():
    """A proposal that is thrown away for what it holds is drawn again by the same keys: the same one."""
    assert not shows(RIGHT, MORE_PATIENT, [WHIM])


def test_a_guess_that_is_used_behind_another_correction_shows_in_the_text():
    """Each draft still comes with its distribution, so that of the texts holds, but not a seed's text."""
    fault = Mutant(
        "looks how far the text has come, not which it is", MEMO, (),
        lambda _, memo, state, row: len(state.texts[row]) == len(memo.state.texts[row]),
    )  # fmt: skip
    with fault.planted():
        assert not all(is_alike(LONG, seed, ALWAYS) for seed in range(1, 8))
