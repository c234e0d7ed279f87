"""Print the held-out measures of the shipped models as JSON: `python launch/measure_demo.py`."""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo.data import library_documents
from demo.measure import measure

from llama_ssp.distributed.cores import cores_here

SHIPPED = Path(__file__).resolve().parents[1] / "llama_ssp" / "shipped"


def main() -> None:
    """Measure what is in a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=SHIPPED, help="folder of model folders")
    parser.add_argument("--multiplications", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=24000, help="of held-out text")
    parser.add_argument("--threads", type=int, default=min(8, cores_here()))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-seed", type=int, default=0, help="that the models were trained by")
    parser.add_argument("--openings", type=Path, help="write held-out code to go on with, as prompts")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    texts = library_documents(args.data_seed).held_out
    if args.openings:
        write_openings(args.openings, texts)
        return
    print(json.dumps(measure(args.models, texts, args.seed, args.multiplications, args.tokens), indent=1))


def write_openings(file: Path, texts: list[str], count: int = 64, lines: int = 8) -> None:
    """The first lines of held-out documents, as JSONL for `launch/run.py task.prompt_file=`."""
    long = [text for text in texts if text.count("\n") > 2 * lines]
    prompts = ["\n".join(text.split("\n")[:lines]) + "\n" for text in long[:count]]
    records = [json.dumps({"id": str(i), "prompt": prompt}) for i, prompt in enumerate(prompts)]
    file.write_text("\n".join(records) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
