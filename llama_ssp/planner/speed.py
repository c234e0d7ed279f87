"""The time of a step: bytes over bandwidth, a constant and two sums a layer, two more a step. No torch.

    t = max(bytes / bandwidth, operations / rate) + layers * c + [ranks > 1] * (2 * layers + 2) * sum(ranks)

of the rank that reads most; the first term for each number format (rates.py). Ranks of several nodes sum over
the network, which adds its latency and the bytes over its bandwidth to each sum. A round adds what the host
does: messages, the way of a draft's probabilities, and waits (search.py). Four published runs determine the
constants exactly; tests compare other published runs. The constants hold for bf16, one row, CUDA graphs and
preallocated caches; elsewhere the band is wide, and task=calibrate measures.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llama_ssp.config import Dtype, Overlap, TimesConf
from llama_ssp.models.tensor_row import BUFFERS, EMBEDDING, EXPERTS, POSITIONS
from llama_ssp.planner.rates import PACKED_MULTIPLY, PACKED_READ, Rate, plain_rate, rate_of
from llama_ssp.planner.storage import AS_THEY_ARE, Storage, bytes_of, width
from llama_ssp.planner.weights import ModelPart, held, weights
from llama_ssp.planner.workload import Role
from llama_ssp.speculative.draft_length import (
    PairAcceptance,
    all_stand,
    first_stands,
    tokens_per_round,
)

# The four constants that give the published runs (tests/test_plan_speed.py): gpt-fast README, Llama-2-7B
# bf16 on 1, 2, 4 and 8 A100-80 limited to 330 W, one row, 5 tokens of prompt.
BYTES_PER_S = 1576831925929.5686
LAYER_S = 3.602175540184374e-05
SUM_S = 7.236603830726217e-06
SUM_S_PER_RANK = 5.266956020165437e-07
CALIBRATED_GB_S = 2039.0  # the data sheet's bandwidth of that GPU
# Ranks exchange integers, and the probabilities of a draft on ranks of its own, through the host. Measured on
# two cores by two processes, without the copies from and to GPUs (bench/replies.py): from 2 MB (1 row, K = 4,
# 128k tokens) to 16 MB (64 rows, K = 2, 32k tokens) a reply takes half a millisecond and its bytes over this
# rate. A message between the processes of a server with idle cores takes less; this is an estimate.
HOST_BYTES_PER_S = 1.7e9
MESSAGE_S = 1e-4
# Between nodes of which nothing is known: TCP over Ethernet of 25 Gbit, an assumption.
BETWEEN_US = 100.0
BETWEEN_GB_S = 3.1
FLOPS_SHARE = 0.5  # of peak: what the GEMMs of a long prompt attain
# How far off a prediction may be (bench/plan_speed.py): with constants of a GPU like the published one; with
# those that were measured on the same CPU; and with constants of another machine, or for int8 and nf4, which
# the published runs do not use.
BAND = 0.2
CPU_BAND = 0.25
WIDE_BAND = 0.5
PASS_SUMS = 2  # collectives of a pass outside of layers: the embedding's sum, the head's logits
LONGEST_STEP = 16  # tokens of a row after each of which its state is kept; of more, states of the last ones


@dataclass(frozen=True, kw_only=True)
class Times:
    """The constants, in seconds; `band` is how far off a prediction may be. Fields as in TimesConf.

    `borrowed`: they are another CPU's.
    """

    bytes_per_s: float
    flops_per_s: float
    kernel_bytes_per_s: float
    kernel_flops_per_s: float
    layer: float
    step: float
    round: float
    check: float
    probs: float
    accept: float
    reduce: tuple[tuple[int, float], ...]
    link_per_s: float
    network: float
    network_per_s: float
    message: float
    band: float
    source: str
    borrowed: bool = False


@dataclass(frozen=True)
class Product:
    """Matrices of one rate: their bytes, with scales, and their numbers."""

    rate: Rate
    bytes: float
    numbers: float

    def seconds(self, times: Times, tokens: int) -> float:
        """Returns the time of a pass of `tokens` tokens: the longer of reading and multiplying."""
        bytes_per_s = times.bytes_per_s
        flops_per_s = times.flops_per_s
        if self.rate.by_kernel:
            bytes_per_s = times.kernel_bytes_per_s
            flops_per_s = times.kernel_flops_per_s
        reading = self.bytes / (bytes_per_s * self.rate.read)
        multiplying = 2 * self.numbers * tokens / (flops_per_s * self.rate.multiply)
        return max(reading, multiplying)


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """What the busiest rank of a role reads and computes in a pass; the ranks are on so many `nodes`.

    `plain` are weights that are not quantised, and `coded` the others by their rates. `slot` is in bytes of a
    row's cache for each slot, `sums` over ranks, `width` in bytes of a token's state. Each token chooses the
    share `chosen` of `experts`, in bytes; their numbers are with those of `plain`.
    """

    ranks: int
    layers: int
    plain: Product
    coded: tuple[Product, ...] = ()
    experts: float = 0.0
    chosen: float = 0.0
    slot: float = 0.0
    attention: float = 0.0  # operations for each token and each slot that it attends to
    state: float = 0.0  # bytes of a row's states after one token, which is read once and written for each
    sums: int = 0
    width: int = 0
    vocab: int = 0
    nodes: int = 1

    @property
    def crossings(self) -> int:
        """Returns how many sums of a pass go over the network between nodes."""
        return self.sums if self.nodes > 1 else 0

    @property
    def weights(self) -> float:
        """Bytes of weights that every pass reads, with codes and scales."""
        return self.plain.bytes + sum(product.bytes for product in self.coded)

    @property
    def flops(self) -> float:
        """Operations for each token."""
        return 2 * (self.plain.numbers + sum(product.numbers for product in self.coded))

    def sent(self, tokens: int) -> float:
        """Returns the bytes of a sum over ranks that pass each link, in both directions."""
        return 2 * self.width * tokens * (self.ranks - 1) / self.ranks

    def experts_read(self, tokens: int) -> float:
        """Bytes of experts that a pass reads: tokens choose independently, some of them the same."""
        return self.experts * (1 - (1 - self.chosen) ** tokens)


def times_of(
    conf: TimesConf,
    gb_s: float,
    tflops: float,
    link_gb_s: float | None,
    *,
    between_us: float | None = None,
    between_gb_s: float | None = None,
    on_cpu: bool = False,
    borrowed: bool = False,
) -> Times:
    """Returns the constants of a cluster; its own take precedence over the calibrated ones.

    `borrowed`: they are another CPU's.
    """
    band = CPU_BAND if on_cpu else BAND
    attained = BYTES_PER_S / 1e9 / CALIBRATED_GB_S if conf.bandwidth_share is None else conf.bandwidth_share
    bytes_per_s = gb_s * 1e9 * attained
    flops_per_s = tflops * 1e12 * (FLOPS_SHARE if conf.flops_share is None else conf.flops_share)
    kernel_bytes_per_s = bytes_per_s / PACKED_READ
    if conf.kernel_gb_s is not None:
        kernel_bytes_per_s = conf.kernel_gb_s * 1e9
    kernel_flops_per_s = flops_per_s * PACKED_MULTIPLY
    if conf.kernel_tflops is not None:
        kernel_flops_per_s = conf.kernel_tflops * 1e12
    reduce = conf.all_reduce_us or {n: 1e6 * (SUM_S + SUM_S_PER_RANK * (n - 1)) for n in (2, 4, 8, 16)}
    return Times(
        bytes_per_s=bytes_per_s,
        flops_per_s=flops_per_s,
        kernel_bytes_per_s=kernel_bytes_per_s,
        kernel_flops_per_s=kernel_flops_per_s,
        layer=LAYER_S if conf.layer_us is None else conf.layer_us / 1e6,
        step=(conf.step_us or 0.0) / 1e6,
        round=(conf.round_us or 0.0) / 1e6,
        check=(conf.check_us or 0.0) / 1e6,
        probs=(conf.law_ns or 0.0) / 1e9,
        accept=(conf.accept_ns or 0.0) / 1e9,
        reduce=tuple((n, us / 1e6) for n, us in sorted(reduce.items())),
        link_per_s=(link_gb_s or 1e6) * 1e9,
        network=(BETWEEN_US if between_us is None else between_us) / 1e6,
        network_per_s=(between_gb_s or BETWEEN_GB_S) * 1e9,
        message=MESSAGE_S if conf.message_us is None else conf.message_us / 1e6,
        band=WIDE_BAND if borrowed else band,
        borrowed=borrowed,
        source=conf.source or "published runs of Llama-2-7B on A100-80 (gpt-fast)",
    )


def pass_cost(role: Role, ranks: int, store: Storage = AS_THEY_ARE, nodes: int = 1) -> PassCost:
    """Returns the cost for the first rank, which holds what does not divide evenly.

    `store`: how it keeps weights. The ranks are on so many `nodes`.
    """
    part = ModelPart.of(role.model, ranks)
    not_read = {POSITIONS, BUFFERS, EXPERTS}
    if not part.tied:
        not_read.add(EMBEDDING)
    sizes = held(part, role.dtype)
    read = sum(size for group, size in sizes.items() if group not in not_read)
    chosen = part.experts_per_token / part.experts if part.expert_layers else 0.0
    shares = {**dict.fromkeys(not_read, 0.0), EXPERTS: chosen}  # of a group's numbers, for each token
    numbers = sum(weight.count * weight.times * shares.get(weight.group, 1.0) for weight in weights(part))

    coded = _coded(part, role.dtype, store)
    plain = Product(
        rate=plain_rate(store),
        bytes=read - sum(product.bytes for product in coded),
        numbers=numbers - sum(product.numbers for product in coded),
    )
    # All-reduces of a layer: after attention, after the MLP, in norms over the heads of all ranks, and after
    # experts next to an MLP.
    sums_of_layer = 3 if part.family.whole_qk_norm else 2
    further = part.expert_layers if part.family.dense_too else 0
    if part.shares_cache:  # of tokens, of embeddings, of what blocks are given
        further += 1
    bytes_of_number = width(role.dtype)
    return PassCost(
        ranks=ranks,
        layers=part.layers,
        plain=plain,
        coded=coded,
        experts=sizes.get(EXPERTS, 0),
        chosen=chosen,
        slot=2.0 * sum(heads.layers * heads.key_width for heads in part.heads) * bytes_of_number,
        # Products with keys, then with values.
        attention=4.0 * sum(heads.layers * heads.query_width for heads in part.heads),
        state=float(part.linear_layers * part.state_numbers * width(role.dtype, wide=True)),
        sums=sums_of_layer * part.layers + further + PASS_SUMS if ranks > 1 else 0,
        width=part.dim * bytes_of_number,
        vocab=part.whole_vocab,
        nodes=nodes,
    )


def _coded(part: ModelPart, dtype: Dtype, store: Storage) -> tuple[Product, ...]:
    """Returns the quantised matrices of a rank by their rates; experts, of which a pass reads some, are none.

    Where the device is not known they are multiplied like plain ones.
    """
    sums: dict[Rate, tuple[float, float]] = {}
    for weight in weights(part, dtype is Dtype.packed):
        if weight.group == EXPERTS or not weight.kept(dtype).bits or not store.kernel:
            continue
        rate = rate_of(weight, dtype, store)
        size, numbers = sums.get(rate, (0.0, 0.0))
        size += weight.times * sum(bytes_ for _, bytes_ in bytes_of(weight, dtype))
        sums[rate] = size, numbers + weight.times * weight.count
    return tuple(Product(rate, size, numbers) for rate, (size, numbers) in sums.items())


def forward_s(cost: PassCost, times: Times, rows: int, each: int, slots: float) -> float:
    """Returns the seconds of a pass over `each` tokens of each row, which attends to `slots` cached ones."""
    tokens = rows * each
    plain = replace(cost.plain, bytes=cost.plain.bytes + cost.experts_read(tokens))
    products = sum(product.seconds(times, tokens) for product in (plain, *cost.coded))

    states = min(each, LONGEST_STEP) + 1  # of a row; a prompt leaves its last ones
    loading = (cost.slot * rows * slots + cost.state * rows * states) / times.bytes_per_s
    scoring = cost.attention * tokens * (slots + each / 2) / times.flops_per_s  # causal among the new ones
    constant = cost.layers * times.layer + times.step

    sums = 0.0
    if cost.ranks > 1:
        sent = cost.sent(tokens)
        sums = cost.sums * (between(times.reduce, cost.ranks) + sent / times.link_per_s)
        sums += cost.crossings * (hops(cost.nodes) * times.network + sent / times.network_per_s)
    return products + max(loading, scoring) + constant + sums


def hops(nodes: int) -> int:
    """Returns how many times the network's latency a sum over nodes takes: the depth of a binary tree."""
    return (nodes - 1).bit_length()


def prefill_s(
    cost: PassCost, times: Times, rows: int, prompt: int, chunk: int, least_s: float = 0.0
) -> float:
    """Returns the seconds of prefill, a chunk of each row at a time; a pass takes `least_s` at least."""
    starts = range(0, prompt, chunk)
    return sum(max(forward_s(cost, times, rows, min(chunk, prompt - at), at), least_s) for at in starts)


def between(points: tuple[tuple[int, float], ...], at: int) -> float:
    """Interpolates linearly between known points, and extrapolates beyond the last."""
    if len(points) == 1 or at <= points[0][0]:
        return points[0][1]
    index = min(max(bisect_left([n for n, _ in points], at), 1), len(points) - 1)
    left, low = points[index - 1]
    right, high = points[index]
    return low + (high - low) * (at - left) / (right - left)


@dataclass(frozen=True, kw_only=True)
class RoundTimes:
    """Seconds of a draft step, and of verifying k drafts (`verify[k]`), for `rows` rows.

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
        """Returns the seconds of K drafts, until the leader has them."""
        return k * (self.draft + self.sending) + (self.once if k else 0.0)

    def round_s(self, k: int, acceptance: PairAcceptance) -> float:
        """Returns the seconds of a round with K drafts."""
        if self.goes_ahead(k, acceptance):
            return self._ahead_s(k, acceptance)
        return self.proposal_s(k) + self.verify[k]

    def mean_round_s(self, drafts: float, acceptance: PairAcceptance) -> float:
        """Returns the seconds of a round that has so many drafts in the mean."""
        low = min(int(drafts), len(self.verify) - 1)
        high = min(low + 1, len(self.verify) - 1)
        share = min(drafts - low, 1.0)
        return (1 - share) * self.round_s(low, acceptance) + share * self.round_s(high, acceptance)

    def goes_ahead(self, k: int, acceptance: PairAcceptance) -> bool:
        """Returns whether the draft runs while the target verifies; with `auto` where that is faster."""
        if self.overlap is Overlap.auto:
            return k > 0 and self._ahead_s(k, acceptance) < self.proposal_s(k) + self.verify[k]
        return self.overlap is not Overlap.off and k > 0

    def guessed(self, k: int, acceptance: PairAcceptance) -> float:
        """Returns the share of rounds in which the guessed continuation of every row is right.

        All drafts are accepted, and the next token is the guess: two distributions with the common part `a`
        race to the same token with probability a / (2 - a) at least (rng.race).
        """
        common = first_stands(acceptance)
        return float((all_stand(acceptance, k) * common / (2 - common)) ** self.rows)

    def ms_per_token(self, acceptance: PairAcceptance, k: int) -> float:
        """Returns the time of a token of the batch: every row gets its tokens in the same round."""
        return 1000 * self.round_s(k, acceptance) / (self.rows * tokens_per_round(acceptance, k))

    def best_k(self, acceptance: PairAcceptance) -> int:
        return min(range(len(self.verify)), key=lambda k: self.ms_per_token(acceptance, k))

    def _ahead_s(self, k: int, acceptance: PairAcceptance) -> float:
        """Counts the guess and K drafts while the target verifies; K drafts more where the guess was wrong.

        A request that arrives before they are done waits for the end of a pass, half a pass on average.
        Sending counts in each round: what is sent before its request is small.
        """
        ahead = (k + 1) * self.draft
        verify = self.verify[k]
        right = self.guessed(k, acceptance)
        interrupted = self.draft / 2 if ahead > verify else 0.0
        waited = right * max(verify, ahead) + (1 - right) * (k * self.draft + verify + interrupted)
        return waited + k * self.sending


ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def at_acceptance(every: Sequence[RoundTimes], acceptance: float, regular_ms: float) -> dict[str, float]:
    """Returns the best of these placements at an acceptance, with its best K, named as in the JSON."""
    times = min(every, key=lambda one: one.ms_per_token(acceptance, one.best_k(acceptance)))
    k = times.best_k(acceptance)
    ms = times.ms_per_token(acceptance, k)
    return {
        "acceptance": acceptance,
        "k": k,
        "ms_per_token": ms,
        "speedup": regular_ms / ms,
        "tokens_per_round": tokens_per_round(acceptance, k),
    }


def break_even(every: Sequence[RoundTimes], regular_ms: float) -> float | None:
    """Returns the acceptance from which drafting pays with one of these placements; None if it never does."""

    def pays(acceptance: float) -> bool:
        return any(
            times.ms_per_token(acceptance, k) < regular_ms
            for times in every
            for k in range(1, len(times.verify))
        )

    if not pays(1.0):
        return None
    return (1 + bisect_left(range(1, 1024), True, key=lambda n: pays(n / 1024))) / 1024
