"""The time of a step: bytes over bandwidth, a constant and two sums a layer, two more a step. No torch.

    t = bytes_rank / bandwidth + L*c + [ranks > 1] * (2L + 2) * (alpha + beta*(ranks - 1))

of the rank that reads most. Four published runs determine the four constants exactly; tests compare other
published runs. The constants hold for bf16, one row, CUDA graphs and preallocated caches; elsewhere the band
is wide, and task=calibrate measures.
"""

from bisect import bisect_left
from dataclasses import dataclass

from llama_ssp.config import Dtype, Overlap, TimesConf
from llama_ssp.models.layout import EMBEDDING, EXPERTS, POSITIONS
from llama_ssp.planner.efficiency import PLAIN, Efficiency, Points, efficiency_of, of_plain
from llama_ssp.planner.storage import AS_THEY_ARE, BUFFERS, Storage, bytes_of, width
from llama_ssp.planner.weights import ModelPart, held, weights
from llama_ssp.planner.workload import Role
from llama_ssp.speculative.draft_length import tokens_per_round

# The four constants that give the published runs (tests/test_plan_speed.py): gpt-fast README, Llama-2-7B
# bf16 on 1, 2, 4 and 8 A100-80 limited to 330 W, one row, 5 tokens of prompt.
BYTES_PER_S = 1576831925929.5686
LAYER_S, SUM_S, SUM_S_PER_RANK = 3.602175540184374e-05, 7.236603830726217e-06, 5.266956020165437e-07
CALIBRATED_GB_S = 2039.0  # the data sheet's bandwidth of that GPU
# Ranks exchange integers, and the probabilities of a draft on ranks of its own, through the host. Measured by
# reading a link on one shared core, without the copies from and to GPUs: 256 KB (1 row, K = 2, 32k tokens)
# took 0.75 ms, 2 MB 3.0 ms, and 16.4 MB (64 rows) 39 ms. So it is a rate, and a time of each message.
HOST_BYTES_PER_S = 0.5e9
MESSAGE_S = 1e-4
# A pass of 16 rows of tokens reads its weights 3 % slower than one of a single row (A100, aiconfigurator).
ROWS_COST = {1: 1.0, 16: 1.03}
FLOPS_SHARE = 0.5  # of peak: what the GEMMs of a long prompt attain
# How far off a prediction may be: with constants of this machine, or of one like the published one; with
# constants of another machine, and for int8 and nf4, which the published runs do not use.
BAND, WIDE_BAND = 0.2, 0.5
# What the time of a pass goes to. LAYERS is the constant of each, LAUNCHING where the host takes longer to
# launch a pass than the GPU to run it.
READING, COMPUTING, CACHES = "reading weights", "arithmetic", "reading caches"
LAYERS, SUMS, LAUNCHING = "layers", "sums over ranks", "launches"
PASS_SUMS = 2  # collectives of a pass outside of layers: the embedding's sum, the head's logits


@dataclass(frozen=True)
class Times:
    """The constants, in seconds; `band` is how far off a prediction may be. Fields as in TimesConf."""

    bytes_per_s: float
    flops_per_s: float
    rows_cost: tuple[tuple[int, float], ...]
    layer: float
    step: float
    round: float
    check: float
    probs: float
    accept: float
    reduce: tuple[tuple[int, float], ...]
    link_per_s: float
    message: float
    band: float
    source: str


@dataclass(frozen=True)
class CodedCost:
    """Quantised matrices of one efficiency: bytes of codes and scales, and numbers."""

    bytes: float
    numbers: float
    how: Efficiency

    def seconds(self, times: Times, tokens: int) -> tuple[float, bool]:
        """The time of their products in a pass of `tokens` tokens, and whether reading limits it."""
        moved = self.how.moved * self.numbers if tokens >= self.how.moves_from else 0.0
        reading = self.bytes * self.how.read / times.bytes_per_s
        computing = 2 * self.numbers * tokens / (times.flops_per_s * self.how.share)
        return moved / times.bytes_per_s + max(reading, computing), reading >= computing


@dataclass(frozen=True)
class PassCost:
    """What the busiest rank of a role reads and computes in a pass.

    `weights` in bytes, `slot` in bytes of a row's cache for each slot, `flops` for each token, `sums` over
    ranks, `width` in bytes of a token's state. Each token chooses the share `chosen` of `experts`, in bytes.
    """

    ranks: int
    layers: int
    weights: float  # with codes and scales
    slot: float
    flops: float
    sums: int
    width: int
    vocab: int
    experts: float = 0.0
    chosen: float = 0.0
    attention: float = 0.0  # operations for each token and each slot that it attends to
    coded: tuple[CodedCost, ...] = ()  # of `weights`
    share: Points = PLAIN  # of the machine's operations a second, of plain weights
    plain_read: float = 1.0  # of plain weights, as Efficiency.read

    def read(self, tokens: int) -> float:
        """Bytes of weights that a pass reads: tokens choose experts independently, some of them the same."""
        return self.weights + self.experts * (1 - (1 - self.chosen) ** tokens)


def times_of(conf: TimesConf, gb_s: float, tflops: float, link_gb_s: float | None, borrowed: bool) -> Times:
    """The constants of a cluster; its own take precedence over the calibrated ones."""
    attained = BYTES_PER_S / 1e9 / CALIBRATED_GB_S if conf.bandwidth_share is None else conf.bandwidth_share
    reduce = conf.all_reduce_us or {n: 1e6 * (SUM_S + SUM_S_PER_RANK * (n - 1)) for n in (2, 4, 8, 16)}
    return Times(
        bytes_per_s=gb_s * 1e9 * attained,
        flops_per_s=tflops * 1e12 * (FLOPS_SHARE if conf.flops_share is None else conf.flops_share),
        rows_cost=tuple(sorted((conf.rows_cost or ROWS_COST).items())),
        layer=LAYER_S if conf.layer_us is None else conf.layer_us / 1e6,
        step=(conf.step_us or 0.0) / 1e6,
        round=(conf.round_us or 0.0) / 1e6,
        check=(conf.check_us or 0.0) / 1e6,
        probs=(conf.law_ns or 0.0) / 1e9,
        accept=(conf.accept_ns or 0.0) / 1e9,
        reduce=tuple((n, us / 1e6) for n, us in sorted(reduce.items())),
        link_per_s=(link_gb_s or 1e6) * 1e9,
        message=MESSAGE_S if conf.message_us is None else conf.message_us / 1e6,
        band=WIDE_BAND if borrowed else BAND,
        source=conf.source or "published runs of Llama-2-7B on A100-80 (gpt-fast)",
    )


def pass_cost(role: Role, ranks: int, store: Storage = AS_THEY_ARE) -> PassCost:
    """The cost for the first rank, which holds what does not divide evenly; `store`: how it keeps weights."""
    part = ModelPart.of(role.model, ranks)
    not_read = (POSITIONS, BUFFERS, EXPERTS) if part.tied else (EMBEDDING, POSITIONS, BUFFERS, EXPERTS)
    found = held(part, role.dtype)
    read = sum(size for group, size in found.items() if group not in not_read)
    chosen = part.experts_per_token / part.experts if part.expert_layers else 0.0
    shares = {**dict.fromkeys(not_read, 0.0), EXPERTS: chosen}  # of a group's numbers, for each token
    numbers = sum(weight.count * weight.times * shares.get(weight.group, 1.0) for weight in weights(part))
    # All-reduces of a layer: after attention, after the MLP, and in norms over the heads of all ranks.
    sums = (2 + part.family.whole_qk_norm) * part.layers + PASS_SUMS if ranks > 1 else 0
    w = width(role.dtype)
    slot = 2.0 * part.layers * part.key_width * w
    scores = 4.0 * part.layers * part.query_width  # products with keys, then with values
    own = sums, part.dim * w, part.whole_vocab, found.get(EXPERTS, 0), chosen, scores
    coded = _coded(part, role.dtype, store)
    return PassCost(ranks, part.layers, read, slot, 2.0 * numbers, *own, coded, *of_plain(store))


def _coded(part: ModelPart, dtype: Dtype, store: Storage) -> tuple[CodedCost, ...]:
    """The quantised matrices of a rank."""
    found: dict[Efficiency, tuple[float, float]] = {}
    for weight in weights(part, dtype is Dtype.packed):
        how = efficiency_of(weight, dtype, store)
        if how and weight.group != EXPERTS:  # of which a pass reads some
            size, numbers = found.get(how, (0.0, 0.0))
            size += weight.times * sum(bytes_ for _, bytes_ in bytes_of(weight, dtype))
            found[how] = size, numbers + weight.times * weight.count
    return tuple(CodedCost(*sizes, how) for how, sizes in found.items())


def forward_s(cost: PassCost, times: Times, rows: int, each: int, slots: float) -> float:
    """Seconds of one pass over `each` tokens of each row, which attends to `slots` cached ones."""
    return sum(forward_parts(cost, times, rows, each, slots).values())


def forward_parts(cost: PassCost, times: Times, rows: int, each: int, slots: float) -> dict[str, float]:
    """The same by what the seconds go to."""
    tokens, ranks = rows * each, cost.ranks
    plain = cost.read(tokens) - sum(each.bytes for each in cost.coded)
    numbers = cost.flops - 2 * sum(each.numbers for each in cost.coded)
    reading = plain * cost.plain_read / times.bytes_per_s * between(times.rows_cost, tokens)
    computing = numbers * tokens / (times.flops_per_s * between(cost.share, tokens))
    spent = dict.fromkeys((READING, COMPUTING, CACHES, LAYERS, SUMS), 0.0)
    spent[READING if reading >= computing else COMPUTING] += max(reading, computing)
    for coded in cost.coded:
        seconds, is_reading = coded.seconds(times, tokens)
        spent[READING if is_reading else COMPUTING] += seconds
    scoring = cost.attention * tokens * (slots + each / 2) / times.flops_per_s  # causal among the new ones
    loading = cost.slot * rows * slots / times.bytes_per_s
    spent[CACHES if loading >= scoring else COMPUTING] += max(loading, scoring)
    spent[LAYERS] = cost.layers * times.layer + times.step
    traffic = 2 * cost.width * tokens * (ranks - 1) / ranks / times.link_per_s
    spent[SUMS] = cost.sums * (between(times.reduce, ranks) + traffic) if ranks > 1 else 0.0
    return spent


def prefill_s(
    cost: PassCost, times: Times, rows: int, prompt: int, chunk: int, least_s: float = 0.0
) -> float:
    """Seconds of prefill, a chunk of each row at a time; a pass takes `least_s` at least."""
    starts = range(0, prompt, chunk)
    return sum(max(forward_s(cost, times, rows, min(chunk, prompt - at), at), least_s) for at in starts)


def between(points: tuple[tuple[int, float], ...], at: int) -> float:
    """Linear interpolation between known points, and extrapolation beyond the last."""
    if len(points) == 1 or at <= points[0][0]:
        return points[0][1]
    index = min(max(bisect_left([n for n, _ in points], at), 1), len(points) - 1)
    (left, low), (right, high) = points[index - 1], points[index]
    return low + (high - low) * (at - left) / (right - left)


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of a draft step, and of verifying k drafts (`verify[k]`), of `rows` rows.

    `once` is what drafts take however many there are: the pass of a head that gives all at once. `overlap` is
    what the draft does while the target verifies; `off` unless it has ranks of its own. `sending` is what the
    probabilities of a draft take from there to the leader, which waits for them in every round.
    """

    draft: float
    verify: tuple[float, ...]
    rows: int
    overlap: Overlap = Overlap.off
    once: float = 0.0
    sending: float = 0.0

    def proposal_s(self, k: int) -> float:
        """Seconds of K drafts, until the leader has them."""
        return k * (self.draft + self.sending) + (self.once if k else 0.0)

    def round_s(self, k: int, acceptance: float) -> float:
        """Seconds of a round with K drafts."""
        if self.goes_ahead(k, acceptance):
            return self._ahead_s(k, acceptance)
        return self.proposal_s(k) + self.verify[k]

    def goes_ahead(self, k: int, acceptance: float) -> bool:
        """Whether the draft runs while the target verifies; with `auto` it does where that is faster."""
        if self.overlap is Overlap.auto:
            return k > 0 and self._ahead_s(k, acceptance) < self.proposal_s(k) + self.verify[k]
        return self.overlap is not Overlap.off and k > 0

    def guessed(self, k: int, acceptance: float) -> float:
        """The share of rounds in which the guessed continuation of every row is right.

        All drafts are accepted, and the next token is the guess: two distributions with the common part `a`
        race to the same token with probability a / (2 - a) at least (rng.race).
        """
        return float((acceptance**k * acceptance / (2 - acceptance)) ** self.rows)

    def ms_per_token(self, acceptance: float, k: int) -> float:
        """Of the batch: every row gets its tokens in the same round."""
        return 1000 * self.round_s(k, acceptance) / (self.rows * tokens_per_round(acceptance, k))

    def best_k(self, acceptance: float) -> int:
        return min(range(len(self.verify)), key=lambda k: self.ms_per_token(acceptance, k))

    def _ahead_s(self, k: int, acceptance: float) -> float:
        """The guess and K drafts while the target verifies; K drafts more where the guess was wrong.

        A request that arrives before they are done waits for the end of a pass, half a pass on average. The
        drafts are sent when the leader requests them, and not before.
        """
        ahead, verify, right = (k + 1) * self.draft, self.verify[k], self.guessed(k, acceptance)
        interrupted = self.draft / 2 if ahead > verify else 0.0
        waited = right * max(verify, ahead) + (1 - right) * (k * self.draft + verify + interrupted)
        return waited + k * self.sending


ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def at_acceptance(times: RoundTimes, acceptance: float, regular_ms: float) -> dict[str, float]:
    """Returns the best K at an acceptance, and its speed-up over regular sampling, named as in the JSON."""
    k = times.best_k(acceptance)
    ms, tokens = times.ms_per_token(acceptance, k), tokens_per_round(acceptance, k)
    speeds = {"ms_per_token": ms, "speedup": regular_ms / ms, "tokens_per_round": tokens}
    return {"acceptance": acceptance, "k": k, **speeds}


def break_even(times: RoundTimes, regular_ms: float) -> float | None:
    """The acceptance from which drafting pays; None if it never does."""
    ks = range(1, len(times.verify))

    def pays(acceptance: float) -> bool:
        return min((times.ms_per_token(acceptance, k) for k in ks), default=regular_ms) < regular_ms

    if not pays(1.0):
        return None
    return (1 + bisect_left(range(1, 1024), True, key=lambda n: pays(n / 1024))) / 1024
