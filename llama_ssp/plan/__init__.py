"""What a run needs, before it runs: bytes on every rank, from shapes alone. Closed form, no torch."""

from llama_ssp.plan.activations import GPU, Kernels
from llama_ssp.plan.asked import DRAFT, TARGET, Kind, Line, Role, Workload
from llama_ssp.plan.bill import Peak, phases, rank_bill, segments, tensor_lines
from llama_ssp.plan.room import GIB, Bill, bill, parameters, require_room
from llama_ssp.plan.weights import BYTES

__all__ = [
    "BYTES", "DRAFT", "GIB", "GPU", "TARGET", "Bill", "Kernels", "Kind", "Line", "Peak", "Role", "Workload",
    "bill", "parameters", "phases", "rank_bill", "require_room", "segments", "tensor_lines",
]  # fmt: skip
