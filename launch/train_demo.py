"""Make the small models that ship with llama-ssp: `python launch/train_demo.py --out DIR`.

`python launch/train_demo.py head out=FOLDER [target=FOLDER data=FILE.jsonl]` trains a head for a target.
Run the same command again after an interruption: it goes on from the last checkpoint. With torchrun in front
several processes train one head together.
"""

import argparse
import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo import checkpoint, head, head_data, ranks, record, vocab
from demo.batches import Batches
from demo.data import Documents, library_documents
from demo.recipes import RECIPES, Recipe, build, smaller
from demo.train import language_losses, train

from llama_ssp.distributed.cores import cores_here
from llama_ssp.errors import RunError, UsageError


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model folders")
    parser.add_argument("--only", choices=list(RECIPES), help="make this model alone")
    parser.add_argument("--budget-minutes", type=float, help="for all models, shared as usual")
    parser.add_argument("--steps", type=int, help="for each model, instead of minutes")
    parser.add_argument("--threads", type=int, default=min(8, cores_here()))
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
        f"{recipe.name}: {model.num_parameters():,} parameters, {len(batches.stream.ids):,} tokens "
        f"of text in {len(documents.train):,} documents, {device}",
        file=sys.stderr,
        flush=True,
    )
    progress = train(model, recipe, batches, folder, device, language_losses(model, recipe, teacher))
    model.to("cpu", torch.bfloat16).save_pretrained(folder)
    record.write(folder, recipe, progress, args.seed, model.num_parameters(), documents.digest(), device)
    (folder / checkpoint.NAME).unlink()


def check_given(recipe: head.HeadRecipe) -> None:
    """The folders and the file that it names are there."""
    for key, given in ("target", recipe.target), ("start", recipe.start), ("data", recipe.data):
        kind, inside = ("a JSON Lines file", "") if key == "data" else ("a model folder", "config.json")
        if given and not Path(given, inside).is_file():
            raise UsageError(f"{key} cannot be read", found=given, allowed=kind)


def make_head(recipe: head.HeadRecipe) -> None:
    """A head: the target's texts, training, files."""
    check_given(recipe)
    folder, device = Path(recipe.out), ranks.join(device_of(recipe.device))
    if (folder / "training.json").exists():
        print(f"{recipe.out}: already made", file=sys.stderr)
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.from_pretrained(recipe.target).get_text_config()
    lines = head_data.file_lines(Path(recipe.data)) if recipe.data else head_data.demo_lines(
        recipe.seed, recipe.prompts
    )  # fmt: skip
    store, context = folder.with_name(f"{folder.name}.jsonl"), config.max_position_embeddings
    with ranks.first_alone():
        stream = head_data.stream_of(lines, recipe.target, store, recipe.new_tokens, context, recipe.seed)
    teacher = AutoModelForCausalLM.from_pretrained(recipe.target, dtype=torch.bfloat16).to(device).eval()
    counts = torch.from_numpy(np.bincount(stream.ids, minlength=config.vocab_size))
    ids_E, taps = head.frequent(counts, recipe.vocab), head.taps_of(config.num_hidden_layers)
    if recipe.start:
        tensors, ids_E, taps = head.begun(Path(recipe.start))
    made = head.build(teacher, taps, ids_E, recipe.seed)
    if recipe.start:
        made.load_state_dict(tensors)
    known = 1.0 if ids_E is None else float(counts[ids_E].sum() / counts.sum())
    parameters = sum(parameter.numel() for parameter in made.parameters())
    print(
        f"{recipe.name}: {parameters:,} parameters, {len(stream.ids):,} tokens of text, "
        f"{known:.1%} of them can be drafted, {device}",
        file=sys.stderr,
        flush=True,
    )
    batches = head_data.StreamBatches(stream, recipe.row, recipe.batch_tokens, recipe.seed)
    losses = head.head_losses(made, teacher, taps, slice(None) if ids_E is None else ids_E.to(device), recipe)
    progress = train(made, recipe, batches, folder, device, losses)
    if ranks.rank():
        return
    head.save(folder, made, ids_E, taps, config, recipe)
    digest = hashlib.sha256(stream.ids.tobytes()).hexdigest()
    data = Path(recipe.data).name if recipe.data else None
    start = Path(recipe.start).name if recipe.start else None
    shown = replace(recipe, out=folder.name, target=Path(recipe.target).name, data=data, start=start)
    record.write(folder, shown, progress, recipe.seed, parameters, digest, device)
    (folder / checkpoint.NAME).unlink()


def device_of(name: str) -> torch.device:
    """The device of this name; `auto` is the GPU, if there is one."""
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def head_main(words: list[str]) -> None:
    """Trains a head; the keys are the fields of `HeadRecipe`."""
    try:
        conf = OmegaConf.merge(OmegaConf.structured(head.HeadRecipe), OmegaConf.from_cli(words))
        recipe = OmegaConf.to_object(conf)
        assert isinstance(recipe, head.HeadRecipe)
        torch.set_num_threads(recipe.threads)
        make_head(recipe)
        ranks.leave()
    except (OmegaConfBaseException, RunError) as error:
        raise SystemExit(f"error: {str(error).splitlines()[0]}") from None


def main(arguments: list[str] | None = None) -> None:
    """Make each model in turn: the draft learns from the finished target."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["head"]:
        head_main(words[1:])
        return
    args = options(words)
    torch.set_num_threads(args.threads)
    device = device_of(args.device)
    for recipe in chosen(args):
        make(recipe, args, device)


if __name__ == "__main__":
    main()
