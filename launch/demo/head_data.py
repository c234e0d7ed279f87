"""What a head learns from: given texts, and texts that its target writes, which are kept in a file."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from demo.batches import Batch, Stream
from demo.data import library_documents, training_multiplications
from llama_ssp import SamplingConfig, load_pair
from llama_ssp.errors import DataError

SAMPLED_AT = 1.0  # the temperature of the target's texts: its own distribution
ROWS = 32  # texts that the target writes together
MATH_ONE_IN = 4  # of the shipped pair's texts
KEYS = "text", "prompt", "messages"


class StreamBatches:
    """Rows of a stream of texts, all of them to be learnt."""

    def __init__(self, stream: Stream, row: int, batch_tokens: int, seed: int) -> None:
        if len(stream.ids) <= row:
            what, fix = "the data are too short", "give more texts, or a smaller row"
            raise DataError(what, found=f"{len(stream.ids)} tokens", allowed=f"more than {row}", fix=fix)
        self.stream, self.row, self.seed = stream, row, seed
        self.count = max(2, batch_tokens // row)

    def batch(self, step: int) -> Batch:
        """The rows of one step."""
        rng = random.Random(f"{self.seed}-{step}")
        rows = [self.stream.window(rng, self.row + 1) for _ in range(self.count)]
        ids = torch.from_numpy(np.stack(rows).astype(np.int64))
        return Batch(ids, torch.ones(ids.shape), torch.zeros(self.count, dtype=torch.bool))


def demo_lines(seed: int, count: int) -> list[dict[str, Any]]:
    """The shipped pair's data: this many documents as they are, and beginnings of as many others."""
    rng = random.Random(f"{seed}-head")
    documents = library_documents(seed).train

    def text() -> str:
        return training_multiplications(rng) if rng.randrange(MATH_ONE_IN) == 0 else rng.choice(documents)

    begun = [text() for _ in range(count)]
    return [{"text": text()} for _ in range(count)] + [{"prompt": one[: len(one) // 4]} for one in begun]


def file_lines(path: Path) -> list[dict[str, Any]]:
    """A JSON Lines file; each object has a `text`, or a `prompt` or `messages` that the target answers."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        try:
            content = json.loads(line.strip() or "{}")
        except ValueError:
            content = line
        if content and not (isinstance(content, dict) and any(key in content for key in KEYS)):
            what, where = "a line of the data cannot be used", f"{path}:{number}"
            raise DataError(what, where, line[:80], f"an object with one of {', '.join(KEYS)}")
        found += [content] if content else []
    return found


def stream_of(
    lines: list[dict[str, Any]], target: str, store: Path, new_tokens: int, context: int, seed: int
) -> Stream:
    """The texts of these lines, and the target's answers to their prompts, as token ids.

    Each text depends on the seed and its place alone. `store` keeps the answers.
    """
    tokenizer = AutoTokenizer.from_pretrained(target)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts = [tokenizer(line["text"]).input_ids + end for line in lines if "text" in line]
    prompts = [prompt_ids(tokenizer, line) for line in lines if "text" not in line]
    usable = [ids for ids in prompts if 0 < len(ids) <= context - new_tokens]
    if len(usable) < len(prompts):
        print(f"{len(prompts) - len(usable)} prompts are empty or too long", file=sys.stderr)
    return Stream([*texts, *answered(usable, target, store, new_tokens, seed)])


def prompt_ids(tokenizer: Any, line: dict[str, Any]) -> list[int]:
    """A prompt, or a conversation in the target's chat template."""
    if "prompt" in line:
        return list(tokenizer(line["prompt"]).input_ids)
    return list(
        tokenizer.apply_chat_template(line["messages"], add_generation_prompt=True, return_dict=False)
    )


def answered(
    prompts: list[list[int]], target: str, store: Path, new_tokens: int, seed: int
) -> list[list[int]]:
    """Each prompt with what the target samples after it; one line of `store` has those written together."""
    store.touch()
    done = store.read_bytes().rpartition(b"\n")
    store.write_bytes(done[0] + done[1])  # without a line that a kill cut
    groups = [json.loads(line) for line in done[0].splitlines()]
    if len(groups) * ROWS < len(prompts):
        longest = max(map(len, prompts)) + new_tokens
        with (
            load_pair(target, batch_size=ROWS, max_tokens=longest, overrides=["sampling=plain"]) as pair,
            store.open("a", encoding="utf-8") as file,
        ):
            for first in range(len(groups) * ROWS, len(prompts), ROWS):
                group = prompts[first : first + ROWS]
                sampling = SamplingConfig(temperature=SAMPLED_AT)
                made = pair.generate(group, max_new_tokens=new_tokens, sampling=sampling, seed=seed + first)
                groups.append([[*ids, *answer.token_ids] for ids, answer in zip(group, made, strict=True)])
                file.write(json.dumps(groups[-1]) + "\n")
                file.flush()
                print(f"{first + len(group)} of {len(prompts)} texts sampled", file=sys.stderr, flush=True)
    return [text for group in groups for text in group]
