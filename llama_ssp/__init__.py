"""Speculative sampling of large language models, with exactly the target's output distribution.

    from llama_ssp import SamplingConfig, load_pair

    pair = load_pair("/models/70b", draft="/models/1b")
    completions = pair.generate(["def hello"], sampling=SamplingConfig(temperature=0.7))

Names are loaded when they are first used: importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_ssp.config import SamplingConfig, SpeculationConfig
    from llama_ssp.errors import RunError
    from llama_ssp.pair.api import Completion, Pair, load_pair
    from llama_ssp.planner.plan import Plan
    from llama_ssp.tasks.plan import plan

__version__ = "0.3.0"

__all__ = [
    "Completion",
    "Pair",
    "Plan",
    "RunError",
    "SamplingConfig",
    "SpeculationConfig",
    "__version__",
    "load_pair",
    "plan",
]


def __getattr__(name: str) -> Any:
    found: Any
    if name in ("Completion", "Pair", "load_pair"):
        from llama_ssp.models.host_cores import shorten_spins

        shorten_spins()  # it has an effect where torch is imported after this
        from llama_ssp.pair import api as found
    elif name in ("SamplingConfig", "SpeculationConfig"):
        from llama_ssp import config as found
    elif name == "Plan":
        from llama_ssp.planner import plan as found
    elif name == "plan":
        from llama_ssp.tasks import plan as found
    elif name == "RunError":
        from llama_ssp import errors as found
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(found, name)


def __dir__() -> list[str]:
    return __all__
