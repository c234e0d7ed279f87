"""One round of speculation over a target and a drafter: prefill, draft, verify, roll back."""

from llama_ssp.engine.agreement import Verdict
from llama_ssp.engine.ahead import AheadAssistant
from llama_ssp.engine.apart import RemoteDrafter, SendingDrafter
from llama_ssp.engine.bridged import IntersectionDrafter, TextDrafter
from llama_ssp.engine.drafters import Assistant, Drafter, ModelDrafter, NgramDrafter, NoDrafter
from llama_ssp.engine.engine import Engine
from llama_ssp.engine.follower import Follower
from llama_ssp.engine.runner import Runner
from llama_ssp.engine.state import Prompt, Proposal, State

AnyEngine = Engine | Follower  # one rank's: the leader's, or another's

__all__ = [
    "AheadAssistant", "AnyEngine", "Assistant", "Drafter", "Engine", "Follower", "IntersectionDrafter",
    "ModelDrafter", "NgramDrafter", "NoDrafter", "Prompt", "Proposal", "RemoteDrafter", "Runner",
    "SendingDrafter", "State", "TextDrafter", "Verdict",
]  # fmt: skip
