"""The algorithm, on token ids.

Read generate.py, verification.py, sampling.py and engine.py, in this order; then state.py and rng.py.
"""
