"""Steps of our compiled target beside llama.cpp's of the same shapes, in bf16, turn by turn.

    python bench/beside_llama_cpp.py python=PYTHON [turns=12] [steps=24] [threads=2] [write=FILE.md]

PYTHON is an interpreter of an environment with llama-cpp-python and gguf (pip install llama-cpp-python gguf):
llama.cpp runs in a process of its own, which writes a model of the target's sizes and waits for its turns.
The table has milliseconds of steps of 1, 5 and 9 tokens after a text of 64, all logits included: the median
of the turns' medians, and the ratio within a turn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

WIDTHS = (1, 5, 9)
LENGTH = 64  # of the text before a step
LAYERS, DIM, HEADS, FFN, VOCAB = 16, 1024, 16, 2816, 8192  # of bench/fast.py's target


def write_gguf(path: Path) -> None:
    """Random weights: their values do not change the time."""
    import gguf
    import numpy as np

    kind, random = gguf.GGMLQuantizationType.BF16, np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("no_vocab")
    for name, value in (
        ("vocab_size", VOCAB), ("context_length", 512), ("embedding_length", DIM), ("block_count", LAYERS),
        ("feed_forward_length", FFN), ("head_count", HEADS), ("layer_norm_rms_eps", 1e-5),
        ("rope_dimension_count", DIM // HEADS),
    ):  # fmt: skip
        getattr(writer, f"add_{name}")(value)

    def matrix(name: str, outputs: int, inputs: int) -> None:
        weight = random.standard_normal((outputs, inputs), dtype=np.float32) / inputs**0.5
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, kind), raw_dtype=kind)

    matrix("token_embd", VOCAB, DIM)
    matrix("output", VOCAB, DIM)
    writer.add_tensor("output_norm.weight", np.ones(DIM, np.float32))
    for block in (f"blk.{number}" for number in range(LAYERS)):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{block}.{name}.weight", np.ones(DIM, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"{block}.{name}", DIM, DIM)
        for name in ("ffn_gate", "ffn_up"):
            matrix(f"{block}.{name}", FFN, DIM)
        matrix(f"{block}.ffn_down", DIM, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def timed(step: Callable[[], object], steps: int) -> float:
    """The median of a step's milliseconds; the first steps wake threads and caches."""
    taken = []
    for _ in range(steps + 4):
        began = time.perf_counter()
        step()
        taken.append(1000 * (time.perf_counter() - began))
    return median(taken[4:])


def answer(steps: int, threads: int) -> None:
    """The other process: a line with times for each line that comes."""
    import llama_cpp

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(path)
        how: dict[str, Any] = {"n_threads": threads, "n_threads_batch": threads, "use_mmap": False}
        model = llama_cpp.Llama(str(path), n_ctx=512, logits_all=True, verbose=False, **how)
        model.eval(list(range(LENGTH)))

        def step(width: int) -> None:
            model.n_tokens = LENGTH  # what is behind is forgotten
            model.eval(list(range(width)))

        print(json.dumps(llama_cpp.__version__), flush=True)
        for _ in sys.stdin:
            print(json.dumps([timed(lambda w=width: step(w), steps) for width in WIDTHS]), flush=True)


def main(arguments: list[str]) -> int:
    if arguments[0] == "answer":  # by an interpreter that need not have torch
        answer(*map(int, arguments[1:]))
        return 0
    import torch
    from contenders import alone, opened, sizes
    from surroundings import report
    from words import Words

    from llama_ssp.config import Dtype, RunConf, Steps
    from llama_ssp.report.tables import aligned

    @dataclass
    class Asked(Words):
        python: str = sys.executable
        turns: int = 12
        steps: int = 24
        threads: int = 2
        write: str = ""

    asked = Asked.of(arguments)
    torch.set_num_threads(asked.threads)
    target = replace(sizes(0.89)[0], dtype=Dtype.bf16)
    assert (target.n_layers, target.dim, target.ffn, target.vocab) == (LAYERS, DIM, FFN, VOCAB)
    pair = opened(RunConf(model=target, draft=None, engine=Steps.compiled), 128)
    ours = [alone(pair.models.target, LENGTH, width) for width in WIDTHS]
    command = [asked.python, __file__, "answer", str(asked.steps), str(asked.threads)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    taken: list[list[list[float]]] = []
    with subprocess.Popen(command, **pipes) as other:
        version = json.loads(other.stdout.readline())
        for _ in range(asked.turns):
            own = [timed(step, asked.steps) for step in ours]
            other.stdin.write("\n")
            taken.append([own, json.loads(other.stdout.readline())])
        other.stdin.close()
    rows = []
    for number, width in enumerate(WIDTHS):
        us, them = ([turn[who][number] for turn in taken] for who in (0, 1))
        ratios = sorted(a / b for a, b in zip(us, them, strict=True))
        spread = f"{ratios[0]:.2f}..{ratios[-1]:.2f}"
        rows.append([str(width), f"{median(us):.2f}", f"{median(them):.2f}", f"{median(ratios):.2f}", spread])
    head = ["tokens", "ours, ms", "llama.cpp, ms", "ours / llama.cpp", "least..most"]
    report(
        asked.write, "Steps beside llama.cpp: bf16, the same shapes", pair.models.devices,
        f"llama-cpp-python {version}, {asked.turns} turns of {asked.steps} steps; {asked.threads} threads.",
        "", "```", *aligned([head, *rows], 0), "```",
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
