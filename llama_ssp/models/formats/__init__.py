"""Quantised checkpoints: what each format stores, and how it is read as codes and scales."""
