"""Sizes that our kernels take, and what they keep at once. No torch: plans count them, too."""

from llama_ssp.models.graph_sizes import MOST

WIDEST_HEAD = 512  # numbers of a head that attention.cpp takes
TORCH_HEAD = 256  # numbers of a head that the attention of torch for GPUs takes without a matrix of scores
BLOCK = 32  # outputs that linear.cpp and coded.cpp store together
SLICE = 2**21  # numbers of a 16-bit output matrix that a CPU without our kernels has in fp32 at once
MOST_PAIRS = 1024  # of a token and an expert, of which a program finds its own; of prompts are more
# Numbers in codes that are decoded at once: rows of a matrix, or whole experts; at least one of them.
DECODED = 2**26

# Of products with matrices in codes on a GPU, by their rows.
FEW_ROWS = 16  # the most rows that a step's kernel multiplies
MANY_ROWS = 256  # with more, a matrix is decoded once for all of them
TILE = 64  # outputs of a program, between the two
TILES = 256  # programs, if there are inputs enough to share: two for each of some 130 processors
LEAST_INPUTS = 256  # of such a share

# Of attention on a GPU, which divides each token's context into parts.
PROGRAMS = 512  # of all KV heads, for a row: a GPU has some 130 processors with several each
FEW = 16  # tokens; where there are more, each has fewer parts, which bounds the memory of their sums
LEAST_PARTS = 4
MOST_PARTS = 128


def attends_on_cpu(head: int) -> bool:
    """Returns whether attention.cpp takes heads of so many numbers."""
    return head % 2 == 0 and head <= WIDEST_HEAD


def parts_of(outputs: int, inputs: int) -> int:
    """Returns in how many parts programs share a matrix's inputs, where rows are neither few nor many.

    It does not depend on the number of rows: so neither does what is computed for a row.
    """
    tiles = -(-outputs // TILE)
    return max(1, min(-(-TILES // tiles), inputs // LEAST_INPUTS))


def attended_parts(tokens: int, groups: int) -> int:
    """Returns the most parts of contexts, of all tokens together, whose sums the kernel of a GPU keeps."""
    return max(PROGRAMS * FEW // groups, LEAST_PARTS * min(tokens, MOST))
