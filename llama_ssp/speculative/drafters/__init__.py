"""Drafters: a draft model, n-gram lookup, a draft of another vocabulary, a draft on ranks of its own."""
