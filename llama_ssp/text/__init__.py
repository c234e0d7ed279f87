"""Target and draft of any two tokenizers: what they share, and how one drafts for the other."""
