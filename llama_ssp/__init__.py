"""llama-ssp: speculative sampling of large language models with provably the same output law."""

__version__ = "0.1.0"
