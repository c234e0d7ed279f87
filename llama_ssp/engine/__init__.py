"""One round of speculation over a target and a drafter: prefill, draft, verify, roll back."""

from llama_ssp.engine.agreement import Verdict
from llama_ssp.engine.drafters import Drafter, ModelDrafter, NgramDrafter, NoDrafter
from llama_ssp.engine.engine import Engine
from llama_ssp.engine.runner import Runner
from llama_ssp.engine.state import Prompt, Proposal, State

__all__ = [
    "Drafter", "Engine", "ModelDrafter", "NgramDrafter", "NoDrafter", "Prompt", "Proposal",
    "Runner", "State", "Verdict",
]  # fmt: skip
