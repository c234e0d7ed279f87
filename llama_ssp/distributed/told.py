"""Plain data from the leader to every rank, as JSON in integers."""

from __future__ import annotations

import json
from typing import Any

from llama_ssp.distributed.comm import Ranks


def broadcast_json(plain: Any, ranks: Ranks) -> Any:
    """What the leader passes, on every rank; what the others pass is not looked at."""
    if ranks.world == 1:
        return plain
    own = json.dumps(plain).encode() if ranks.is_leader else b""
    return json.loads(bytes(ranks.broadcast_ints(list(own))))
