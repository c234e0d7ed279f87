"""What is trained: the shapes, shares and budgets of the three models."""

from dataclasses import dataclass, replace

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from demo.vocab import BOS, CONTEXT, EOS


@dataclass(frozen=True, kw_only=True)
class Training:
    """How long and how fast is learnt: of a model, or of a trained head."""

    name: str
    minutes: float
    steps: int | None = None  # instead of minutes
    batch_tokens: int = 4096
    row: int = 256
    matrix_rate: float = 0.02
    other_rate: float = 3e-3
    compile: bool = True  # not worth its minute in a short run


@dataclass(frozen=True, kw_only=True)
class Recipe(Training):
    """One model: its shape, and what it learns from."""

    layers: int
    width: int
    hidden: int
    heads: int
    teacher: str | None = None
    # The share of multiplications in a batch, from a step on: products are learnt after the look
    # of code, so they get more room in the middle, and the end goes to both.
    math_shares: tuple[tuple[int, float], ...] = ((0, 0.5),)
    long_every: int = 8  # one step in this many has rows as long as the context
    bpe_size: int = 4096
    files: int | None = None  # of the library; all of them by default


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="demo",
            layers=8,
            width=224,
            hidden=576,
            heads=4,
            minutes=67,
            math_shares=((0, 0.5), (700, 0.6875), (900, 0.8125), (1550, 0.5), (1760, 0.1875)),
        ),
        Recipe(
            name="demo_draft",
            layers=2,
            width=128,
            hidden=344,
            heads=2,
            minutes=13.5,
            teacher="demo",
            math_shares=((0, 0.2),),
            batch_tokens=2048,
            row=512,
            other_rate=5e-3,
        ),
    )
}


def smaller(recipe: Recipe) -> Recipe:
    """A budget of seconds for tests: it learns a little, and goes the same way."""
    return replace(
        recipe,
        layers=min(recipe.layers, 2),
        width=64,
        hidden=128,
        heads=2,
        batch_tokens=1024,
        row=128,
        long_every=0,
        bpe_size=512,
        files=20,
        steps=40,
        compile=False,
    )


def build(recipe: Recipe, tokenizer: Tokenizer, seed: int) -> LlamaForCausalLM:
    """A fresh model of the recipe's shape, the same for the same seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=recipe.width,
        intermediate_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=tokenizer.token_to_id(EOS),
    )
    return LlamaForCausalLM(config).float()
