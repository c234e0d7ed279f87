"""What task=measure makes of clocks, on made-up samples; intervals, against published figures."""

import pytest
from scipy import stats

from llama_ssp.report.speed_stats import Record, Sample, Speeds, predicted
from llama_ssp.report.statistics import median_coverage, median_of, paired_difference, percentiles, wilson
from llama_ssp.report.tables import text_of
from llama_ssp.report.task_tables import speeds as shown
from llama_ssp.speculative.stats import Counts


def sample(ms: float, accepted: int = 0, rejected: int = 0, tokens: int = 100) -> Sample:
    """A turn of so many ms a token, after a prefill that must not show in it."""
    counts = Counts(row_rounds=tokens - accepted, committed=tokens)
    counts.accepted[0], counts.drafted[0] = accepted, accepted + rejected
    counts.decided = accepted + rejected
    counts.prefill_s, counts.decode_s = 5.0, tokens * ms / 1000
    found = Sample(inter_token_ms=[ms] * 99 + [10 * ms])
    found.take(5.0 + ms / 1000, counts)
    return found


def speeds(repeats: int = 3) -> Speeds:
    """The machine gets slower by half with each repeat; ratios do not."""
    slow = [1.5**n for n in range(repeats)]
    return Speeds(
        Record("target alone", 0, [sample(10 * s) for s in slow]),
        Record("draft alone", 0, [sample(2 * s) for s in slow]),
        [
            Record("pair, K = 1", 1, [sample(8 * s, 30, 10) for s in slow]),
            Record("pair, K = 4", 4, [sample(5 * s, 50, 30) for s in slow]),
        ],
    )


def test_ratios_do_not_drift_with_the_machine() -> None:
    figures = speeds().figures()
    for row, expected in zip(figures["pair"], (1.25, 2.0), strict=True):
        assert (row["speedup"], row["speedup_low"], row["speedup_high"]) == pytest.approx((expected,) * 3)
    assert figures["cost_ratio"] == pytest.approx(0.2)
    assert figures["best"] == {"k": 4, "speedup": pytest.approx(2.0)}


def test_times_are_the_median_of_the_repeats() -> None:
    """With an interval."""
    figures = speeds().figures()
    target = figures["target_alone"]
    assert target["ms_per_token"] == pytest.approx(15)
    assert target["ms_per_token_by_repeat"] == pytest.approx([10, 15, 22.5])
    assert (target["ms_per_token_low"], target["ms_per_token_high"]) == pytest.approx((10, 22.5))
    assert figures["interval_coverage"] == pytest.approx(0.75)


def test_one_repeat_has_no_interval() -> None:
    assert speeds(1).figures()["target_alone"]["ms_per_token_low"] is None


def test_prefill_is_in_the_first_token_alone() -> None:
    single = speeds(1).figures()["target_alone"]
    assert single["tokens_per_s"] == pytest.approx(100)
    assert single["time_to_first_token_ms"] == pytest.approx(5010)


def test_the_times_between_tokens_have_percentiles() -> None:
    single = speeds(1).figures()["target_alone"]
    assert single["inter_token_ms_p50"] == single["inter_token_ms_p90"] == pytest.approx(10)
    assert 10 < single["inter_token_ms_p99"] < 100


def test_the_prediction_is_leviathans() -> None:
    figures = speeds().figures()
    alpha = 80 / 120
    assert figures["alpha"] == pytest.approx(alpha)
    for row in figures["pair"]:
        k = row["k"]
        closed = (1 - alpha ** (k + 1)) / ((1 - alpha) * (k * 0.2 + 1))
        assert row["predicted_speedup"] == pytest.approx(closed), k


def test_a_draft_that_always_stands_at_no_cost_gives_k_more_tokens() -> None:
    assert predicted(1.0, 0.0, 4) == 5  # where the closed form divides by zero


def test_there_is_no_prediction_of_what_is_not_known() -> None:
    assert predicted(None, 0.2, 4) is predicted(0.5, None, 4) is predicted(0.5, 0.2, None) is None


def test_counters_are_those_of_all_repeats() -> None:
    row = speeds().figures()["pair"][-1]
    assert (row["tokens_committed"], row["tokens_accepted"], row["tokens_drafted"]) == (300, 150, 240)
    assert row["acceptance_rate"] == pytest.approx(50 / 80) and row["repeats"] == 3


def test_what_was_stopped_is_reported_as_far_as_it_went() -> None:
    whole = speeds(2)
    whole.pair[1].samples.clear()
    whole.pair[0].samples.pop()
    found = whole.figures()
    assert found["pair"][0]["speedup"] == pytest.approx(1.25) and found["pair"][1]["speedup"] is None
    assert Speeds(Record("target alone", 0), None, []).figures()["target_alone"] == {}
    rows = [line.split("  ")[0] for line in text_of(shown(found))[1:4]]
    assert rows == ["target alone", "draft alone", "pair, K = 1"]


def test_the_table_says_what_it_shows() -> None:
    found = speeds(6).figures()
    found["pair"][1]["time_split_ms_per_token"] = {"draft": 1.0, "verify": 3.5}
    lines = text_of(shown(found))
    assert lines[0].split()[:3] == ["ms/token", "interval", "tokens/s"]
    assert "2.00" in lines[4] and "2.00..2.00" in lines[4]
    assert "pair, K = 4 1.00 3.50 4.50" in [" ".join(line.split()) for line in lines]
    assert any("fastest: K = 4, 2.00 times as fast" in line for line in lines)
    assert any("coverage 0.969" in line for line in lines)
    slow = speeds(1)
    slow.pair[:] = [Record("pair, K = 1", 1, [sample(12.5, 10, 90)])]
    said = "\n".join(text_of(shown(slow.figures())))
    assert "0.80 times as fast as the target alone; speculation does not pay here" in said


def test_what_came_of_a_draft_apart_is_summed() -> None:
    batch = {
        "rows_asked": 10, "rows_ready": 3, "ready_share": 0.3, "tokens_drafted_ahead": 40, "draft_lost": None,
        "tokens_drafted_ahead_wasted": 25, "leader_waited_ms": 50.0, "draft_waited_ms": 20.0,
    }  # fmt: skip
    other = {**batch, "rows_asked": 30, "rows_ready": 17, "draft_lost": "gone"}
    found = speeds(2)
    for one, overlap in zip(found.pair[1].samples, (batch, other), strict=True):
        one.overlaps.append(overlap)
    told = found.figures()["pair"]
    assert told[0]["overlap"] is None and told[1]["overlap"]["ready_share"] == 0.5
    assert (told[1]["overlap"]["rows_asked"], told[1]["overlap"]["draft_lost"]) == (40, "gone")


NEWCOMBE_1998 = [  # Statistics in Medicine 17, 857-872, table I, the score method
    (81, 263, 0.2553, 0.3662),
    (15, 148, 0.0624, 0.1605),
    (0, 20, 0.0000, 0.1611),
    (1, 29, 0.0061, 0.1718),
]
BONETT_PRICE = [  # gained, lost, n: Fagerland et al. 2014, table V; the documentation of R's statpsych
    (1, 7, 21, -0.2857, -0.508, -0.013, 3),
    (26, 4, 48, 0.4583, 0.2548067, 0.6251933, 7),
]


@pytest.mark.parametrize(("right", "n", "low", "high"), NEWCOMBE_1998)
def test_wilson_as_published(right: int, n: int, low: float, high: float) -> None:
    found = wilson(right, n)
    assert (found.value, round(found.low, 4), round(found.high, 4)) == (right / n, low, high)


@pytest.mark.parametrize("n", [1, 10, 4000])
def test_wilson_at_the_ends(n: int) -> None:
    none, every = wilson(0, n), wilson(n, n)
    assert none.low == 0 < none.high and every.low < 1 == every.high
    assert none.high == pytest.approx(1 - every.low)


@pytest.mark.parametrize(("gained", "lost", "n", "value", "low", "high", "digits"), BONETT_PRICE)
def test_the_difference_as_published(
    gained: int, lost: int, n: int, value: float, low: float, high: float, digits: int
) -> None:
    found = paired_difference(gained, lost, n)
    assert found.value == pytest.approx(value, abs=5e-5)
    assert (round(found.low, digits), round(found.high, digits)) == (low, high)


def test_the_difference_turns_with_its_runs() -> None:
    one, other = paired_difference(3, 9, 50), paired_difference(9, 3, 50)
    assert (one.value, one.low, one.high) == pytest.approx((-other.value, -other.high, -other.low))


def test_the_difference_is_never_certain() -> None:
    same = paired_difference(0, 0, 1000)
    assert same.value == 0 and same.low == -same.high and 0.002 < same.high < 0.004


@pytest.mark.parametrize("n", [1, 2])
def test_the_difference_of_few_runs_is_a_share(n: int) -> None:
    every = paired_difference(n, 0, n)
    assert -1 <= every.low <= every.high <= 1


@pytest.mark.parametrize(("n", "coverage"), [(1, 0.0), (2, 0.5), (5, 0.9375), (6, 0.96875), (9, 0.9609375)])
def test_the_medians_interval_covers_what_it_says(n: int, coverage: float) -> None:
    """Against the binomial distribution of how many values are below the median."""
    found = median_of([float(i) for i in range(n)])
    left_out = int(found.low)
    assert found.high == n - 1 - left_out
    assert median_coverage(n) == pytest.approx(1 - 2 * stats.binom.cdf(left_out, n, 0.5)) == coverage
    assert n < 6 or coverage >= 0.95


def test_the_medians_interval_is_the_narrowest_that_covers() -> None:
    for n in range(6, 60):
        left_out = int(median_of([float(i) for i in range(n)]).low)
        covers, narrower = (1 - 2 * stats.binom.cdf(left_out + more, n, 0.5) for more in (0, 1))
        assert covers >= 0.95 > narrower, n
    assert percentiles([float(i) for i in range(101)], (50, 90, 99)) == [50, 90, 99]
    assert percentiles([3.0], (50, 99)) == [3, 3] and percentiles([], (50,)) == [None]
