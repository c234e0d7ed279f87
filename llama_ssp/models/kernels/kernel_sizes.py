"""Sizes that our kernels take, and what they keep at once. No torch: plans count them, too."""

from llama_ssp.models.graph_sizes import MOST

WIDEST_HEAD = 256  # numbers of a head that attention.cpp takes
BLOCK = 32  # outputs that linear.cpp and coded.cpp store together
SLICE = 2**21  # numbers of a 16-bit output matrix that a CPU without our kernels has in fp32 at once
DECODED = 2**26  # numbers of experts in codes that are decoded at once, but one expert at least
MOST_PAIRS = 1024  # of a token and an expert, of which a program finds its own; of prompts are more

# Of attention on a GPU, which divides each token's context into parts.
PROGRAMS = 512  # of all KV heads, for a row: a GPU has some 130 processors with several each
FEW = 16  # tokens; where there are more, each has fewer parts, which bounds the memory of their sums
LEAST_PARTS = 4
MOST_PARTS = 128


def attends_on_cpu(head: int) -> bool:
    """Returns whether attention.cpp takes heads of so many numbers."""
    return head % 2 == 0 and head <= WIDEST_HEAD


def attended_parts(tokens: int, groups: int) -> int:
    """Returns the most parts of contexts, of all tokens together, whose sums the kernel of a GPU keeps."""
    return max(PROGRAMS * FEW // groups, LEAST_PARTS * min(tokens, MOST))
