"""Make the small models that ship with llama-ssp: `python launch/train_demo.py --out DIR`.

Run the same command again after an interruption: it goes on from the last checkpoint.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo import checkpoint, record, vocab
from demo.batches import Batches
from demo.data import Documents, library_documents
from demo.recipes import RECIPES, Recipe, build, smaller
from demo.train import train


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model folders")
    parser.add_argument("--only", choices=list(RECIPES), help="make this model alone")
    parser.add_argument("--budget-minutes", type=float, help="for all models, shared as usual")
    parser.add_argument("--steps", type=int, help="for each model, instead of minutes")
    parser.add_argument("--threads", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--small", action="store_true", help="tiny models in seconds, for tests")
    return parser.parse_args(arguments)


def chosen(args: argparse.Namespace) -> list[Recipe]:
    """The recipes asked for, with their budgets."""
    recipes = [recipe for name, recipe in RECIPES.items() if args.only in (None, name)]
    if args.small:
        recipes = [smaller(recipe) for recipe in recipes]
    if args.steps is not None:
        recipes = [replace(recipe, steps=args.steps) for recipe in recipes]
    elif args.budget_minutes is not None:
        factor = args.budget_minutes / sum(recipe.minutes for recipe in recipes)
        recipes = [replace(recipe, minutes=recipe.minutes * factor) for recipe in recipes]
    return recipes


def tokenizer_for(recipe: Recipe, folder: Path, documents: Documents) -> Tokenizer:
    """The stored tokenizer, or a new one; training the BPE again gives the same one."""
    stored = folder / "tokenizer.json"
    if stored.exists():
        return Tokenizer.from_file(str(stored))
    if recipe.vocabulary == "bytes":
        tokenizer = vocab.bytes_only()
    else:
        tokenizer = vocab.train_bpe(documents.train, recipe.bpe_size)
    vocab.save(tokenizer, folder)
    return tokenizer


def make(recipe: Recipe, args: argparse.Namespace, device: torch.device) -> None:
    """One model: data, tokenizer, training, files."""
    folder = args.out / recipe.name
    if (folder / "training.json").exists():
        print(f"{recipe.name}: already made", file=sys.stderr)
        return
    folder.mkdir(parents=True, exist_ok=True)
    documents = library_documents(args.seed, recipe.files)
    tokenizer = tokenizer_for(recipe, folder, documents)
    batches = Batches(recipe, tokenizer, documents.train, args.seed)
    model = build(recipe, tokenizer, args.seed)
    teacher = None
    if recipe.teacher:
        teacher = (
            LlamaForCausalLM.from_pretrained(args.out / recipe.teacher, dtype=torch.bfloat16)
            .to(device)
            .eval()
        )
    print(
        f"{recipe.name}: {model.num_parameters():,} parameters, {len(batches.stream):,} tokens "
        f"of text in {len(documents.train):,} documents, {device}",
        file=sys.stderr,
        flush=True,
    )
    progress = train(model, recipe, batches, folder, device, teacher)
    model.to("cpu", torch.bfloat16).save_pretrained(folder)
    record.write(folder, recipe, progress, args.seed, model.num_parameters(), documents.digest(), device)
    (folder / checkpoint.NAME).unlink()


def main(arguments: list[str] | None = None) -> None:
    """Make each model in turn: the draft learns from the finished target."""
    args = options(arguments)
    torch.set_num_threads(args.threads)
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(found if args.device == "auto" else args.device)
    for recipe in chosen(args):
        make(recipe, args, device)


if __name__ == "__main__":
    main()
