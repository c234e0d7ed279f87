"""Sizes of steps and of their CUDA graphs. No torch: plans count them, too."""

from functools import cache

LAG = 2  # tokens that a model lacks at most after a round; they are fed in one forward
WIDEST = 72  # tokens of a row in a step (also in attention.cpp): the longest draft, its lag, the next token
SHORT = 40  # tokens of prompts that a CPU's step reads faster than an eager pass, with logits of all
EXACT = 16  # tokens; with more, four graphs serve the numbers up to twice as many
MOST = 512  # tokens of a graph; the graphs of a model keep memory for the logits of so many
BUCKET = 256  # slots: memory of caches is made in multiples of it
LARGEST = 72 * 2**20  # numbers given to a graph that draws or decides: 16 rows of 256k tokens at K = 8
FILTERED = 2**23  # numbers given to a graph that filters; with more, launches are not what takes the time
# Of graphs that filter, draw or decide: what they read, in memory that all share, and all their results.
KEPT_BYTES = 5 * LARGEST


def ring_of(rewinds: int) -> int:
    """Returns how many states a cache keeps of a row that is rolled back by so many tokens at most.

    They are those after each of these tokens and after the one before them, and those of the LAG tokens that
    a pass may feed in addition.
    """
    return rewinds + 1 + LAG


def rewinds_of(k: int, ahead: bool) -> int:
    """Returns by how many tokens a round of K drafts rolls back at most.

    A draft model that runs `ahead` also drafts after a guess, which may be wrong.
    """
    return 2 * k + 1 if ahead else k


def short_prompt(cpu: bool) -> int:
    """Returns the most tokens of prompts, of all rows together, that a compiled step reads."""
    return SHORT if cpu else WIDEST


def padded(tokens: int) -> int:
    """Returns the number of tokens of the graph that serves these."""
    unit = 1 if tokens <= EXACT else 1 << tokens.bit_length() - 3
    return -(-tokens // unit) * unit


@cache
def sizes_up_to(tokens: int, prompt: int) -> tuple[int, ...]:
    """Returns the sizes of the graphs of steps of 1, 2, ... `tokens` tokens, and of a prompt of so many."""
    counts = (*range(1, min(tokens, MOST) + 1), prompt)
    return tuple(sorted({padded(count) for count in counts}))
