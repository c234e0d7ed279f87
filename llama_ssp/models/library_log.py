"""The log of transformers, where a line of ours says what is wrong. No torch."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_library() -> Iterator[None]:
    """Has transformers log errors alone inside, unless its log is wanted (-v, TRANSFORMERS_VERBOSITY)."""
    from transformers.utils import logging as library

    before = library.get_verbosity()
    if before > logging.INFO:
        library.set_verbosity_error()
    try:
        yield
    finally:
        library.set_verbosity(before)
