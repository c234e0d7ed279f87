"""The ranks of a run and what they say to each other; the only room that knows torch.distributed."""

from llama_ssp.ranks.crew import SOLE, Crew, Told, crew_of
from llama_ssp.ranks.faults import LostPeer
from llama_ssp.ranks.group import PACKET, checksum, open_ranks
from llama_ssp.ranks.link import Link, LinkLost
from llama_ssp.ranks.meeting import announce
from llama_ssp.ranks.post import Answerer, Asker
from llama_ssp.ranks.protocol import ALONE, Alone, Ranks
from llama_ssp.ranks.told import told

__all__ = [
    "ALONE", "PACKET", "SOLE", "Alone", "Answerer", "Asker", "Crew", "Link", "LinkLost", "LostPeer", "Ranks",
    "Told", "announce", "checksum", "crew_of", "open_ranks", "told",
]  # fmt: skip
