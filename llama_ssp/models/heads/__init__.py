"""Trained heads: drafters that read the target's hidden states."""
