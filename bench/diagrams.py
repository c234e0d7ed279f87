"""Draws the pictures that explain the method, and writes them as SVG.

    python bench/diagrams.py                    # round, placements, folders and block .svg in docs/pictures
    python bench/diagrams.py folder=/tmp/new    # elsewhere

Nothing in them is measured. What can be computed is computed by the package: the ranks and weights of a
placement, the imports between folders, the decision of a block. So they change with the code, and
tests/test_docs.py compares the committed files with those that this script makes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import yaml  # noqa: E402

from bench.drawing import MARGIN, WIDTH, Drawing  # noqa: E402
from bench.words import Words  # noqa: E402
from llama_ssp.config import DraftSeat, ModelConf, PlacementConf  # noqa: E402
from llama_ssp.config.presets import CONF  # noqa: E402
from llama_ssp.distributed.placement import Placement, resolve  # noqa: E402
from llama_ssp.models.sharding import head_ranges  # noqa: E402
from llama_ssp.planner.weights import ModelPart, weights  # noqa: E402
from llama_ssp.speculative.decision import block_of  # noqa: E402
from llama_ssp.speculative.rng import CounterDraws, Purpose, RoundNumbers, Slot, heat, prompt_key  # noqa: E402
from llama_ssp.speculative.verification import RULES, DraftBlock, Rule  # noqa: E402
from tests.plans import model  # noqa: E402
from tests.test_layers import MODULES, ORDER, within  # noqa: E402

# ---------------------------------------------------------------------------------- a round's messages

DRAFT_X = 160
LEADER_X = 450
OTHERS_X = 745
BOX_WIDTH = 240


def round_picture() -> Drawing:
    """Draws what ranks send in one round, with a draft on the target's ranks, and with a draft apart."""
    drawing = Drawing(
        title="The processes and messages of one round",
        description=(
            "Two sequences, time downwards. First, the draft is on ranks of the target: the leader drafts, "
            "and sends the drafts and the decision of the last round to the target's other ranks; all verify "
            "in one forward pass; the leader alone decides. Second, the draft has ranks of its own: the "
            "leader requests drafts from the draft's first rank, which replies with drafts and "
            "probabilities, and drafts ahead while the target's ranks verify."
        ),
        height=906,
    )
    drawing.text(MARGIN, 30, "One round: who computes, and what is sent", style="h")
    drawing.text(MARGIN, 51, "Time goes down. n is the number of the round.", colour="soft")
    _round_among_target(drawing, top=66)
    _round_apart(drawing, top=442)

    drawing.lines(
        MARGIN,
        870,
        [
            "Each message of the leader has the number of decided rounds and a checksum of the text lengths:",
            "a rank where one differs stops the run. Ranks need neither equal seeds nor equal rounding.",
        ],
        colour="soft",
    )
    return drawing


def _round_among_target(drawing: Drawing, top: int) -> None:
    """Draws the round of placement=leader, replicated and sharded."""
    settings = "placement=leader, replicated, sharded"
    _frame(drawing, top, 364, "The draft is on ranks of the target", settings)
    _lifelines(drawing, top=top + 52, bottom=top + 354, draft="")

    _message(drawing, top + 88, LEADER_X, OTHERS_X, "decision of n - 1, K of each row", dashed=True)
    _note(drawing, MARGIN + 4, top + 78, "Only to ranks that draft, too:", "replicated, sharded.")

    _work(drawing, top + 104, LEADER_X, "draft", "draft: K passes, x drawn from q")
    _work(drawing, top + 104, OTHERS_X, "draft", "draft: this rank's part or copy", dashed=True)
    _note(
        drawing,
        MARGIN + 4,
        top + 122,
        "Ranks add up the parts of a split",
        "draft. The leader's draws count.",
    )

    _message(drawing, top + 164, LEADER_X, OTHERS_X, "decision of n - 1, drafts")
    _verify(drawing, top + 180)
    _note(
        drawing, MARGIN + 4, top + 190, "Ranks add up their parts in every", "layer, and gather the logits."
    )

    _work(drawing, top + 222, LEADER_X, "rest", "decide: coins, and the token after")
    _note(drawing, MARGIN + 4, top + 234, "Alone: other ranks' numbers may", "differ in the last bit.")
    _work(drawing, top + 254, LEADER_X, "page", "commit, roll back the caches")

    _message(drawing, top + 308, LEADER_X, OTHERS_X, "decision of n, ... (round n + 1)")
    _work(drawing, top + 322, OTHERS_X, "page", "commit, roll back the caches")
    _note(drawing, MARGIN + 4, top + 312, "A decision travels with the first", "message of the next round.")


def _round_apart(drawing: Drawing, top: int) -> None:
    """Draws the round of placement=own."""
    _frame(drawing, top, 406, "The draft has ranks of its own", "placement=own")
    _lifelines(drawing, top=top + 52, bottom=top + 396, draft="the draft's first rank")
    beside = OTHERS_X - BOX_WIDTH / 2

    _message(drawing, top + 84, LEADER_X, DRAFT_X, "decision of n - 1, K (request)")
    _message(drawing, top + 106, DRAFT_X, LEADER_X, "received", colour="soft")
    _work(drawing, top + 118, DRAFT_X, "draft", "draft: K passes, x drawn from q")
    _note(
        drawing,
        beside,
        top + 84,
        "The leader and the draft have a",
        "TCP connection of their own. The",
        "draft passes requests on to its other",
        "ranks. If it guessed the text before,",
        "some or all drafts are ready.",
    )
    _message(drawing, top + 172, DRAFT_X, LEADER_X, "drafts, and q of every token (reply)")

    _message(drawing, top + 198, LEADER_X, OTHERS_X, "decision of n - 1, drafts")
    _verify(drawing, top + 214)
    drawing.box(DRAFT_X - BOX_WIDTH / 2, top + 214, BOX_WIDTH, 100, fill="draft", edge="draft-edge")
    drawing.lines(
        DRAFT_X,
        top + 242,
        [
            "draft ahead:",
            "as if all drafts were accepted,",
            "with a guess for the token after,",
            "until the next request comes",
        ],
        style="mid",
    )
    _work(drawing, top + 256, LEADER_X, "rest", "decide: coins, and the token after")
    _work(drawing, top + 288, LEADER_X, "page", "commit, roll back the caches")

    _message(drawing, top + 346, LEADER_X, DRAFT_X, "decision of n, K (round n + 1)")
    _work(drawing, top + 362, DRAFT_X, "page", "commit, roll back the caches")
    _note(drawing, beside, top + 338, "These ranks get the decision of n", "with the drafts of round n + 1.")


def _frame(drawing: Drawing, top: int, height: int, name: str, settings: str) -> None:
    """Draws the background of one sequence, its name, and the settings that it is for."""
    drawing.box(MARGIN - 8, top, WIDTH - 2 * MARGIN + 16, height, fill="panel")
    drawing.text(MARGIN + 4, top + 22, name, style="b")
    drawing.text(WIDTH - MARGIN - 4, top + 22, settings, style="code end", colour="soft")


def _note(drawing: Drawing, x: float, y: float, *words: str) -> None:
    """Writes lines that explain, over the rank's line where one is there."""
    drawing.box(x - 4, y - 14, 262, 17 * len(words) + 4, fill="panel")
    drawing.lines(x, y, words, colour="soft")


def _lifelines(drawing: Drawing, top: int, bottom: int, draft: str) -> None:
    """Draws the names of the ranks, and a line below each; without a name for the draft only two."""
    names = {LEADER_X: "rank 0, the leader", OTHERS_X: "the target's other ranks"}
    if draft:
        names[DRAFT_X] = draft
    for x, name in names.items():
        drawing.text(x, top, name, style="mid b")
        drawing.line([(x, top + 8), (x, bottom)], dashed=True)


def _message(
    drawing: Drawing,
    y: float,
    start: float,
    end: float,
    words: str,
    colour: str = "ink",
    dashed: bool = False,
) -> None:
    """Draws an arrow from one rank's line to another's, with its content above it."""
    drawing.arrow(start, end, y, colour=colour, dashed=dashed)
    drawing.text((start + end) / 2, y - 6, words, style="mid", colour=colour)


def _work(drawing: Drawing, y: float, x: float, fill: str, words: str, dashed: bool = False) -> None:
    """Draws what a rank computes, on its line."""
    edge = "edge" if fill == "page" else f"{fill}-edge"
    drawing.box(x - BOX_WIDTH / 2, y, BOX_WIDTH, 26, fill=fill, edge=edge, dashed=dashed)
    drawing.text(x, y + 18, words, style="mid")


def _verify(drawing: Drawing, y: float) -> None:
    """Draws the target's pass on the leader and on the other ranks, and the sums between them."""
    _work(drawing, y, LEADER_X, "target", "verify: one pass, K + 1 positions")
    _work(drawing, y, OTHERS_X, "target", "verify: this rank's part of it")
    drawing.arrow(LEADER_X + BOX_WIDTH / 2, OTHERS_X - BOX_WIDTH / 2, y + 13, colour="target-edge", both=True)


# ---------------------------------------------------------------------------------- placements

GPUS = 8
GPU_X = 214
GPU_STEP = 84
GPU_WIDTH = 78
PIXELS_PER_GIB = 5
TWO_LINES = 35  # pixels: lower boxes have their labels above them


@dataclass(frozen=True)
class Panel:
    """A placement that is drawn: its preset, what else is set, and lines that say it."""

    preset: str
    says: tuple[str, ...]
    draft_degree: int = 0

    @property
    def settings(self) -> list[str]:
        """Returns the settings as a command has them."""
        words = [f"placement={self.preset}"]
        if self.draft_degree:
            words.append(f"placement.draft_degree={self.draft_degree}")
        return words

    def placement(self) -> Placement:
        """Returns the ranks that the program takes."""
        content = yaml.safe_load((CONF / "placement" / f"{self.preset}.yaml").read_text(encoding="utf-8"))
        seat = DraftSeat(content["draft"])
        conf = PlacementConf(draft=seat, draft_degree=self.draft_degree or None)
        return resolve(conf, GPUS, drafts=True)


PANELS = (
    Panel(preset="leader", says=("The draft is whole,", "on rank 0.")),
    Panel(preset="replicated", says=("A whole draft on", "each rank.")),
    Panel(preset="sharded", says=("The draft is split over", "the target's ranks.")),
    Panel(preset="own", says=("The draft has ranks", "of its own."), draft_degree=2),
)


def placements_picture() -> Drawing:
    """Draws which GPU holds what of 30B and 7B in four placements; heights are bytes of weights."""
    target = model("30B")
    draft = model("7B")
    drawing = Drawing(
        title="Four placements of a target of 30B and a draft of 7B on 8 GPUs",
        description=" ".join(
            f"placement={panel.preset}: {panel.placement().in_words()}." for panel in PANELS
        ),
        height=766,
    )
    drawing.text(
        MARGIN, 30, "Placements: the target 30B and the draft 7B on 8 GPUs, one rank each", style="h"
    )
    what = "A box's height is its weights in bf16. A GPU's number is its rank; rank 0 leads."
    drawing.text(MARGIN, 51, what, colour="soft")
    drawing.box(GPU_X + 422, 40, 14, 14, fill="target", edge="target-edge")
    drawing.text(GPU_X + 442, 52, "target")
    drawing.box(GPU_X + 502, 40, 14, 14, fill="draft", edge="draft-edge")
    drawing.text(GPU_X + 522, 52, "draft")

    top = 66
    for panel in PANELS:
        _placement(drawing, panel, top, target, draft)
        top += 164

    drawing.lines(
        MARGIN,
        top + 14,
        [
            "Heads are those of attention: 30B has 52, 7B has 32. Each part has whole heads.",
            "The MLP and the vocabulary are split, too. A split draft's first rank has its whole embedding.",
        ],
        colour="soft",
    )
    return drawing


def _placement(drawing: Drawing, panel: Panel, top: int, target: ModelConf, draft: ModelConf) -> None:
    """Draws the GPUs of one placement, each with its part of the target below its part of the draft."""
    placement = panel.placement()
    floor = top + 150
    drawing.lines(MARGIN, top + 34, panel.settings, style="code b")
    drawing.lines(MARGIN, top + 45 + 17 * len(panel.settings), panel.says, colour="soft")

    for rank in range(GPUS):
        x = GPU_X + GPU_STEP * rank
        drawing.box(x, top + 4, GPU_WIDTH, floor - top, fill="panel", edge="edge")
        drawing.text(x + GPU_WIDTH / 2, top + 20, f"GPU {rank}", style="mid", colour="soft")
        height = 0.0
        if rank in placement.target:
            part = (len(placement.target), placement.target.index(rank))
            height = _slice(drawing, x, floor, "target", target, part)
        if rank in placement.draft:
            part = (1, 0) if placement.copies else (len(placement.draft), placement.draft.index(rank))
            _slice(drawing, x, floor - height, "draft", draft, part)


def _slice(
    drawing: Drawing, x: float, floor: float, role: str, conf: ModelConf, part: tuple[int, int]
) -> float:
    """Draws a rank's part of a model, standing on `floor`; returns its height."""
    world, rank = part
    held = weights(ModelPart.of(conf, world, rank, leader_looks_up=role == "draft"))
    gib = sum(2 * weight.count * weight.times for weight in held) / 2**30
    height = PIXELS_PER_GIB * gib
    drawing.box(x + 3, floor - height, GPU_WIDTH - 6, height, fill=role, edge=f"{role}-edge")

    heads = head_ranges(conf.n_heads, conf.n_kv_heads, world, rank).queries
    words = "whole" if world == 1 else f"{heads} heads"
    base = floor - height / 2 - 3 if height >= TWO_LINES else floor - height - 22
    drawing.text(x + GPU_WIDTH / 2, base, words, style="mid")
    drawing.text(x + GPU_WIDTH / 2, base + 16, f"{gib:.1f} GiB", style="mid")
    return height


# ---------------------------------------------------------------------------------- folders

DOORS = {"__main__", "llama_ssp"}  # they pass on to cli.py, and to pair/
ROW = 44
LANE_X = 598
LANE_STEP = 27
OUT = 9  # below a box's top: where its line leaves
IN = 23  # where its arrow arrives


def folders() -> list[str]:
    """Returns the package's folders and loose files, those that import before those that are imported."""
    return [room for rooms in ORDER for room in sorted(rooms) if room not in DOORS]


def imports() -> dict[str, set[str]]:
    """Returns what each folder imports from others, by the syntax trees of its modules."""
    result: dict[str, set[str]] = {room: set() for room in folders()}
    for module in MODULES:
        if module.room in result:
            rooms = {name.partition(".")[0] for imported in module.imports if (name := within(imported))}
            result[module.room] |= rooms - {module.room} - DOORS
    return result


def purposes() -> dict[str, str]:
    """Returns what CONTRIBUTING.md says of each folder, and of errors.py what it says itself."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = re.findall(r"^    (\w+)(?:/|\.py) {2,}(\S.*)$", page, re.MULTILINE)
    return {**dict(listed), "errors": "all errors, with their exit codes"}


def folders_picture() -> Drawing:
    """Draws the folders in the order of imports, with a lane of arrows from each to all that it imports."""
    arrows = imports()
    rows = {room: 92 + ROW * place for place, room in enumerate(arrows)}
    lanes = {room: LANE_X + LANE_STEP * place for place, room in enumerate(arrows)}
    says = purposes()
    edge_x = LANE_X - 34
    drawing = Drawing(
        title="The folders of llama_ssp and their imports",
        description=" ".join(
            f"{room} imports {', '.join(name for name in rows if name in arrows[room]) or 'nothing'}."
            for room in arrows
        ),
        height=92 + ROW * len(rows) + 26,
    )
    drawing.text(MARGIN, 30, "The folders of llama_ssp/, and who imports whom", style="h")
    drawing.lines(
        MARGIN,
        52,
        [
            "From each folder a line goes right, then down. A dot joins it to an arrow: the folder",
            "imports what the arrow points to. No folder imports one above it (tests/test_layers.py).",
        ],
        colour="soft",
    )

    for room, y in rows.items():
        name = f"{room}.py" if room in ("cli", "errors") else f"{room}/"
        core = room == "speculative"  # the algorithm
        fill, edge = ("target", "target-edge") if core else ("panel", "edge")
        drawing.box(MARGIN, y, edge_x - MARGIN, 32, fill=fill, edge=edge)
        drawing.text(MARGIN + 10, y + 21, name, style="code b")
        drawing.text(MARGIN + 120, y + 21, says[room], colour="soft" if not core else "ink")

    for room, names in arrows.items():
        if names:
            lowest = max(rows[name] for name in names)
            start = rows[room] + OUT
            x = lanes[room]
            drawing.line([(edge_x, start), (x, start), (x, lowest + IN)], colour="target-edge")
    for room, y in rows.items():
        importing = [lanes[name] for name in arrows if room in arrows[name]]
        if importing:
            drawing.arrow(max(importing), edge_x, y + IN, colour="target-edge")
        for x in importing:
            drawing.box(x - 4, y + IN - 4, 8, 8, fill="target-edge")
    return drawing


# ---------------------------------------------------------------------------------- a block is decided

TEXT = ("the", "cat")
VOCAB = ("sat", "on", "by", "the", "a", "mat", "bed")
DRAFTED = ("sat", "on", "the", "mat")
# Of each position: the target's probabilities p and the draft's q of VOCAB, in hundredths.
TARGET = (
    (60, 5, 5, 5, 5, 10, 10),
    (5, 45, 30, 5, 5, 5, 5),
    (0, 5, 5, 60, 10, 15, 5),
    (0, 5, 5, 4, 5, 30, 51),
    (0, 10, 50, 10, 10, 10, 10),
)
DRAFT = (
    (50, 10, 10, 5, 5, 10, 10),
    (5, 75, 5, 5, 5, 5, 0),
    (0, 5, 5, 40, 40, 5, 5),
    (0, 0, 5, 5, 10, 70, 10),
)
SEED = 91  # of the coins: one with which the rules keep different numbers of drafts
COLUMN_X = 150
COLUMN_STEP = 186
BAR = 118  # the width of a bar of probability 1


@dataclass(frozen=True)
class Decided:
    """What a rule makes of the block: its coins, which of them pass, and what is committed."""

    chances: list[float]
    passed: list[bool]
    accepted: int
    correction: list[float]
    token: str

    @property
    def committed(self) -> list[str]:
        return [*DRAFTED[: self.accepted], self.token]


def example() -> DraftBlock:
    """Returns the block that is drawn, one row."""
    return block_of(
        torch.tensor([TARGET], dtype=torch.float64) / 100,
        torch.tensor([DRAFT], dtype=torch.float64) / 100,
        torch.tensor([[VOCAB.index(token) for token in DRAFTED]]),
        torch.tensor([len(DRAFTED)]),
    )


def numbers() -> RoundNumbers:
    """Returns the round's random numbers, as a run with this seed has them."""
    draws = CounterDraws(SEED)
    slot = Slot(keys=(prompt_key("0"),), bases=(len(TEXT),), purpose=Purpose.ACCEPT)
    device = torch.device("cpu")
    return RoundNumbers(
        draws.uniforms(slot, len(DRAFTED), device), draws.clocks(slot, 2 * heat(len(VOCAB)), device)
    )


def decided(rule: Rule) -> Decided:
    """Returns what the rule decides, by the functions that a run calls."""
    block = example()
    draws = numbers()
    accepted_B, token_B = rule.decide(block, draws)
    chance_BK = rule.accept_chances(block)
    return Decided(
        chances=chance_BK[0].tolist(),
        passed=draws.bernoulli(chance_BK)[0].tolist(),
        accepted=int(accepted_B),
        correction=rule.correction_probs(block, accepted_B)[0].tolist(),
        token=VOCAB[int(token_B)],
    )


def block_picture() -> Drawing:
    """Draws one block of four drafts, decided by the token rule and by the block rule with the same coins."""
    results = {name: decided(RULES[name]) for name in ("token", "block")}
    said = "; ".join(
        f"the {name} rule keeps {result.accepted} and commits {' '.join(result.committed)}"
        for name, result in results.items()
    )
    drawing = Drawing(
        title="One block of four drafts, decided by both rules",
        description=(
            f"After the text {' '.join(TEXT)} the drafts are {' '.join(DRAFTED)}. For each the picture has "
            "the target's and the draft's probabilities, and the coin that is tossed. With the same coins "
            f"{said}."
        ),
        height=846,
    )
    drawing.text(
        MARGIN, 30, "One block of K = 4 drafts, decided by both rules with the same coins", style="h"
    )
    drawing.text(
        MARGIN, 51, f"The text so far: {' '.join(TEXT)}. Seven tokens are all the vocabulary.", colour="soft"
    )
    drawing.box(WIDTH - 300, 40, 14, 14, fill="target-edge")
    drawing.text(WIDTH - 280, 52, "p of the target")
    drawing.box(WIDTH - 150, 40, 14, 14, fill="draft-edge")
    drawing.text(WIDTH - 130, 52, "q of the draft")

    _distributions(drawing, top=72)
    _shared_rows(drawing, top=330)
    _token_rule(drawing, 398, results["token"])
    _block_rule(drawing, 482, results["block"])
    for place, (name, result) in enumerate(results.items()):
        _commit(drawing, MARGIN - 8 + 438 * place, 602, name, result)
    return drawing


def _distributions(drawing: Drawing, top: int) -> None:
    """Draws p and q at each draft's position, and marks the token that was drafted."""
    for row, token in enumerate(VOCAB):
        drawing.text(COLUMN_X - 16, top + 66 + 26 * row, token, style="end code")

    prefix = list(TEXT)
    for place, token in enumerate(DRAFTED):
        x = COLUMN_X + COLUMN_STEP * place
        drawing.box(x - 8, top, COLUMN_STEP - 8, 234, fill="panel")
        drawing.text(x, top + 20, f"draft {place + 1}: {token}", style="b")
        drawing.text(x, top + 38, f"after ... {' '.join(prefix[-3:])}", colour="soft")

        for row, name in enumerate(VOCAB):
            y = top + 52 + 26 * row
            p = TARGET[place][row] / 100
            q = DRAFT[place][row] / 100
            if name == token:
                drawing.box(x - 5, y - 3, COLUMN_STEP - 14, 25, fill="page", edge="edge")
            _bar(drawing, x, y, p, "target-edge")
            _bar(drawing, x, y + 10, q, "draft-edge")
            if name == token:
                drawing.text(x + COLUMN_STEP - 22, y + 14, f"{p:.2f}, {q:.2f}", style="end")
        prefix.append(token)


def _bar(drawing: Drawing, x: float, y: float, value: float, colour: str) -> None:
    """Draws a probability as a bar; nothing for 0."""
    if value:
        drawing.box(x, y, BAR * value, 8, fill=colour)


def _row(drawing: Drawing, y: float, label: str, values: Sequence[str], colours: Sequence[str] = ()) -> None:
    """Writes a row of a table: its name, and a value under each draft."""
    drawing.text(MARGIN, y, label, colour="soft")
    for place, value in enumerate(values):
        colour = colours[place] if colours else "ink"
        drawing.text(COLUMN_X + COLUMN_STEP * place, y, value, colour=colour, style="b" if colours else "")


def _shared_rows(drawing: Drawing, top: int) -> None:
    """Writes what both rules use: the ratios and the coins' random numbers."""
    pairs = [
        (TARGET[place][VOCAB.index(token)] / 100, DRAFT[place][VOCAB.index(token)] / 100)
        for place, token in enumerate(DRAFTED)
    ]
    _row(drawing, top, "p(x) / q(x)", [f"{p:.2f} / {q:.2f} = {p / q:.2f}" for p, q in pairs])
    coins = numbers().uniform_BK[0].tolist()
    _row(drawing, top + 22, "coin u, in [0, 1)", [f"{coin:.2f}" for coin in coins])


def _coin_rows(drawing: Drawing, y: float, result: Decided) -> None:
    """Writes how each coin falls."""
    coins = numbers().uniform_BK[0].tolist()
    words = [
        f"{coin:.2f} < {chance:.2f}: passes" if passed else f"{coin:.2f} ≥ {chance:.2f}: fails"
        for coin, chance, passed in zip(coins, result.chances, result.passed, strict=True)
    ]
    _row(drawing, y, "u < chance?", words, ["rest-edge" if passed else "bad" for passed in result.passed])


def _token_rule(drawing: Drawing, top: int, result: Decided) -> None:
    """Writes the token rule's chances, and how its coins fall."""
    drawing.line([(MARGIN, top - 24), (WIDTH - MARGIN, top - 24)])
    drawing.text(MARGIN, top - 4, "Token rule", style="b")
    drawing.text(
        COLUMN_X, top - 4, "chance = min(1, p / q); the first coin that fails ends the block", colour="soft"
    )
    _row(drawing, top + 17, "chance", [f"{chance:.2f}" for chance in result.chances])
    _coin_rows(drawing, top + 38, result)


def _block_rule(drawing: Drawing, top: int, result: Decided) -> None:
    """Writes the block rule's weights, chances, and how its coins fall."""
    block = example()
    carried = block.carried_BW[0].tolist()
    spare = block.spare_BJ[0].tolist()
    drawing.line([(MARGIN, top - 24), (WIDTH - MARGIN, top - 24)])
    drawing.text(MARGIN, top - 4, "Block rule", style="b")
    drawing.lines(
        COLUMN_X,
        top - 4,
        [
            "chance = S[i] / (S[i] + 1 - P[i]), the last one P[4]; the last coin that passes ends the block",
            "S[i] = sum of max(P[i] p - q, 0) over the tokens that may follow draft i",
        ],
        colour="soft",
    )
    weighed = [f"min({before:.2f} p / q, 1) = {after:.2f}" for before, after in pairwise(carried)]
    _row(drawing, top + 36, "P[i], P[0] = 1", weighed)
    _row(drawing, top + 57, "S[i]", [*(f"{mass:.2f}" for mass in spare), ""])
    _row(drawing, top + 78, "chance", [f"{chance:.2f}" for chance in result.chances])
    _coin_rows(drawing, top + 99, result)


def _commit(drawing: Drawing, x: float, top: int, name: str, result: Decided) -> None:
    """Draws the distribution of the token after the accepted drafts, and what is committed."""
    kept = result.accepted
    weight = example().carried_BW[0, kept].item() if name == "block" else 1.0
    factor = "" if weight == 1.0 else f"{weight:.2f} "
    drawing.box(x, top, 422, 224, fill="panel")
    plural = "" if kept == 1 else "s"
    drawing.text(x + 12, top + 22, f"{name.capitalize()} rule: {kept} draft{plural} accepted", style="b")
    drawing.text(
        x + 12,
        top + 42,
        f"Next token from max({factor}p - q, 0) / sum, at position {kept + 1}:",
        colour="soft",
    )
    for row, token in enumerate(VOCAB):
        y = top + 53 + 18 * row
        drawing.text(x + 52, y + 11, token, style="end code")
        value = result.correction[row]
        if value:
            drawing.box(x + 62, y, 240 * value, 13, fill="rest", edge="rest-edge")
            drawing.text(x + 70 + 240 * value, y + 11, f"{value:.2f}")

    drawing.text(x + 12, top + 206, "Committed:")
    place = x + 92
    for index, token in enumerate(result.committed):
        width = 16 + 9 * len(token)
        fill = "draft" if index < kept else "rest"
        drawing.box(place, top + 189, width, 24, fill=fill, edge=f"{fill}-edge")
        drawing.text(place + width / 2, top + 206, token, style="mid code")
        place += width + 8


PICTURES: dict[str, Callable[[], Drawing]] = {
    "round": round_picture,
    "placements": placements_picture,
    "folders": folders_picture,
    "block": block_picture,
}


@dataclass
class Asked(Words):
    """The command line."""

    folder: str = str(ROOT / "docs" / "pictures")


def main() -> None:
    folder = Path(Asked.of(sys.argv[1:]).folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
