"""Inputs made at random from a seed: overrides, files of prompts, prompts. Nothing is shown by `assert`.

Every input has a number, and comes again by `python -m tests.fuzz seed=S only=KIND:NUMBER`.
"""
