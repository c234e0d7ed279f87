"""What a run needs, before it runs: bytes on every rank, from shapes alone. Closed form, no torch."""

from llama_ssp.plan.asked import DRAFT, TARGET, Kind, Line, Role, Workload
from llama_ssp.plan.bill import tensor_lines
from llama_ssp.plan.room import BYTES, GIB, Bill, bill, parameters, require_room

__all__ = [
    "BYTES", "DRAFT", "GIB", "TARGET", "Bill", "Kind", "Line", "Role", "Workload",
    "bill", "parameters", "require_room", "tensor_lines",
]  # fmt: skip
