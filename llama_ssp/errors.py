"""Errors: one line and one exit code each. The exit codes are an interface (docs/reference.md)."""

import os
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Characters of what was found, and of where, that a message repeats.
MAX_FOUND = 300
MAX_WHERE = 800
STEERING = (
    "Cc",
    "Cf",
    "Cs",
    "Zl",
    "Zp",
)  # kinds of characters that are no text: controls, formats, separators
# Those among them that a terminal takes as text: line and tab; joiners and break hints, without which some
# scripts and emoji are not written; and marks of direction, which move no other text.
HARMLESS = "\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH SPACE}\N{WORD JOINER}" + (
    "\N{SOFT HYPHEN}\N{LEFT-TO-RIGHT MARK}\N{RIGHT-TO-LEFT MARK}\N{ARABIC LETTER MARK}"
)
OK = 0
FAILED_CHECK = 1
USAGE = 2
DATA = 3
MODEL = 4
DISTRIBUTED = 5
INPUT_OUTPUT = 6


class RunError(Exception):
    """An error that the user can fix, as "what; where; found, allowed; fix". `code` is the exit code."""

    code = FAILED_CHECK
    speaks: bool | None = None  # whether this rank prints it; None: the leader does

    def __init__(
        self, what: str, where: object = "", found: object = None, allowed: object = "", fix: str = ""
    ) -> None:
        facts = [f"found {shortened(str(found), MAX_FOUND)}"] if found is not None else []
        facts += [f"allowed {allowed}"] if allowed else []
        parts = (what, shortened(str(where), MAX_WHERE), ", ".join(facts), fix)
        super().__init__(one_line("; ".join(part for part in parts if part)))


class UsageError(RunError):
    """The command line or the configuration is wrong."""

    code = USAGE


class DataError(RunError):
    """A prompt or a prompt file is wrong."""

    code = DATA


class ModelError(RunError):
    """A checkpoint, a tokenizer or a model is wrong."""

    code = MODEL


class DistributedError(RunError):
    """Ranks, rendezvous or devices do not match what was asked for."""

    code = DISTRIBUTED


class MemoryFull(DistributedError):
    """The memory of the host or of a GPU does not hold what is asked for."""


class LostPeer(DistributedError):
    """Another rank has ended, is stuck, or cannot be reached: the cause is there, not here."""


class JointError(RunError):
    """Ends all ranks of a run, with one line that one of them prints, and one code."""

    def __init__(self, line: str, code: int, speaks: bool) -> None:
        super().__init__(line)
        self.code = code
        self.speaks = speaks


class StorageError(RunError):
    """Reading or writing failed: disk full, no permission, a broken pipe."""

    code = INPUT_OUTPUT


@contextmanager
def writing(what: str, where: object, fix: str) -> Iterator[None]:
    """Raises StorageError where the system cannot write what is written inside."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write the {what}: {error.strerror}", where=where, fix=fix) from None


def lacks_memory(error: BaseException) -> bool:
    """Whether Python, the system, or one of torch's allocators ran out of memory."""
    said = isinstance(error, RuntimeError | OSError) and "allocate memory" in str(error)
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or said


def is_gpu_error(error: BaseException) -> bool:
    """Whether torch reports that a GPU failed, or that its memory is full."""
    if type(error).__name__ in ("OutOfMemoryError", "AcceleratorError"):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith(("CUDA error", "HIP error"))


def lacks_gpu_memory(error: BaseException) -> bool:
    """Whether a GPU's memory is full."""
    return lacks_memory(error) and is_gpu_error(error)


def machine_error(error: BaseException, where: object = "") -> DistributedError | None:
    """A lack of memory or an error of a GPU, as what it is, and what helps; None for other errors.

    Of torch's text the first line counts: it names the GPU and the error. What follows is the same for all.
    """
    found = first_line(error)
    if lacks_gpu_memory(error):
        fix = "ask for less: a smaller batch, prompt or model; or use more ranks (task=plan says how many)"
        return MemoryFull("the GPU's memory is full", where=where, found=found, fix=fix)
    if lacks_memory(error):  # of any library
        fix = "free some, raise its limit (ulimit -v), or ask for less: a smaller model, batch or prompt"
        return MemoryFull("memory is short", where=where, found=found, fix=fix)
    if is_gpu_error(error):
        fix = "check the GPU (nvidia-smi, dmesg); CUDA_LAUNCH_BLOCKING=1 shows which operation failed"
        return DistributedError("the GPU has failed", where=where, found=found, fix=fix)
    return None


def exit_code_of(run: Callable[[], int]) -> int:
    """What a process on a node exits with; an error is a line on standard error."""
    try:
        return run()
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except OSError as error:
        print(f"error: {of_system(error)}", file=sys.stderr)
        return INPUT_OUTPUT


def of_system(error: OSError) -> str:
    """What the system says of a file that cannot be used."""
    where = str(error.filename or "input or output")
    if isinstance(error, FileNotFoundError) and not os.path.isabs(where) and _folder_is_gone():
        return "the current folder is gone; change to one that is there"
    return f"{error.strerror or error}; {shortened(where, MAX_WHERE)}"


def _folder_is_gone() -> bool:
    """Returns whether somebody has deleted the folder that this process is in."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no text').splitlines()[0]}"


def one_line(text: str) -> str:
    """`text` without line breaks or control characters, so that a log line stays one line."""
    flat = " ".join(text.split())
    return "".join(c if unicodedata.category(c)[0] != "C" else "\N{REPLACEMENT CHARACTER}" for c in flat)


def visible(text: str) -> str:
    """Returns the text with each character that would steer a terminal written out, such as \\x1b for ESC.

    These are all controls but the newline and the tab, and what reorders text (overrides, embeddings and
    isolates of direction).
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter in HARMLESS or unicodedata.category(letter) not in STEERING else repr(letter)[1:-1]
        for letter in text
    )


def shortened(text: str, most: int) -> str:
    """The text, cut to `most` characters."""
    return text if len(text) <= most else text[:most] + f"... ({len(text)} characters)"
