"""Parts of bench/gpu.py: how fast a GPU is. Each part yields figures as they are found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from bars import Bar, most, needs, safely
from contenders import PROMPTS, by_transformers, by_us, in_turn, one_round, rounds, wait
from profiled import GRAPHS, LAUNCHES, WAITS, busy_ms, called, total
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function

from llama_ssp import load_pair
from llama_ssp.models.loader import DRAFT, load_module
from llama_ssp.pair.session import PairSession
from llama_ssp.planner.run_plan import DEVICE, HELD_BYTES, compare_with_plan
from llama_ssp.planner.speed import pass_cost
from llama_ssp.planner.workload import Role
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks.rank_memory import memory_of_ranks

VOCAB, AGREEMENT, K = 32000, 0.8, 4
KS = (2, 4, 6)
WIDTHS = (1, 2, 5)  # tokens of a step
SLOTS = {False: (64, 2048, 8192, 32000), True: (16, 300)}  # tokens before it
MAX_TOKENS = 512  # of a text, where steps after many tokens are not timed
STREAMED = {False: 2**32, True: 2**25}  # numbers: more than any cache holds
TURNS = {False: 11, True: 2}
NEW = {False: 64, True: 8}  # tokens of a text
SHARE_READ, SHARE_LONG = 0.85, 1 / 1.3  # of the bandwidth, by a step of one token, and by all others
OVER_PARTS, OVER_KNOWN = 1.08, 2.0
MOST_LAUNCHES, MOST_IDLE = 60, 0.1  # of a round, beside its graphs
OVER_ASSISTED, LARGE_OVER_REGULAR, INT8_OVER_BF16 = 4.0, 1.8, 1.4
PROFILED = 4  # rounds
LITTLE = ("n_layers=2", "dim=256", "ffn=512", "n_heads=4", "n_kv_heads=4", "head_dim=64")


def opened(
    small: bool, target: str, draft: str | None, engine: str, *more: str, max_tokens: int = MAX_TOKENS
) -> PairSession:
    """A synthetic pair through load_pair; the vocabulary of all is LLaMA's."""
    words = [f"engine={engine}", "task.ignore_eos=true", *more]
    for role in ("model", "draft") if draft else ("model",):
        words += [f"{role}.weights=synthetic", f"{role}.vocab={VOCAB}", f"{role}.context=40960"]
        words += [f"{role}.{size}" for size in LITTLE if small]
    if draft:
        words.append(f"draft.agreement={AGREEMENT}")
    pair = load_pair(target, draft, max_tokens=max_tokens, overrides=words)
    return pair._session


def bandwidth(small: bool) -> float:
    """Bytes a second that summing a large tensor reads; its memory is given back."""
    large = torch.ones(STREAMED[small], dtype=torch.bfloat16, device=device())
    size, seconds = large.nbytes, median(in_turn({"sum": large.sum}, 9)["sum"]) / 1000
    del large
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # else it would count as the pair's
    return size / seconds


def device() -> torch.device:
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def steps(small: bool) -> Iterator[Bar]:
    """7B with 1B: everything of one pair."""
    read = bandwidth(small)
    yield Bar("GB/s that a sum reads", read / 1e9)
    longest = max(SLOTS[small]) + 128
    pair = opened(small, "7B", "llama3.2-1b", "compiled", max_tokens=longest)
    yield from safely("plan", _plan(pair, small))  # first: what follows has caches of its own
    yield from safely("steps", _steps(pair, small, read, "compiled"))
    yield from safely("a profiled round", _profiled(pair))
    yield from safely("texts", _texts(pair, small, assisted=True))
    pair.close()  # a GPU has no room for two such models and their caches
    eager = opened(small, "7B", None, "eager", max_tokens=longest)
    yield from safely("eager steps", _steps(eager, small, read, "eager"))
    yield from safely("new lengths", _new_lengths(eager))


def large(small: bool) -> Iterator[Bar]:
    """30B with 7B."""
    pair = opened(small, "30B", "7B", "compiled")
    yield from safely("plan", _plan(pair, small))
    yield from safely("texts", _texts(pair, small, LARGE_OVER_REGULAR))


def steps_after(model: Any, slots: int, widths: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    """The model's steps of so many tokens after a text of `slots`, as its engine makes them; in one cache."""
    runner, end = ModelRunner(model), slots + max(widths)
    ids = torch.randint(3, VOCAB, (1, end), device=model.device)
    runner.start(1, end)
    runner.prefill(ids, [slots])

    def step(width: int) -> object:
        found = runner.logits(ids, [slots + width], [width])
        runner.roll_back([slots + 1])
        return found

    return {str(width): partial(step, width) for width in widths}


def _steps(pair: PairSession, small: bool, read: float, engine: str) -> Iterator[Bar]:
    model, conf = pair.models.target, pair.run.model
    cost = pass_cost(Role("", conf, pair.placements[0].dtype), 1)
    for slots in SLOTS[small]:
        taken = in_turn(steps_after(model, slots, WIDTHS), TURNS[small])  # keeps no cache beside the next one
        for width, ms in taken.items():
            share = (cost.weights + cost.slot * slots) / (median(ms) / 1000) / read
            regular = width == "1" and slots == min(SLOTS[small])
            asked = None if engine == "eager" else SHARE_READ if regular else SHARE_LONG
            what = f"{engine}, {slots} slots, {width} tokens: share of the bandwidth"
            yield Bar(what, share, asked, note=f"{median(ms):.2f} ms")


def _new_lengths(pair: PairSession) -> Iterator[Bar]:
    """A step at a length for the first time over the same step again: some kernels are planned by shape."""
    first, again = list[float](), list[float]()
    for slots in range(101, 117):
        (step,) = steps_after(pair.models.target, slots, (K + 1,)).values()
        for taken in (first, again):
            wait()
            began = time.perf_counter()
            step()
            wait()
            taken.append(time.perf_counter() - began)
    yield most("eager: a step at a new length over a known one", median(first) / median(again), OVER_KNOWN)


def _profiled(pair: PairSession) -> Iterator[Bar]:
    """Waits, launches and idle time of rounds that follow each other."""
    engine = pair.engine(0, end_ids=frozenset())
    state: Any = engine.prefill([Prompt("0", PROMPTS[0])], 256)
    for _ in range(8):
        one_round(engine, state, K)
    kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
    with profile(activities=kinds) as seen, record_function("rounds"):
        for _ in range(PROFILED):
            one_round(engine, state, K)
    events = seen.events()
    calls = called(events, "rounds")
    spans = [e.time_range for e in events if e.device_type == DeviceType.CUDA and e.name != "rounds"]
    asked = {"waits for the GPU": (WAITS, 1), "launches beside graphs": (LAUNCHES, MOST_LAUNCHES)}
    for what, (names, limit) in asked.items():
        what = f"a round: {what}"
        yield most(what, total(calls, names) / PROFILED, limit) if spans else needs(what)
    yield Bar("a round: graphs", total(calls, GRAPHS) / PROFILED)
    what = "a round: share of idle time"
    if spans:  # profiled launches take longer, so the whole is a round without
        whole = median(in_turn({"round": lambda: one_round(engine, state, K)}, 21)["round"])
        yield most(what, 1 - busy_ms(spans) / PROFILED / whole, MOST_IDLE, f"{whole:.2f} ms")
    else:
        yield needs(what)
    over = float(rounds(pair, [K])[-1][-1])
    yield most(f"a round / ({K} draft steps + a step of {K + 1})", over, OVER_PARTS)


def _texts(
    pair: PairSession, small: bool, asked: float | None = None, assisted: bool = False
) -> Iterator[Bar]:
    """Regular sampling, every K, and with `assisted` transformers' assisted generation, in turn."""
    new, taken, rounds_ms = NEW[small], dict[str, list[float]](), dict[str, list[float]]()

    def ours(repeat: int, k: int) -> float:
        own = rounds_ms.setdefault(f"K = {k}", [])
        return by_us(pair, new, repeat, k, lambda _, spent: own.extend([1000 * spent] * bool(repeat)))[0]

    works: dict[str, Callable[[int], float]] = {f"K = {k}": partial(ours, k=k) for k in (0, *KS)}
    if assisted:
        target, draft = (
            load_module(one.model, one.path, one.dtype, one.device, role)
            for one, role in zip(pair.placements, ("model", DRAFT), strict=True)
        )
        works["assisted"] = lambda i: by_transformers(target, draft, "4", new, i)[0]
    for repeat in range(3):
        for name, work in works.items():
            spent = work(repeat)
            taken.setdefault(name, []).extend([spent] * bool(repeat))  # the first one warms up
    for name, ms in taken.items():
        own = rounds_ms.get(name)
        note = f"a round: {median(own):.2f} ms, {max(own):.1f} at most" if own else ""
        yield Bar(f"{name}: ms/token", median(ms), note=note)
    best = min((f"K = {k}" for k in KS), key=lambda name: median(taken[name]))
    over = {name: median(taken[name]) / median(taken[best]) for name in taken}
    yield Bar(f"{best} over regular", over["K = 0"], asked)
    if assisted:
        yield Bar(f"{best} over transformers' assisted generation", over["assisted"], OVER_ASSISTED)


def _plan(pair: PairSession, small: bool) -> Iterator[Bar]:
    """What the plan predicts of a text's bytes and times, over what is measured."""
    ms, counts = by_us(pair, NEW[small], 1, K)
    ms, counts = by_us(pair, NEW[small], 2, K)
    figures = {**counts.figures(), "ms_per_token": ms}
    memory = memory_of_ranks(pair.models.held_bytes, pair.placements[0].device, pair.ranks)
    plan = compare_with_plan([pair.measurement("pair", figures)], memory)
    if plan is None:
        yield Bar("the plan", None, 1, note="there is none for this machine")
        return
    (held,), (way,) = plan["memory"], plan["ways"]
    for what, found in (("weights and caches", held[HELD_BYTES]), ("bytes of the device", held[DEVICE])):
        yield most(f"{what}: measured over predicted", 1 / found["predicted_over_measured"], 1.1)
    yield most("ms/token: measured over predicted", 1 / way["ms_per_token"]["predicted_over_measured"], 1.5)


def quantised(small: bool) -> Iterator[Bar]:
    """7B in bf16, 8 bit and 4 bit, and the kernel for codes."""
    if device().type == "cuda":
        yield from safely("the kernel for codes", _kernel())
    else:
        yield needs("the kernel for codes: error")
    taken: dict[str, list[float]] = {}
    for dtype in ("bf16", "int8", "nf4"):
        yield from safely(dtype, _in(dtype, small, taken))
    if len(taken.get("int8", [])) == len(taken.get("bf16", [])) > 0:
        for width, sixteen, eight in zip((1, K + 1), taken["bf16"], taken["int8"], strict=True):
            what = f"a step of {width} tokens: int8 over bf16"
            asked = INT8_OVER_BF16 if width == 1 and device().type == "cuda" else None
            yield Bar(what, sixteen / eight, asked)


def _in(dtype: str, small: bool, taken: dict[str, list[float]]) -> Iterator[Bar]:
    """Steps in this number format; the model is freed at the end."""
    pair = opened(small, "7B", None, "compiled", f"model.dtype={dtype}")
    works = steps_after(pair.models.target, min(SLOTS[small]), (1, K + 1))
    for width, ms in in_turn(works, TURNS[small]).items():
        taken.setdefault(dtype, []).append(median(ms))
        yield Bar(f"{dtype}: ms of a step of {width} tokens", median(ms))


def _kernel() -> Iterator[Bar]:
    """Error and speed of products with codes, beside the same in bf16: in graphs, as steps have them."""
    from llama_ssp.models.formats.coded import Coded, Codes
    from llama_ssp.models.kernels.coded import CodedLinear, operators
    from llama_ssp.models.quantization import LLM_INT8

    operators("cuda")
    outputs, inputs, group = 11008, 4096, 128
    kinds = {"8 bit": LLM_INT8, "4 bit": Codes("uint4", group), "fp8": Codes("e4m3", group)}
    for name, kind in kinds.items():
        size = outputs, inputs * kind.bits // 8
        codes = torch.randint(256, size, dtype=torch.uint8, device=device())
        if kind.table == "e4m3":
            codes[codes & 127 == 127] = 1  # these are NaN
        scale = torch.rand(outputs, inputs // (kind.group or inputs), device=device())
        zero = torch.randint(16, scale.shape, dtype=torch.uint8, device=device()) if kind.bits == 4 else None
        exact = Coded(kind, inputs, codes, scale, zero).decoded(torch.float64)
        copies = []
        for _ in range(16):  # together more than any cache
            weight = Coded(kind, inputs, codes.clone(), scale, zero)
            copies.append((CodedLinear(weight, None, device()), exact.bfloat16()))
        for rows in (1, K + 1, 16):
            x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=device())
            wanted = x.double() @ exact.T
            error = float((copies[0][0](x).double() - wanted).norm() / wanted.norm())
            what = f"the kernel for {name}, {rows} rows"
            yield most(f"{what}: error", error, 2**-8)
            works: dict[str, Callable[[], object]] = {
                "codes": _graph([partial(layer, x) for layer, _ in copies]),
                "sixteen": _graph([partial(functional.linear, x, weight) for _, weight in copies]),
            }
            taken = {way: median(ms) for way, ms in in_turn(works, 9).items()}
            gb_s = f"{len(copies) * codes.nbytes / taken['codes'] / 1e6:.0f} GB/s"
            yield Bar(f"{what}: over bf16", taken["sixteen"] / taken["codes"], note=gb_s)


def _graph(calls: list[Callable[[], object]]) -> Callable[[], object]:
    """The calls as a CUDA graph, without the time of their launches."""
    calls[0]()
    wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay
