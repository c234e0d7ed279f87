"""Inputs made at random from a seed: files of prompts and of requests. Nothing is shown by `assert`.

Every file has a number, and comes again by `python -m tests.fuzz seed=S only=NUMBER`.
"""
