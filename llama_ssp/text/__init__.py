"""From strings to token ids and back: prompts, tokenizers, how two vocabularies compare, translation."""
