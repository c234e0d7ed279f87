"""Held-out measures of the shipped models, with nothing but transformers."""

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tok

from demo.data import multiplication_prompt

TEMPERATURE = 0.5
LONGEST = 512  # tokens of a document that are scored


def load(folder: Path) -> tuple[PreTrainedModel, Tok]:
    """A shipped model with its tokenizer, in float32 so that rounding plays no part."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def multiplication(
    model: PreTrainedModel, tokenizer: Tok, count: int, seed: int, held_out: bool | None = None
) -> float:
    """The share of exact greedy answers, after fresh random worked lines."""
    rng = random.Random(f"{seed}-{held_out}")
    by_length = defaultdict(list)  # batches of one length need no padding
    for _ in range(count):
        prompt, answer = multiplication_prompt(rng, held_out)
        ids = tokenizer(prompt).input_ids
        by_length[len(ids)].append((ids, answer))
    right = 0
    for same in by_length.values():
        ids = torch.tensor([ids for ids, _ in same])
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
        )
        for row, (_, answer) in zip(out[:, ids.shape[1] :], same, strict=True):
            text = tokenizer.decode(row, skip_special_tokens=True)
            right += text.split("\n")[0].strip() == answer
    return right / count


def token_rows(tokenizer: Tok, texts: list[str], tokens: int) -> Iterator[torch.Tensor]:
    """Documents as the models saw them, start and end included, until there are enough."""
    total = 0
    for text in texts:
        if total >= tokens:
            return
        ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id][:LONGEST]
        total += len(ids) - 1
        yield torch.tensor([ids])


@torch.inference_mode()
def perplexity(model: PreTrainedModel, tokenizer: Tok, texts: list[str], tokens: int) -> dict[str, float]:
    """Perplexity per token, and bits per byte to compare vocabularies by."""
    nats, count, size = 0.0, 0, 0
    for ids in token_rows(tokenizer, texts, tokens):
        logits = model(input_ids=ids).logits[0, :-1]
        nats += float(F.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
        size += len(tokenizer.decode(ids[0], skip_special_tokens=True).encode())
    return {
        "perplexity": math.exp(nats / count),
        "bits_per_byte": nats / math.log(2) / size,
        "tokens": count,
    }


def overlaps(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """The chance that a draft's token is accepted, at each position."""
    probs = [(logits / TEMPERATURE).softmax(-1) for logits in (target, draft)]
    return torch.minimum(*probs).sum(-1)


@torch.inference_mode()
def overlap_on_text(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Tok, texts: list[str], tokens: int
) -> float:
    """Mean overlap of the two distributions along held-out text."""
    found = [
        overlaps(target(input_ids=ids).logits[0, :-1], draft(input_ids=ids).logits[0, :-1])
        for ids in token_rows(tokenizer, texts, tokens)
    ]
    return float(torch.cat(found).mean())


@torch.inference_mode()
def overlap_on_samples(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: Tok,
    texts: list[str],
    seed: int,
    prompts: int = 64,
    opening: int = 32,
    new: int = 64,
) -> float:
    """Mean overlap along what the target itself writes after held-out openings."""
    torch.manual_seed(seed)
    rows = [ids for text in texts if len(ids := tokenizer(text).input_ids) > 2 * opening]
    ids = torch.tensor([row[:opening] for row in rows[:prompts]])
    out = target.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new,
    )
    at = slice(opening - 1, -1)
    found = overlaps(target(input_ids=out).logits[:, at], draft(input_ids=out).logits[:, at])
    ended = (out[:, opening:] == tokenizer.eos_token_id).int()
    written = ended.cumsum(1) - ended == 0  # up to the end token, which is written too
    return float(found[written].mean())


def measure(folder: Path, texts: list[str], seed: int, count: int, tokens: int) -> dict:
    """All measures of the models that are there."""
    found: dict = {"seed": seed, "multiplications": count, "temperature": TEMPERATURE}
    loaded = {}
    for name in ("demo", "demo_draft"):
        if not (folder / name / "model.safetensors").exists():
            continue
        model, tokenizer = loaded[name] = load(folder / name)
        found[name] = {
            "parameters": model.num_parameters(),
            "multiplication": multiplication(model, tokenizer, count, seed),
            "multiplication_held_out_pairs": multiplication(model, tokenizer, count, seed, True),
            **perplexity(model, tokenizer, texts, tokens),
        }
    if "demo" in loaded and "demo_draft" in loaded:
        target, tokenizer = loaded["demo"]
        draft = loaded["demo_draft"][0]
        found["pair"] = {
            "overlap_on_held_out_text": overlap_on_text(target, draft, tokenizer, texts, tokens),
            "overlap_on_target_samples": overlap_on_samples(target, draft, tokenizer, texts, seed),
        }
    return found
