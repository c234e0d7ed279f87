"""The vocabulary of target and draft: byte-level BPE."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS = "<s>", "</s>"
BPE_SIZE = 4096
CONTEXT = 1024


def train_bpe(texts: Iterable[str], size: int = BPE_SIZE) -> Tokenizer:
    """Byte-level BPE with one token per digit, so that sums line up for a small model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[BOS, EOS],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return finish(tokenizer)


def finish(tokenizer: Tokenizer) -> Tokenizer:
    """Decode bytes exactly, and put the start token before every text."""
    tokenizer.decoder = decoders.ByteLevel()
    start = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, start)]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write it in the form that `AutoTokenizer.from_pretrained(folder)` reads."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    wrapped.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    contents = json.loads(config.read_text(encoding="utf-8"))
    contents.pop("backend", None)
    contents["tokenizer_class"] = "PreTrainedTokenizerFast"  # a name that older versions know
    config.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
