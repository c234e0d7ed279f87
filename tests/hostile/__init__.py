"""Hostile model folders: a corpus that a script makes, and the trial that each of them must fail."""
