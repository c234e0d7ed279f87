"""What CONTRIBUTING.md says of additions holds: a copy of the sources has one of each kind more, and runs it.

A rule takes a class, a name and a preset; a drafter two files, a number format three, a task three, a family
one. The test edits no other file.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from transformers import (
    ArceeConfig,
    ArceeForCausalLM,
    AutoModelForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
)

from tests.checkpoints import tokenizer, write_tokenizer
from tests.conftest import Command

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.long

RULE = '''
class HalfRule(TokenRule):
    """Accepts every draft half as often as the token rule; the correction makes up for it."""

    name = "half"

    def accept_chances(self, block: DraftBlock) -> Array:
        return super().accept_chances(block) / 2

    def correction_probs(self, block: DraftBlock, accepted_B: Array) -> Array:
        target_BV, draft_BV = block.probs_after(accepted_B)
        return block.correction(target_BV - smaller(target_BV, draft_BV) / 2, accepted_B)

RULES: dict'''
DRAFTER = '''
class RepeatDrafter(Drafter):
    """Drafts the last token again."""

    def __init__(self, spec: SpeculationConfig, sampler: Sampler) -> None:
        self._sampler = sampler

    def limit(self, length: int) -> int:
        return length

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        drafts = [text[-1:] * max(0, wanted) for text, wanted in zip(state.texts, count, strict=True)]
        return self._sampler.certain(state, drafts)


# What drafts from'''
FORMAT = '''
WIDE = Codes("int8", group=32)


def in_bytes(weight_NK: Tensor) -> Coded:
    """Returns the weight in groups of 32 signed bytes."""
    number_NGK = weight_NK.float().unflatten(1, (-1, WIDE.group))
    scale_NG1 = (number_NGK.abs().amax(2, keepdim=True) / 127).bfloat16()
    code_NGK = (number_NGK / scale_NG1.float()).nan_to_num().round().clamp(-127, 127).to(torch.int8)
    return Coded(
        kind=WIDE,
        inputs=weight_NK.shape[1],
        codes_NC=code_NGK.flatten(1).view(torch.uint8),
        scale_NG=scale_NG1.squeeze(2),
    )


QUANTISED[Dtype.wide] = WIDE
OWN = {Dtype.wide: in_bytes, '''
CONF = '''
@dataclass
class CountConf(TaskConf):
    """Count the tokens of a text."""

    name: str = key("count", "")
    text: str = key(MISSING, "The text.")


WRITING: list'''
TASK = '''"""task=count: how many tokens a text has."""

from typing import Any

from llama_ssp.config.tasks import CountConf
from llama_ssp.tasks.common import Task


class CountTask(Task[CountConf]):
    def run(self) -> str:
        self._results.append(len(self._open().tokens.encode(self._task.text)))
        return "done"

    def figures(self) -> dict[str, Any]:
        return {"tokens": self._results[0]}
'''
SCHEMA, NGRAM = "llama_ssp/config/schema.py", "llama_ssp/speculative/drafters/ngram.py"
RULES, TASKS = "llama_ssp/speculative/verification.py", "llama_ssp/config/tasks.py"
RUNNER = "llama_ssp/tasks/runner.py"
IMPORT = "\nfrom llama_ssp.tasks.count import CountTask\n\nWRITING: list"
FAMILIES, SHAPE, TENSORS, DECODER = (
    f"llama_ssp/models/{name}.py" for name in ("families", "shape", "block_tensors", "decoder")
)
ROW = (
    '    "arcee": Family(bias_keys=BIASES, mlp_states=2, names=replace(LLAMA_NAMES, up=("mlp.up_proj",))),\n'
    '    "smollm3": '
)
# Nemotron's layer norms multiply by 1 plus their weight, which only RMS norms do in other families.
FLAGGED_ROW = (
    '    "nemotron": Family(layer_norm=True, norm_offset=1, rotary=0.5, mlp_states=2, bias_keys=BIASES,\n'
    '                       names=replace(LLAMA_NAMES, up=("mlp.up_proj",))),\n    "smollm3": '
)
OFFSET_USED = "(self.offset + self.weight).to(x.dtype), bias, self.epsilon"
# Of each addition: the files, and what is put in place of what there.
ADDITIONS: dict[str, list[tuple[str, str, str]]] = {
    "rule": [
        (RULES, "\nRULES: dict", RULE),
        (RULES, "TokenRule(), ", "TokenRule(), HalfRule(), "),
        (SCHEMA, '"block", "token"]', '"block", "token", "half"]'),
        ("conf/speculation/half.yaml", "", "k: 3\nverification: half\n"),
    ],
    "drafter": [
        (SCHEMA, '"ngram", "none", "own"]', '"ngram", "none", "own", "repeat"]'),
        (NGRAM, "\n# What drafts from", DRAFTER),
        (NGRAM, "    Drafting.ngram:", "    Drafting.repeat: RepeatDrafter,\n    Drafting.ngram:"),
    ],
    "format": [
        (SCHEMA, '"nf4", "packed"]', '"nf4", "packed", "wide"]'),
        (SCHEMA, "OWN_CODES = (", "OWN_CODES = (Dtype.wide, "),
        ("llama_ssp/models/quantization.py", "\nOWN = {", FORMAT),
        ("llama_ssp/planner/storage.py", "\nMADE = {", '\nMADE = {Dtype.wide: Kept(8, 32, 2, "int8"),'),
    ],
    "task": [
        (TASKS, "\nWRITING: list", CONF),
        (TASKS, "PlanConf, CalibrateConf]", "PlanConf, CalibrateConf, CountConf]"),
        (RUNNER, "\nWRITING: list", IMPORT),
        (RUNNER, "AgreeTask, CalibrateTask]", "AgreeTask, CalibrateTask, CountTask]"),
        ("llama_ssp/tasks/count.py", "", TASK),
    ],
    "family": [(FAMILIES, '    "smollm3": ', ROW)],
    "flag": [
        (FAMILIES, '    "smollm3": ', FLAGGED_ROW),
        (SHAPE, 'EPSILONS = ("rms_norm_eps", ', 'EPSILONS = ("rms_norm_eps", "norm_eps", '),
        (DECODER, "self.weight.to(x.dtype), bias, self.epsilon", OFFSET_USED),
    ],
}


QUIET = "seed=1", "out=null", "output=json"
TEXT = 'task.prompts=["a a a a"]', "task.max_new_tokens=24"
GREEDY = "task=generate", *TEXT, "sampling.temperature=0", "engine=eager"
FP32 = (*GREEDY, "model.dtype=fp32")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with all additions."""
    place = tmp_path_factory.mktemp("additions")
    for folder in ("llama_ssp", "conf", "launch"):
        copytree(ROOT / folder, place / folder, symlinks=True)
    for file, before, after in (edit for edits in ADDITIONS.values() for edit in edits):
        source = (place / file).read_text(encoding="utf-8") if before else ""
        assert source.count(before) == 1 or not before, (file, before)
        (place / file).write_text(source.replace(before, after) if before else after, encoding="utf-8")
    return place


def document(checkout: Path, *words: str) -> dict[str, Any]:
    """The JSON of a run of the copy."""
    command = [sys.executable, "launch/run.py", *QUIET, *words]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_flag_touches_shape_tensors_decoder_and_a_row_at_most() -> None:
    assert {file for file, *_ in ADDITIONS["flag"]} <= {FAMILIES, SHAPE, TENSORS, DECODER}


@pytest.mark.parametrize(
    ("kind", "files"), [("rule", 3), ("drafter", 2), ("format", 3), ("task", 3), ("family", 1)]
)
def test_files_that_an_addition_touches(kind: str, files: int) -> None:
    assert len({file for file, *_ in ADDITIONS[kind]}) == files


def test_a_rule_is_certified(checkout: Path) -> None:
    small = ("task.samples=12", "task.max_new_tokens=3", "task.law_tokens=8", "task.law_rounds=8",
             "task.greedy_tokens=6", 'task.prompts=["hello there", "def f"]')  # fmt: skip
    found = document(checkout, "speculation=half", "task=certify", *small)
    outcomes = {check["name"]: check["outcome"] for check in found["checks"]}
    by_rounds = ["law", "filters", "decisions"]
    assert [outcomes[name] for name in by_rounds] == ["passed"] * len(by_rounds)


def test_a_drafter_leaves_the_text_as_it_is(checkout: Path, command: Command) -> None:
    words = (*FP32, "model=demo", "speculation.k=3")
    plain = command.line(*QUIET, *words, "speculation.drafter=none").document
    drafted = document(checkout, *words, "speculation.drafter=repeat")
    assert drafted["outputs"][0]["text"] == plain["outputs"][0]["text"]
    assert drafted["drafter"] == "repeat" and drafted["tokens_drafted"] > 0 == plain["tokens_drafted"]


def test_a_format_is_held_as_planned(checkout: Path, command: Command) -> None:
    usual = command.line(*QUIET, *GREEDY, "model=demo", "model.dtype=bf16").document
    wide = document(checkout, *GREEDY, "model=demo", "model.dtype=wide")
    held = wide["plan"]["memory"][0]["held_bytes"]
    assert held["predicted"] == held["measured"] < usual["plan"]["memory"][0]["held_bytes"]["measured"]
    assert wide["outputs"][0]["text"] == usual["outputs"][0]["text"]


def test_a_task_runs(checkout: Path) -> None:
    assert document(checkout, "task=count", "model=demo", "task.text=def f")["tokens"] > 1


ADDED = {
    "family": (ArceeConfig, ArceeForCausalLM),
    "flag": (NemotronConfig, NemotronForCausalLM),
}


@pytest.mark.parametrize("kind", ADDED)
def test_an_added_family_runs_over_ranks(kind: str, checkout: Path, tmp_path: Path) -> None:
    made = tokenizer()
    make_config, make_module = ADDED[kind]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    module = make_module(
        make_config(
            vocab_size=made.get_vocab_size(), num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
            bos_token_id=0, eos_token_id=1, initializer_range=0.2, **sizes,
        )
    )  # fmt: skip
    for name, bias in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(bias)
    module.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, made)
    split = document(checkout, *FP32, f"model={tmp_path}", "ranks=2", "task.ignore_eos=true")
    prompt = torch.tensor([made.encode("a a a a").ids])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).generate(
        prompt, do_sample=False, max_new_tokens=24, min_new_tokens=24, use_cache=False
    )
    assert split["outputs"][0]["token_ids"] == plain[0, prompt.shape[1] :].tolist()
    assert split["plan"]["memory"][1]["held_bytes"]["measured"] > 0
