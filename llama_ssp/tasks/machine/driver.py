"""Reads what NVIDIA's driver says of all GPUs of a host, by nvidia-smi. No torch."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llama_ssp.distributed.bounded import said_within
from llama_ssp.distributed.gpus import SMI, gpus_here, is_shared

ASK_S = 10.0  # without persistence mode the driver first sets all GPUs up
DEVICE = Path("/dev/nvidia0")
FIELDS = (
    "uuid",
    "name",
    "driver_version",
    "compute_mode",
    "memory.total",
    "memory.used",
    "power.limit",
    "power.default_limit",
    "ecc.errors.uncorrected.volatile.total",
)
QUERY = [SMI, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
TOPOLOGY = [SMI, "topo", "-m"]
DRAWN = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines heads, also in a pipe
GPU_ROW = re.compile(r"GPU\d+")


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU by its driver. What the driver does not say is None."""

    uuid: str
    name: str
    driver: str
    mode: str  # of computing: Default, Exclusive_Process, Exclusive_Process (MPS), Prohibited
    total_mib: float | None
    used_mib: float | None
    power_w: float | None
    usual_power_w: float | None
    memory_errors: float | None
    is_shown: bool = True  # to this process: CUDA_VISIBLE_DEVICES may leave it out


@dataclass(frozen=True, kw_only=True)
class Driver:
    """What the driver says: its GPUs, how each two are linked, and why nvidia-smi fails, else empty."""

    cards: tuple[Card, ...] = ()
    links: tuple[str, ...] = ()  # the kinds between GPUs: NV18, PIX, NODE, SYS ...
    fails: str = ""
    has_device: bool = False  # whether the system has a file for a GPU


def driver_here() -> Driver:
    """Asks nvidia-smi."""
    said, fails = _said_by(QUERY)
    cards = cards_of(said)
    if is_shared():
        cards = tuple(_served(card) for card in cards)
    topology = ""
    if len(cards) > 1:
        topology, _ = _said_by(TOPOLOGY)
    shown = {gpu.uuid for gpu in gpus_here()} & {card.uuid for card in cards}
    if shown:  # parts of a GPU have names of their own
        cards = tuple(replace(card, is_shown=card.uuid in shown) for card in cards)
    return Driver(
        cards=cards,
        links=links_of(topology),
        fails=fails,
        has_device=DEVICE.exists(),
    )


def cards_of(said: str) -> tuple[Card, ...]:
    """Returns the GPUs in nvidia-smi's answer to QUERY."""
    cards = list[Card]()
    for line in said.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != len(FIELDS):
            continue
        of = dict(zip(FIELDS, words, strict=True))
        card = Card(
            uuid=of["uuid"],
            name=of["name"],
            driver=of["driver_version"],
            mode=of["compute_mode"],
            total_mib=_number(of["memory.total"]),
            used_mib=_number(of["memory.used"]),
            power_w=_number(of["power.limit"]),
            usual_power_w=_number(of["power.default_limit"]),
            memory_errors=_number(of["ecc.errors.uncorrected.volatile.total"]),
        )
        cards.append(card)
    return tuple(cards)


def _served(card: Card) -> Card:
    """Returns the card with another mode where it is exclusive: MPS has it for other processes."""
    if not card.mode.startswith("Exclusive"):
        return card
    return replace(card, mode=f"{card.mode} (MPS)")


def links_of(said: str) -> tuple[str, ...]:
    """Returns the kinds of links between two GPUs, in nvidia-smi's table of them."""
    rows = [line.split() for line in DRAWN.sub("", said).splitlines()]
    rows = [row for row in rows if row and GPU_ROW.fullmatch(row[0]) and "X" in row]
    kinds = {kind for row in rows for kind in row[1 : 1 + len(rows)]} - {"X"}
    return tuple(sorted(kinds))


def _number(word: str) -> float | None:
    """Returns the number; None for [N/A], [Not Supported] and the like."""
    try:
        return float(word)
    except ValueError:
        return None


def _said_by(command: Sequence[str]) -> tuple[str, str]:
    """Returns what the command prints, and why it fails; where it is not installed, neither."""
    if shutil.which(command[0]) is None:
        return "", ""
    said = said_within(ASK_S, command)
    if said.is_late:
        return "", f"no answer in {ASK_S:g} s"
    if said.fails:
        return "", said.fails
    if said.code:
        lines = (said.out + said.err).strip().splitlines() or [f"exit code {said.code}"]
        return "", lines[0]
    return said.out, ""
