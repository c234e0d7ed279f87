"""The contenders of a benchmark: our loop, and transformers' generate, on pairs of synthetic weights.

Times are decoding only. Our loop prefills before the clock starts. transformers prefills inside `generate`,
so its time for one token is subtracted. Tokens are counted the same for all: those after the prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from llama_ssp.config import Drafting, GenerateConf, ModelConf, RunConf
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.distributed.placement import resolve
from llama_ssp.models.passes import Pass, all_rows
from llama_ssp.pair.given import NOTHING, Given
from llama_ssp.pair.run import Run, RunSettings
from llama_ssp.pair.session import PairSession, regular
from llama_ssp.placing.decision import as_asked
from llama_ssp.placing.pairs import PairSpec
from llama_ssp.speculative.draft_length import DraftLength, lookahead_for
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import Counts, RowStep
from llama_ssp.tasks.calibrate import shape

PROMPTS = [tuple(range(100, 116)), tuple(range(4000, 4020))]
VOCAB = 8192
LENGTH = 64  # of the text before a step
PREFILLED = (64, 512, 2048)  # lengths of texts
SMALL = ("n_layers=1", "dim=256", "ffn=512", "n_heads=4", "n_kv_heads=4", "head_dim=64")  # of any preset


def sizes(agreement: float, small: bool = False) -> tuple[ModelConf, ModelConf]:
    """The pair: hidden 1024 x 16 layers, and hidden 256 x 4 layers; a small one 256 x 2, and 128 x 1."""
    one, other = ((2, 256), (1, 128)) if small else ((16, 1024), (4, 256))
    target, draft = shape(*one, VOCAB), shape(*other, VOCAB, agreement=agreement)
    return replace(target, context=4608), replace(draft, context=4608)


def wait() -> None:
    """Waits until a GPU, if there is one, has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def opened(
    run: RunConf, slots: int, ranks: Ranks = ALONE, rows: int = 1,
    folders: tuple[Path | None, Path | None] = (None, None),
) -> PairSession:  # fmt: skip
    """The run's pair, ready for `generate`; its tokenizer has bytes for tokens.

    `folders`: of target and draft, where they are not synthetic; then there is no tokenizer.
    """
    run = replace(run, task=GenerateConf())
    placement = resolve(run.placement, ranks.world, run.draft is not None)
    spec = PairSpec(run, folders[0], folders[1], as_asked(run, placement))
    given = NOTHING if folders[0] is None else Given(tokenizer=None)
    return PairSession(spec, ranks, given).load(rows, slots)


def by_us(
    opened: PairSession, new: int, seed: int, k: int | None,
    seen: Callable[[RowStep, float], None] = lambda step, spent: None,
) -> tuple[float, Counts]:  # fmt: skip
    """Milliseconds a token, decoding only; K null is adaptive, 0 is regular sampling.

    `seen` gets every round and its seconds.
    """
    drafting = Drafting.none if k == 0 else Drafting.model
    spec = replace(opened.run.speculation, k=k or 0, drafter=drafting, adaptive=k is None)
    run, counts = replace(opened.run, speculation=spec), Counts()
    for number, ids in enumerate(PROMPTS):
        text_run = texts_run(opened, run, [Prompt(str(number), ids)], new, seed)
        for step in text_run.rounds():
            seen(step.rows[0], step.seconds)
        counts.merge(text_run.counts)
    return 1000 * counts.decode_s / (new * len(PROMPTS)), counts


def texts_run(
    pair: PairSession, run: RunConf, prompts: Sequence[Prompt], new: int, seed: int,
    lookahead: Callable[[int], DraftLength] | None = None,
) -> Run:  # fmt: skip
    """Returns what continues all prompts at once by `new` tokens, as token ids; no token ends a text."""
    settings = RunSettings(
        rows=len(prompts), lookahead=lookahead or partial(lookahead_for, run, costs=pair.costs)
    )
    requests = pair.requests(prompts, run, max_new_tokens=new)
    return Run(pair.engine(seed, run, frozenset()), requests, settings)


def by_transformers(target: Any, draft: Any | None, how: str, new: int, seed: int) -> tuple[float, Counts]:
    """Milliseconds a token of `generate`; `how` is a number of drafts, heuristic, dynamic or cache."""
    extra: dict[str, Any] = {}
    if draft is not None:
        extra["assistant_model"] = draft
        settings = draft.generation_config
        settings.num_assistant_tokens = int(how) if how.isdigit() else 20 if how == "dynamic" else 5
        settings.num_assistant_tokens_schedule = "heuristic" if how == "heuristic" else "constant"
        settings.assistant_confidence_threshold = 0.4 if how == "dynamic" else 0.0
    elif how == "static cache":
        extra["cache_implementation"] = "static"
    torch.manual_seed(seed)
    spent = 0.0
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=target.device)
        for length, sign in ((1, -1), (new + 1, 1)):
            wait()
            began = time.perf_counter()
            made = target.generate(
                ids, attention_mask=torch.ones_like(ids), min_new_tokens=length, max_new_tokens=length,
                eos_token_id=None, pad_token_id=0, do_sample=True, temperature=1.0, top_k=0, **extra,
            )  # fmt: skip
            wait()
            spent += sign * (time.perf_counter() - began)
            assert made.shape[1] == len(prompt) + length
    return 1000 * spent / (new * len(PROMPTS)), Counts()


def rounds(
    opened: PairSession, ks: list[int], clock: Callable[[], float] = time.perf_counter,
    turns: int = 25, rows: int = 1,
) -> list[list[str]]:  # fmt: skip
    """A round against its parts: K steps of the draft, or its head, and one of the target, timed in turn.

    Parts are the models' steps alone, after texts of the same length: no probabilities, no sampling, no
    tokens. The median of the turns counts.
    """
    pair = opened.models
    assert pair.target is not None
    lines = [["K", "draft step, ms", "target step, ms", "round, ms", "round over its parts"]]
    for k in ks:
        run_k = replace(opened.run, speculation=replace(opened.run.speculation, k=k))
        engine = opened.engine(0, run_k, frozenset())
        room = 2 * turns + 2 * k
        text = tuple(range(100, 100 + LENGTH))
        state = engine.prefill([Prompt(f"round {row}", text) for row in range(rows)], room)
        target = behind(pair.target, LENGTH + room, k + 1, rows)
        if pair.head is not None:
            draft = behind_head(pair.head, pair.target, LENGTH + room, rows)
        else:
            draft = behind(pair.draft, LENGTH + room, 1, rows)
        works = {
            "draft": lambda step=draft, s=state: step(s.lengths[0]),
            "target": lambda step=target, s=state: step(s.lengths[0]),
            "round": lambda e=engine, s=state, k=k: one_round(e, s, k),
        }
        taken = in_turn(works, turns, clock)
        least = {name: median(times) for name, times in taken.items()}
        over = [r / (k * d + t) for d, t, r in zip(*taken.values(), strict=True)]
        lines.append([str(k), *(f"{ms:.2f}" for ms in least.values()), f"{median(over):.2f}"])
    return lines


def in_turn(
    works: dict[str, Callable[[], object]], turns: int, clock: Callable[[], float] = time.perf_counter,
    meet: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:  # fmt: skip
    """Milliseconds of every turn of each work; `meet` begins a turn of all ranks together."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(turns):
        for name, work in works.items():
            meet()
            work()  # the processor's cache holds the same for each
            wait()
            began = clock()
            work()
            wait()
            taken[name].append(1000 * (clock() - began))
    return taken


def alone(model: Any, length: int, width: int) -> Callable[[], object]:
    """A model's step over this number of columns after a text of this length."""
    step = behind(model, length, width)
    return lambda: step(length)


def behind(model: Any, longest: int, width: int, rows: int = 1) -> Callable[[int], object]:
    """The same of each row, after texts of any length up to the longest.

    A model with states goes on from where it was: a first call at a length also reads what is before it.
    """
    cache = model.new_cache(rows, longest + width, width)
    text = torch.zeros(rows, longest, dtype=torch.int64, device=model.device)
    read = min(LENGTH, longest) if getattr(model, "has_states", False) else longest

    def feed(start: int, count: int, last_only: bool = False) -> object:
        spans = all_rows([start] * rows, [count] * rows)
        pass_ = Pass(spans=spans, device=model.device, last_only=last_only)
        return model.logits(text[:, :count], pass_, cache)

    def step(length: int) -> object:
        nonlocal read
        if length > read:
            feed(read, length - read, last_only=True)
        read = max(read, length + width)
        return feed(length, width)

    feed(0, read, last_only=True)
    return step


def behind_head(head: Any, target: Any, longest: int, rows: int) -> Callable[[int], object]:
    """A step of a head that reads the target's cache, after texts of any length up to the longest."""
    cache = target.new_cache(rows, longest + 1)
    text = torch.zeros(rows, longest, dtype=torch.int64, device=target.device)
    prompt = Pass(spans=all_rows([0] * rows, [longest] * rows), device=target.device, last_only=True)
    target.logits(text, prompt, cache)
    state_RX = head.new_states(rows, 1).zero_()

    def step(length: int) -> object:
        return head.step(text[:, 0], state_RX, [(row, length) for row in range(rows)], cache)

    return step


def steps_ms(
    pair: PairSession, widths: tuple[int, ...], clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Milliseconds of the target's steps of these numbers of tokens, alone, by the number."""
    return in_turn({str(width): alone(pair.models.target, LENGTH, width) for width in widths}, 25, clock)


def prefills_ms(pair: PairSession, module: Any, turns: int = 3) -> dict[int, dict[str, list[float]]]:
    """Milliseconds of the target's prefill of one text and of transformers' pass over it, by its length."""
    found = {}
    for length in PREFILLED:
        text = tuple(100 + i % 4000 for i in range(length + 1))  # the last token is not prefilled
        ids = torch.tensor([text[:-1]], device=module.device)

        def ours(text: tuple[int, ...] = text) -> object:
            return pair.engine(0, regular(pair.run), frozenset()).prefill([Prompt("0", text)], 1)

        @torch.inference_mode()
        def theirs(ids: torch.Tensor = ids) -> object:
            return module(ids, use_cache=True, logits_to_keep=1)

        found[length] = in_turn({"ours": ours, "theirs": theirs}, turns)
    return found


def one_round(engine: Any, state: Any, k: int) -> None:
    """Drafts, verifies, and appends a token to each row; everything that a round needs is computed again."""
    verdict = engine.verify(state, engine.draft(state, [k] * state.rows))
    state.append({row: [token] for row, token in enumerate(verdict.token)})
    engine.roll_back(state)
