"""What a user can ask for: one module a task, and `execute`, which runs the one that was asked for."""

from llama_ssp.tasks.execute import execute

__all__ = ["execute"]
