"""Parts of bench/gpu.py: how fast a GPU is. Each part is a function that yields its figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from bars import Bar, most, needs, safely
from contenders import PROMPTS, SMALL, by_us, in_turn, one_round, rounds, texts_run
from gpu_kernels import best_bandwidth, coded_products
from profiled import GRAPHS, LAUNCHES, WAITS, binned, by_name, called, gaps, kernels, total
from replays import Replays
from torch.profiler import ProfilerActivity, profile, record_function

from llama_ssp import load_pair
from llama_ssp.config import Drafting, RunConf, SamplingConfig
from llama_ssp.config.compose import composed
from llama_ssp.models import experts as mixtures
from llama_ssp.models.cuda_graphs import SharedMemory
from llama_ssp.models.graph_sizes import MOST
from llama_ssp.pair.session import PairSession, ranks_of
from llama_ssp.placing.pairs import pair_specs
from llama_ssp.placing.prediction import DEVICE, HELD_BYTES, RESERVED, TENSORS, compare_with_plan
from llama_ssp.planner.speed import pass_cost
from llama_ssp.planner.workload import Role
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks.batch import fix_k
from llama_ssp.tasks.common import memory_of_ranks

if TYPE_CHECKING:
    from gpu import How

VOCAB, AGREEMENT, K = 32000, 0.8, 4
WIDTHS = (1, 2, 5)  # tokens of a step
SLOTS = {False: (64, 2048, 32000), True: (16, 300)}  # tokens before it
MAX_TOKENS = 512  # of a text, where steps after many tokens are not timed
TURNS = {False: 11, True: 2}
NEW = {False: 64, True: 8}  # tokens of a text
MEMORY = {False: ((64, 448), (1, 448)), True: ((8, 40), (1, 40))}  # rows, and tokens of their prompts
SHARE_READ = 0.8  # of the best bandwidth, that a step reads
OVER_PARTS = 1.05  # a round over its steps
MAX_LAUNCHES, MAX_IDLE = 60, 0.1  # of a round, besides its graphs
LARGE_OVER_REGULAR, INT8_OVER_BF16 = 1.8, 1.4
PROFILED = 4  # rounds
CONTROLS = {
    "plain": SamplingConfig(),
    "filtered": SamplingConfig(temperature=0.8, top_k=40, top_p=0.95),
    "penalised": SamplingConfig(repetition_penalty=1.1, min_new_tokens=4),
}
PROMPT = {False: 4096, True: 40}  # tokens
ROWS = {False: 64, True: 3}
KEPT_KS = {False: (0, 1, 2, 3, 5, 6, 8), True: (0, 2)}  # besides those that are measured
ROUNDS = 4  # of texts that only show whether there are graphs
CHUNK = 512  # tokens that experts get at once
OFF_BY = 2e-2  # products of experts by two kernels, in bf16
EXPERTS = "gpt-oss-20b", "model.experts=128", "model.experts_per_token=8", "model.n_layers=2"
LARGE_GIB = 100  # of a GPU that holds 30B and 7B
PRODUCTS = re.compile("gemm|gemv|nvjet|cutlass|cublas|splitk", re.IGNORECASE)  # in names of kernels
COUNTED = 25  # names of kernels in a table
FORMATS = {False: ("bf16", "fp16", "int4", "nf4"), True: ("bf16", "int4")}  # `codes` has int8


def session_of(
    small: bool, target: str, draft: str | None, *more: str, max_tokens: int = MAX_TOKENS
) -> PairSession:
    """Returns a synthetic pair with compiled steps; the vocabulary of every model is LLaMA's."""
    words = [*words_of(small, draft is not None), *more]
    return load_pair(target, draft, max_tokens=max_tokens, overrides=words).session


def words_of(small: bool, has_draft: bool) -> list[str]:
    """Returns the settings of a synthetic pair with compiled steps."""
    words = ["engine=compiled", "task.ignore_eos=true"]
    for role in ("model", "draft") if has_draft else ("model",):
        words += [f"{role}.weights=synthetic", f"{role}.vocab={VOCAB}", f"{role}.context=40960"]
        words += [f"{role}.{size}" for size in SMALL if small]
    if has_draft:
        words.append(f"draft.agreement={AGREEMENT}")
    return words


def steps(how: How) -> Iterator[Bar]:
    """7B with 1B: everything about one pair."""
    read = best_bandwidth(how.small)
    pair = session_of(how.small, "7B", "llama3.2-1b", max_tokens=max(SLOTS[how.small]) + 128)
    yield from safely("plan", _plan(pair, how.small))  # first: what follows has caches of its own
    yield from safely("steps", _steps(pair, how.small, read, SLOTS[how.small], WIDTHS))
    yield from safely("a draft step", _draft_step(pair, how.small, read))
    yield from safely("profile of a step", _profiled_step(pair, how.small))
    yield from safely("profile of a round", _profiled_round(pair))
    yield from safely("texts", _texts(pair, how.small, (0, 2, 4, 6)))


def large(how: How) -> Iterator[Bar]:
    """30B with 7B, or where these do not fit with 1B."""
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 0
    draft = "7B" if gib > LARGE_GIB else "llama3.2-1b"
    pair = session_of(how.small, "30B", draft)
    yield Bar("GiB of the GPU", gib, note=f"the draft is {draft}")
    yield from safely("plan", _plan(pair, how.small))
    yield from safely("texts", _texts(pair, how.small, (0, 4), LARGE_OVER_REGULAR))


def steps_after(model: Any, slots: int, widths: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    """Returns the model's steps with so many tokens after a text of `slots`; all use one cache."""
    runner, end = ModelRunner(model), slots + max(widths)
    ids = torch.randint(3, VOCAB, (1, end), device=model.device)
    runner.start(1, end)
    runner.prefill(ids, [slots])

    def step(width: int) -> object:
        logits = runner.logits(ids, [slots + width], [width])
        runner.roll_back([slots + 1])
        return logits

    return {str(width): partial(step, width) for width in widths}


def _steps(
    pair: PairSession, small: bool, read: float, slots: tuple[int, ...], widths: tuple[int, ...]
) -> Iterator[Bar]:
    cost = pass_cost(Role("", pair.run.model, pair.placements.target.dtype), 1)
    for count in slots:
        taken = in_turn(steps_after(pair.models.target, count, widths), TURNS[small])
        for width, times in taken.items():
            ms, what = median(times), f"{count} slots, {width} tokens"
            share = (cost.weights + cost.slot * count) / (ms / 1000) / read
            yield Bar(f"{what}: ms of a step", ms)
            yield Bar(f"{what}: share of the bandwidth", share, SHARE_READ)


def _draft_step(pair: PairSession, small: bool, read: float) -> Iterator[Bar]:
    cost, slots = pass_cost(Role("", pair.run.draft, pair.placements.draft.dtype), 1), SLOTS[small][0]
    (times,) = in_turn(steps_after(pair.models.draft, slots, (1,)), TURNS[small]).values()
    yield Bar("ms of a draft step", median(times))
    share = (cost.weights + cost.slot * slots) / (median(times) / 1000) / read
    yield Bar("a draft step: share of the bandwidth", share)


def _profiled_step(pair: PairSession, small: bool) -> Iterator[Bar]:
    """Where the time of a step of one token goes."""
    (step,) = steps_after(pair.models.target, SLOTS[small][0], (1,)).values()
    for _ in range(3):
        step()
    yield from _kernels("a step", step)


def _profiled_round(pair: PairSession) -> Iterator[Bar]:
    """Where the time of a round goes, and how often the host waits and launches."""
    engine = pair.engine(0, end_ids=frozenset())
    state: Any = engine.prefill([Prompt("0", PROMPTS[0])], 256)

    def a_round() -> None:
        one_round(engine, state, K)

    for _ in range(8):
        a_round()
    yield from _kernels("a round", a_round)
    yield Bar("ms of a round", median(in_turn({"": a_round}, 21)[""]))
    over = float(rounds(pair, [K])[-1][-1])
    yield most(f"a round / ({K} draft steps + a step of {K + 1})", over, OVER_PARTS)


def _kernels(what: str, work: Callable[[], object]) -> Iterator[Bar]:
    """One line a kernel, then the gaps by what they lie between; each as microseconds of one `what`."""
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
    with profile(activities=activities) as seen, record_function(what):
        for _ in range(PROFILED):
            work()
    events = list(seen.events())
    calls, ran = called(events, what), kernels(events, what)
    limits = {"waits for the GPU": (WAITS, 1), "launches besides graphs": (LAUNCHES, MAX_LAUNCHES)}
    for name, (names, limit) in limits.items():
        yield (
            most(f"{what}: {name}", total(calls, names) / PROFILED, limit)
            if ran
            else needs(f"{what}: {name}")
        )
    yield Bar(f"{what}: graphs", total(calls, GRAPHS) / PROFILED)
    if not ran:
        yield needs(f"{what}: kernels and gaps")
        return
    named = by_name(ran)
    for name, (count, us) in list(named.items())[:COUNTED]:
        yield Bar(f"{what}: us in {name[:80]}", us / PROFILED, note=f"{count / PROFILED:g} times")
    products = sum(us for name, (_, us) in named.items() if PRODUCTS.search(name))
    others = sum(us for _, us in named.values()) - products
    yield Bar(f"{what}: us in products", products / PROFILED)
    yield Bar(f"{what}: us in other kernels", others / PROFILED, note=f"{len(ran) / PROFILED:g} kernels")
    idle = 0.0
    for name, lengths in gaps(ran).items():
        idle += sum(lengths)
        yield Bar(f"{what}: us in gaps {name}", sum(lengths) / PROFILED, note=binned(lengths))
    whole = ran[-1].time_range.end - ran[0].time_range.start
    yield most(f"{what}: share of idle time, while profiled", idle / whole, MAX_IDLE)


def _texts(pair: PairSession, small: bool, ks: tuple[int, ...], limit: float | None = None) -> Iterator[Bar]:
    """Regular sampling and every K, in turn."""
    taken, rounds_ms = dict[int, list[float]](), dict[int, list[float]]()
    for number in range(3):
        for k in ks:
            spent_ms = rounds_ms.setdefault(k, [])

            def keep(_: object, spent: float, kept: list[float] = spent_ms) -> None:
                kept.append(1000 * spent)

            if number == 0:  # the first one warms up
                by_us(pair, NEW[small], number, k)
            else:
                taken.setdefault(k, []).append(by_us(pair, NEW[small], number, k, keep)[0])
    for k, times in taken.items():
        note = f"a round: {median(rounds_ms[k]):.2f} ms, {max(rounds_ms[k]):.1f} at most"
        yield Bar(f"K = {k}: ms/token", median(times), note=note)
    best = min((k for k in ks if k), key=lambda k: median(taken[k]))
    yield Bar("the best K over regular", median(taken[0]) / median(taken[best]), limit, note=f"K = {best}")


def _plan(pair: PairSession, small: bool) -> Iterator[Bar]:
    """What the plan predicts for a text's bytes and times, beside what is measured."""
    by_us(pair, NEW[small], 1, K)
    ms, counts = by_us(pair, NEW[small], 2, K)
    figures = {**counts.figures(), "ms_per_token": ms}
    memory = memory_of_ranks(pair.models.held_bytes, pair.placements.target.device, pair.ranks)
    plan = compare_with_plan([pair.measurement("pair", figures)], memory)
    if plan is None:
        yield Bar("the plan", None, 1, note="there is none for this machine")
        return
    (held,), (way,) = plan["memory"], plan["ways"]
    for what, planned in (("weights and caches", held[HELD_BYTES]), ("bytes of the device", held[DEVICE])):
        yield most(f"{what}: measured over predicted", 1 / planned["predicted_over_measured"], 1.1)
    yield most("ms/token: measured over predicted", 1 / way["ms_per_token"]["predicted_over_measured"], 1.5)


def memory(how: How) -> Iterator[Bar]:
    """Bytes of 7B with 1B at several rows, and with a long prompt: what is held over what was planned."""
    for rows, prompt in MEMORY[how.small]:
        yield from safely(f"{rows} x {prompt}", _memory(how.small, rows, prompt))


def _memory(small: bool, rows: int, prompt: int) -> Iterator[Bar]:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    words = [f"task.batch_size={rows}", *["engine=eager"] * small]
    pair = session_of(small, "7B", "llama3.2-1b", *words, max_tokens=prompt + NEW[small])
    prompts = [Prompt(str(row), tuple(3 + n % 1000 for n in range(prompt))) for row in range(rows)]
    text_run = texts_run(pair, pair.run, prompts, NEW[small], 0)
    for _ in text_run.rounds():
        pass
    held = memory_of_ranks(pair.models.held_bytes, pair.placements.target.device, pair.ranks)
    plan = compare_with_plan([pair.measurement("pair", text_run.counts.figures())], held)
    shared = sum(getattr(model, "_outputs", SharedMemory()).size for model in pair.models.loaded.values())
    yield Bar(f"{rows} x {prompt}: MiB of logits that graphs share", shared / 2**20)
    pair.close()
    for name in (HELD_BYTES, TENSORS, RESERVED, DEVICE):
        both = plan["memory"][0][name] if plan else {"measured": None}
        what = f"{rows} x {prompt}, {name}: measured over planned"
        if both["measured"]:
            note = f"{both['measured'] / 2**20:.0f} of {both['predicted'] / 2**20:.0f} MiB"
            yield most(what, both["measured"] / both["predicted"], 1.0, note)
        else:
            yield needs(what)


def controls(how: How) -> Iterator[Bar]:
    """Rounds of 7B with 1B by sampling control, the graphs captured meanwhile, and what prompts take."""
    length = PROMPT[how.small]
    pair = session_of(how.small, "7B", "llama3.2-1b", max_tokens=length + 128)
    prepared = _graphs_of_steps(pair)
    for name, sampling in CONTROLS.items():
        yield from safely(name, _controlled(pair, name, sampling))
    yield most("graphs of steps that are captured in mid-run", _graphs_of_steps(pair) - prepared, 0)
    works = {f"of {length} tokens": partial(_read, pair, length, False)}
    for tokens, eagerly in product((20, 72), (False, True)):
        works[f"of {tokens} tokens, {'eagerly' if eagerly else 'by steps'}"] = partial(
            _read, pair, tokens, eagerly
        )
    for what, times in in_turn(works, TURNS[how.small] // 2).items():
        yield Bar(f"ms of a prompt {what}, on both models", median(times))


def _read(pair: PairSession, tokens: int, eagerly: bool) -> None:
    prompt = Prompt("0", tuple(3 + n % 1000 for n in range(tokens)))
    with ExitStack() as stack:
        for model in pair.models.loaded.values() if eagerly else ():
            stack.enter_context(getattr(model, "eagerly", nullcontext)())
        pair.engine(0).prefill([prompt], 8)


def _graphs_of_steps(pair: PairSession) -> int:
    memories = (getattr(model, "_memories", ()) for model in pair.models.loaded.values())
    return sum(len(memory.graphs) for held in memories for memory in held)


def _controlled(pair: PairSession, name: str, sampling: SamplingConfig) -> Iterator[Bar]:
    """Rounds are timed; before that, what their graphs give is compared with what the functions give."""
    run = replace(pair.run, sampling=sampling)
    with Replays() as replays:
        work = _rounds_of(pair, run)
        for _ in range(ROUNDS):
            work()
    yield from replays.bars(name)

    work = _rounds_of(pair, run)
    in_turn({name: work}, 3)  # captures what filters and decides
    yield Bar(f"{name}: ms of a round", median(in_turn({name: work}, 15)[name]))


def _rounds_of(pair: PairSession, run: RunConf) -> Callable[[], object]:
    """Returns what writes a round of a text."""
    engine = pair.engine(0, run, frozenset())
    state: Any = engine.prefill([Prompt("0", PROMPTS[0])], 256)
    return partial(one_round, engine, state, K)


def rows(how: How) -> Iterator[Bar]:
    """7B with 1B at many rows, as a job has them: K by measuring, and graphs of decisions for every K."""
    count = ROWS[how.small]
    pair = _job(how.small, count)
    assert pair.costs is not None
    best_k = pair.costs.k_for_all
    yield Bar("the K that is kept after measuring", best_k, note=f"of {len(pair.costs.rounds) - 1} at most")
    fix_k(pair, {"k": best_k})
    pair.settle()
    yield from safely("graphs for every K", _kept_graphs(pair, count, KEPT_KS[how.small]))
    for k in sorted({0, best_k, K}):
        yield from safely(f"{count} rows, K = {k}", _rows(pair, how.small, count, k))


def _job(small: bool, rows: int) -> PairSession:
    """Returns the pair of a job, which measures what rounds cost and chooses one K for all rows."""
    words = ["task=batch", "model=7B", "draft=llama3.2-1b", f"task.batch_size={rows}"]
    run = composed([*words, *words_of(small, True)])
    (spec,) = pair_specs(run, [], 1)
    return PairSession(spec, ranks_of(run)).load(rows, MAX_TOKENS, prompts=_prompts(rows))


def _kept_graphs(pair: PairSession, rows: int, ks: tuple[int, ...]) -> Iterator[Bar]:
    """Whether draws and decisions are graphs at every K, also after rounds of others."""
    for k in ks:
        with Replays() as replays:
            # A round drafts no more than a text has left to write.
            text_run = texts_run(pair, _at(pair.run, k), _prompts(rows), ROUNDS * (k + 1), 0)
            for _ in text_run.rounds():
                pass
        yield from replays.bars(f"{rows} rows, K = {k}")


def _at(run: RunConf, k: int) -> RunConf:
    """Returns the run with this K, or regular sampling."""
    drafter = Drafting.model if k else Drafting.none
    return replace(run, speculation=replace(run.speculation, k=k, drafter=drafter, adaptive=False))


def _prompts(rows: int) -> list[Prompt]:
    return [Prompt(str(row), PROMPTS[row % 2]) for row in range(rows)]


def _rows(pair: PairSession, small: bool, count: int, k: int) -> Iterator[Bar]:
    for seed in range(2):  # the first one warms up
        text_run = texts_run(pair, _at(pair.run, k), _prompts(count), NEW[small], seed)
        tokens = sum(len(row.tokens) for step in text_run.rounds() for row in step.rows)
    yield Bar(f"{count} rows, K = {k}: tokens/s", tokens / text_run.counts.decode_s)


def experts(how: How) -> Iterator[Bar]:
    """Two layers with 128 experts, of which a token takes 8: steps, and a prompt's chunks, by two kernels."""
    target, *words = EXPERTS
    pair = session_of(how.small, target, None, *words, max_tokens=PROMPT[how.small] + 128)
    model: Any = pair.models.target
    yield Bar("tokens of the largest graph", getattr(model, "most_tokens", MOST), MOST)
    works = steps_after(model, SLOTS[how.small][0], (1, K + 1))
    for width, times in in_turn(works, TURNS[how.small]).items():
        yield Bar(f"ms of a step of {width} tokens", median(times))
    yield from safely("a chunk by two kernels", _by_two_kernels(model))

    engine, prompt = pair.engine(0), [Prompt("0", tuple(3 + n % 1000 for n in range(PROMPT[how.small])))]
    for name, can_group in KERNELS.items():
        with patch.object(mixtures, "can_group", can_group):
            taken = in_turn({name: lambda: engine.prefill(prompt, 8)}, 3)
        yield Bar(f"ms of a prompt of {PROMPT[how.small]} tokens, by {name}", median(taken[name]))


def _by_two_kernels(model: Any) -> Iterator[Bar]:
    """The experts of a layer: torch's grouped product next to our kernel, which sorts the pairs.

    Synthetic weights that end in the residual are zero, so others are drawn for the time being.
    """
    layer = next(part for part in model.decoder.modules() if isinstance(part, mixtures.Experts))
    numbers = torch.Generator(model.device).manual_seed(0)
    router = next(layer.router.parameters())
    x_TH = torch.randn(CHUNK, router.shape[-1], generator=numbers, device=model.device).to(router.dtype)
    results = []
    with torch.inference_mode():
        layer.down[0].normal_(std=0.02, generator=numbers)
        for can_group in KERNELS.values():
            with patch.object(mixtures, "can_group", can_group):
                # Else experts run one after the other, as on a CPU, and neither kernel is there to compare.
                assert model.device.type == "cpu" or not layer.waits_for_host(CHUNK)
                results.append(layer(x_TH).double())
        layer.down[0].zero_()
    grouped, sorted_pairs = results
    off = float((sorted_pairs - grouped).norm() / grouped.norm())
    yield most(f"{CHUNK} tokens: our kernel off by, of torch's grouped product", off, OFF_BY)


KERNELS: dict[str, Callable[..., bool]] = {
    "torch's grouped product, where it has one": mixtures.can_group,
    "our kernel": lambda *_: False,
}


def codes(how: How) -> Iterator[Bar]:
    """The kernel for weights in codes, of few and many rows, and steps of 7B in int8."""
    yield from safely("the kernel for codes", coded_products(how.small))
    yield from _in_formats(("bf16", "int8"), how.small)


def formats(how: How) -> Iterator[Bar]:
    """Steps of 7B in other number formats."""
    yield from _in_formats(FORMATS[how.small], how.small)


def _in_formats(dtypes: tuple[str, ...], small: bool) -> Iterator[Bar]:
    taken: dict[str, list[float]] = {}
    for dtype in dtypes:
        yield from safely(dtype, _in(dtype, small, taken))
    for dtype in sorted(taken.keys() - {"bf16"}):
        for width, sixteen, few in zip((1, K + 1), taken.get("bf16", []), taken[dtype], strict=False):
            limit = INT8_OVER_BF16 if dtype == "int8" and width == 1 else None
            yield Bar(f"a step of {width} tokens: {dtype} over bf16", sixteen / few, limit)


def _in(dtype: str, small: bool, taken: dict[str, list[float]]) -> Iterator[Bar]:
    """Steps in this number format; the model is freed at the end."""
    pair = session_of(small, "7B", None, f"model.dtype={dtype}")
    works = steps_after(pair.models.target, SLOTS[small][0], (1, K + 1))
    for width, times in in_turn(works, TURNS[small]).items():
        taken.setdefault(dtype, []).append(median(times))
        yield Bar(f"{dtype}: ms of a step of {width} tokens", median(times))


def replies(how: How) -> Iterator[Bar]:
    """How long the leader waits for the drafts of a rank on this GPU: both copies, and the hosts between."""
    from replies import SIZES, measured  # needs tests, which the code of an earlier commit comes without

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    sizes, repeats = (SIZES[:1], 3) if how.small else (SIZES, 20)
    for (rows, k, vocab), (dense_s, sparse_s) in zip(sizes, measured(sizes, device, repeats), strict=True):
        what = f"{rows} rows, K = {k}, {vocab} tokens: ms of a reply"
        yield Bar(f"{what}, of which none is 0", 1000 * dense_s)
        yield Bar(f"{what}, of which few are not", 1000 * sparse_s)
