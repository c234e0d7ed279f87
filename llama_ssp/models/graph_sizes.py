"""Sizes of passes, of their CUDA graphs and of what kernels take. No torch: plans count them, too."""

from functools import cache

LAG = 2  # tokens that a model lacks at most after a round; they are fed in one forward
WIDEST = 72  # tokens of a row in a step (also in attention.cpp): the longest draft, its lag, the next token
SHORT = 40  # tokens of prompts that a CPU's step reads faster than an eager pass, with logits of all
WIDEST_HEAD = 256  # numbers of a head that attention.cpp takes
BLOCK = 32  # outputs that linear.cpp and coded.cpp store together
SLICE = 2**21  # numbers of a 16-bit output matrix that a CPU without our kernels has in fp32 at once
EXACT = 16  # tokens; with more, four graphs serve the numbers up to twice as many
MOST = 512  # tokens of a graph, which keeps memory for their logits
MOST_PAIRS = 1024  # of a token and an expert, of which a program finds its own; of prompts are more
BUCKET = 256  # slots: memory of caches is made in multiples of it
LARGEST = 72 * 2**20  # numbers given to a graph that draws or decides: 16 rows of 256k tokens at K = 8
FILTERED = 2**23  # numbers given to a graph that filters; with more, launches are not what takes the time
KEPT_BYTES = 5 * LARGEST  # of all that graphs read and give that filter, draw or decide
PROGRAMS = 512  # of attention, of all KV heads, for a row: a GPU has some 130 processors with several each
FEW = 16  # tokens; where there are more, each has fewer parts, which bounds the memory of their sums
LEAST_PARTS, MOST_PARTS = 4, 128  # of a token's context
DECODED = 2**26  # numbers of experts in codes that are decoded at once, but one expert at least


def short_prompt(cpu: bool) -> int:
    """The most tokens of prompts, of all rows together, that a compiled step reads."""
    return SHORT if cpu else WIDEST


def attends_on_cpu(head: int) -> bool:
    """Returns whether attention.cpp takes heads of so many numbers."""
    return head % 2 == 0 and head <= WIDEST_HEAD


def padded(tokens: int) -> int:
    """The number of tokens of the graph that serves these."""
    unit = 1 if tokens <= EXACT else 1 << tokens.bit_length() - 3
    return -(-tokens // unit) * unit


def attended_parts(tokens: int, groups: int) -> int:
    """Returns the most parts of contexts, of all tokens together, whose sums the kernel of a GPU keeps."""
    return max(PROGRAMS * FEW // groups, LEAST_PARTS * min(tokens, MOST))


@cache
def sizes_up_to(tokens: int, prompt: int) -> tuple[int, ...]:
    """The sizes of the graphs that serve steps of 1, 2, ... `tokens` tokens, and a prompt of so many."""
    return tuple(sorted({padded(number) for number in (*range(1, min(tokens, MOST) + 1), prompt)}))
