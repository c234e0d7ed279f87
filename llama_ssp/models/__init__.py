"""Weights and forward passes.

The only folder with transformers (but text/tokenizer.py), accelerate, deepspeed and bitsandbytes.
"""
