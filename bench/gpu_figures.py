"""Parts of bench/gpu.py: how fast a GPU is. Each part is a function that yields its figures."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from bars import Bar, most, needs, safely
from contenders import PROMPTS, SMALL, by_us, in_turn, one_round, rounds, texts_run, wait
from gpu_kernels import best_bandwidth, coded_products, device
from profiled import GRAPHS, LAUNCHES, WAITS, binned, by_name, called, gaps, kernels, total
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import StaticCache

from llama_ssp import load_pair
from llama_ssp.config import Drafting, Dtype, SamplingConfig
from llama_ssp.config.compose import composed
from llama_ssp.models.loader import load_module
from llama_ssp.pair.session import PairSession
from llama_ssp.placing.prediction import DEVICE, HELD_BYTES, RESERVED, TENSORS, compare_with_plan
from llama_ssp.planner.speed import pass_cost
from llama_ssp.planner.workload import Role
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks.common import memory_of_ranks

if TYPE_CHECKING:
    from gpu import How

VOCAB, AGREEMENT, K = 32000, 0.8, 4
WIDTHS = (1, 2, 5)  # tokens of a step
SLOTS = {False: (64, 2048, 32000), True: (16, 300)}  # tokens before it
MAX_TOKENS = 512  # of a text, where steps after many tokens are not timed
TURNS = {False: 11, True: 2}
NEW = {False: 64, True: 8}  # tokens of a text
MEMORY = {False: ((1, 448), (8, 448), (64, 448), (1, 32000)), True: ((1, 40), (8, 40), (1, 300))}
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
ROWS = {False: (8, 64), True: (2, 3)}
EXPERTS = "gpt-oss-20b", "model.experts=128", "model.experts_per_token=8", "model.n_layers=2"
LARGE_GIB = 100  # of a GPU that holds 30B and 7B
PRODUCTS = re.compile("gemm|gemv|nvjet|cutlass|cublas|splitk", re.IGNORECASE)  # in names of kernels
COUNTED = 25  # names of kernels in a table
REPEATING = "one two three four five six seven eight nine ten. " * 6


def session_of(
    small: bool, target: str, draft: str | None, *more: str, max_tokens: int = MAX_TOKENS
) -> PairSession:
    """Returns a synthetic pair with compiled steps; the vocabulary of every model is LLaMA's."""
    words = ["engine=compiled", "task.ignore_eos=true", *more]
    for role in ("model", "draft") if draft else ("model",):
        words += [f"{role}.weights=synthetic", f"{role}.vocab={VOCAB}", f"{role}.context=40960"]
        words += [f"{role}.{size}" for size in SMALL if small]
    if draft:
        words.append(f"draft.agreement={AGREEMENT}")
    return load_pair(target, draft, max_tokens=max_tokens, overrides=words).session


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
    engine = pair.engine(0, replace(pair.run, sampling=sampling), frozenset())
    state: Any = engine.prefill([Prompt("0", PROMPTS[0])], 256)
    works = {name: partial(one_round, engine, state, K)}
    in_turn(works, 3)  # captures what filters and decides
    yield Bar(f"{name}: ms of a round", median(in_turn(works, 15)[name]))


def rows(how: How) -> Iterator[Bar]:
    """Tokens a second of 7B with 1B at several rows, without drafts and with K = 4."""
    for count in ROWS[how.small]:
        pair = session_of(how.small, "7B", "llama3.2-1b", f"task.batch_size={count}")
        for k in (0, K):
            yield from safely(f"{count} rows, K = {k}", _rows(pair, how.small, count, k))
        pair.close()


def _rows(pair: PairSession, small: bool, count: int, k: int) -> Iterator[Bar]:
    speculation = replace(pair.run.speculation, k=k, drafter=Drafting.model if k else Drafting.none)
    run = replace(pair.run, speculation=speculation)
    prompts = [Prompt(str(row), PROMPTS[row % 2]) for row in range(count)]
    for seed in range(2):  # the first one warms up
        text_run = texts_run(pair, run, prompts, NEW[small], seed)
        tokens = sum(len(row.tokens) for step in text_run.rounds() for row in step.rows)
    yield Bar(f"{count} rows, K = {k}: tokens/s", tokens / text_run.counts.decode_s)


def experts(how: How) -> Iterator[Bar]:
    """Two layers with 128 experts, of which a token takes 8: steps, and a prompt's chunks."""
    target, *words = EXPERTS
    pair = session_of(how.small, target, None, *words, max_tokens=PROMPT[how.small] + 128)
    works = steps_after(pair.models.target, SLOTS[how.small][0], (1, K + 1))
    for width, times in in_turn(works, TURNS[how.small]).items():
        yield Bar(f"ms of a step of {width} tokens", median(times))
    engine, prompt = pair.engine(0), [Prompt("0", tuple(3 + n % 1000 for n in range(PROMPT[how.small])))]
    taken = in_turn({"prompt": lambda: engine.prefill(prompt, 8)}, 3)
    yield Bar(f"ms of a prompt of {PROMPT[how.small]} tokens", median(taken["prompt"]))


def codes(how: How) -> Iterator[Bar]:
    """The kernel for weights in codes, and steps of 7B with them."""
    yield from safely("the kernel for codes", coded_products(how.small))
    taken: dict[str, list[float]] = {}
    for dtype in ("bf16", "int8") if how.small else ("bf16", "fp16", "int8", "int4", "nf4"):
        yield from safely(dtype, _in(dtype, how.small, taken))
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


def smollm2(how: How) -> Iterator[Bar]:
    """A trained model from a GGUF file: regular, with n-grams of its text, and with layers in their codes."""
    for dtype in ("bf16", "packed"):
        words = ["engine=compiled", "task.ignore_eos=true", f"model.dtype={dtype}", "sampling=greedy"]
        pair = load_pair(how.file("SmolLM2"), max_tokens=MAX_TOKENS, overrides=words).session
        prompt = Prompt("0", tuple(pair.tokens.encode(REPEATING)))
        regular = replace(pair.run.speculation, drafter=Drafting.none, k=0)
        ways = {"regular": regular, "n-grams": replace(regular, drafter=Drafting.ngram, k=8)}
        for name, speculation in ways.items() if dtype == "bf16" else [("regular", regular)]:
            run = replace(pair.run, speculation=speculation)
            for _ in range(2):  # the first one warms up
                text_run = texts_run(pair, run, [prompt], NEW[how.small], 1)
                tokens = sum(len(step.rows[0].tokens) for step in text_run.rounds())
            note = repr(pair.tokens.decode(text_run.replies[0].token_ids))
            yield Bar(f"{dtype}, {name}: ms/token", 1000 * text_run.counts.decode_s / tokens, note=note)
        pair.close()


def static_cache(how: How) -> Iterator[Bar]:
    """7B by transformers' generate with its static cache, for which it compiles a step of one token."""
    words = ["model=7B", "draft=none", "model.weights=synthetic", f"model.vocab={VOCAB}"]
    model = composed([*words, *(f"model.{size}" for size in SMALL if how.small)]).model
    module = load_module(model, None, Dtype.bf16, device(), "model")
    new, (prompt, _) = NEW[how.small] // 2, PROMPTS
    cache = StaticCache(config=module.config, max_cache_len=len(prompt) + new + 8)
    ids = torch.tensor([prompt], device=device())

    def written(length: int) -> float:
        cache.reset()
        wait()
        began = time.perf_counter()
        module.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, min_new_tokens=length,
            max_new_tokens=length, eos_token_id=None, pad_token_id=0, do_sample=True, top_k=0,
        )  # fmt: skip
        wait()
        return 1000 * (time.perf_counter() - began)

    written(4)  # compiles
    yield Bar("ms/token", median((written(new) - written(1)) / (new - 1) for _ in range(3)))
