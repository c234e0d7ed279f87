"""Models and tokenizers from checkpoints or seeds; the only rooms that know transformers."""
