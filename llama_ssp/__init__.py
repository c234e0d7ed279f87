"""Speculative sampling of large language models, with exactly the target's output distribution.

    from llama_ssp import load_pair

    pair = load_pair("/models/70b", draft="/models/1b")
    completions = pair.generate(["def hello"], temperature=0.7)

Names are loaded when they are first used: importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_ssp.config import SamplingConfig, SpeculationConfig
    from llama_ssp.config.settings import Settings
    from llama_ssp.errors import RunError
    from llama_ssp.pair.api import Pair, load_pair
    from llama_ssp.pair.results import Completion
    from llama_ssp.planner.plan import Plan
    from llama_ssp.speculative.drafters.local import Drafter, Sampler
    from llama_ssp.speculative.state import Proposal, State
    from llama_ssp.speculative.verification import BlockRule, DraftBlock, Rule, TokenRule
    from llama_ssp.tasks.certify.certificate import Certificate, certify
    from llama_ssp.tasks.plan import plan

__version__ = "0.3.0"

__all__ = [
    "BlockRule",
    "Certificate",
    "Completion",
    "DraftBlock",
    "Drafter",
    "Pair",
    "Plan",
    "Proposal",
    "Rule",
    "RunError",
    "Sampler",
    "SamplingConfig",
    "Settings",
    "SpeculationConfig",
    "State",
    "TokenRule",
    "__version__",
    "certify",
    "load_pair",
    "plan",
]
WITHOUT_TORCH = ("Plan", "RunError", "SamplingConfig", "Settings", "SpeculationConfig", "plan")


def __getattr__(name: str) -> Any:
    found: Any
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in WITHOUT_TORCH:
        from llama_ssp.models.host_cores import shorten_spins

        shorten_spins()  # it has an effect where torch is imported after this

    if name in ("Pair", "load_pair"):
        from llama_ssp.pair import api as found
    elif name == "Completion":
        from llama_ssp.pair import results as found
    elif name in ("Certificate", "certify"):
        from llama_ssp.tasks.certify import certificate as found
    elif name in ("Drafter", "Sampler"):
        from llama_ssp.speculative.drafters import local as found
    elif name in ("Proposal", "State"):
        from llama_ssp.speculative import state as found
    elif name in ("BlockRule", "DraftBlock", "Rule", "TokenRule"):
        from llama_ssp.speculative import verification as found
    elif name == "Settings":
        from llama_ssp.config import settings as found
    elif name in ("SamplingConfig", "SpeculationConfig"):
        from llama_ssp import config as found
    elif name == "Plan":
        from llama_ssp.planner import plan as found
    elif name == "plan":
        from llama_ssp.tasks import plan as found
    else:
        from llama_ssp import errors as found
    return getattr(found, name)


def __dir__() -> list[str]:
    return __all__
