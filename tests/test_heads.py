"""Trained heads: logits against a second reading of the formulas, what is declared, what is refused.

EAGLE-3 heads draft one token a pass; DFlash heads give all drafts in one.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llama_ssp import plan
from llama_ssp.config import DraftSeat, ModelConf, PlacementConf, SamplingConfig, Splitting
from llama_ssp.errors import ModelError, UsageError
from llama_ssp.models import kept_files
from llama_ssp.models.checkpoint import complete
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.heads import settings
from llama_ssp.models.heads.model import HeadModel
from llama_ssp.placing.pairs import require_head
from llama_ssp.planner.speed import RoundTimes
from llama_ssp.speculative.draft_length import Costs, FixedDraftLength
from llama_ssp.speculative.drafters.head import HeadDrafter
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.logprobs import LogprobReader
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.verification import RULES
from tests import checkpoints
from tests.conftest import Command
from tests.families import VOCAB, build, decoder_of, model_of, ragged_prompts
from tests.heads import DFlashReference, Reference, loaded, save_dflash, save_head
from tests.rig import drive, engine_of, speculate, steps_of

TAPS = (0, 1, 3)  # of three blocks: before the first, between, behind the last
DIM = 32  # of the small targets
HEAT = 4.0  # the small targets are so certain that they would accept nothing
SOME = [token for token in range(VOCAB) if token % 3]
PROMPTS = ragged_prompts(9, 1, 4, 2)
LAYOUTS: dict[str, dict[str, Any]] = {
    "speculators": {},
    "raw": {"raw": True},
    "raw, own width": {"raw": True, "dim": 12, "target_hidden_size": DIM},
    "reduced vocabulary": {"ids": SOME},
    "norm_before_residual": {"flags": ("norm_before_residual",)},
    "norm_before_fc": {"flags": ("norm_before_fc", "norm_before_residual")},
    "fc_norm, norm_output": {"flags": ("fc_norm", "norm_output")},
    "qwen3 block": {"block": "qwen3", "ids": SOME},
    "the target's embedding": {"embeds": False, "dim": DIM, "raw": True},
    "DFlash": {},
    "DFlash, raw": {"raw": True},
    "DFlash, reduced vocabulary": {"ids": SOME},
    "DFlash, tables of its own, a draft at the anchor": {"whole": True, "anchor": True, "width": 3},
    "DFlash, a wider block, three layers": {"width": 7, "layers": 3},
}


def eagle(folder: Path, **how: Any) -> Path:
    return save_head(folder, **({"vocab": VOCAB, "target_dim": DIM, "taps": TAPS} | how))


def dflash(folder: Path, **how: Any) -> Path:
    return save_dflash(folder, **({"vocab": VOCAB, "dim": DIM, "taps": (1, 2)} | how))


KINDS = pytest.mark.parametrize("save", [eagle, dflash])


def pair_of(folder: Path, **how: Any) -> tuple[Any, DecoderModel, HeadModel]:
    """A target's module, the target with taps, and the head of the folder."""
    module = build("llama-gqa")
    model = DecoderModel(decoder_of(module), module.config, "target")
    head = loaded(folder, 3, *tables_of(module), **how)
    model.tap(head.taps)
    return module, model, head


def tables_of(module: Any) -> tuple[Tensor, Tensor]:
    return module.get_input_embeddings().weight, module.get_output_embeddings().weight


def engine_with(folder: Path, rule: str = "block", heat: float = HEAT) -> Engine:
    _, model, head = pair_of(folder)
    return engine_of(model, head, rule, sampling=SamplingConfig(temperature=heat), draws=5, chunk=3)


def states_of(module: Any, text: list[int], taps: tuple[int, ...]) -> Tensor:
    """The target's hidden states at the taps, by transformers; what the last block gives, before its norm."""
    given: list[Tensor] = []
    hook = module.model.norm.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    hidden = module(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
    hook.remove()
    states = [*hidden[:-1], given[-1]]
    return torch.cat([states[tap][0] for tap in taps], -1)


class Compared:
    """A drafter whose proposals are compared, one by one, with what the reference declares from nothing."""

    def __init__(self, module: Any, reference: Reference, engine: Engine, taps: tuple[int, ...]) -> None:
        self.module, self.reference, self.taps = module, reference, taps
        self.count, self._propose = 0, engine.drafter.propose
        engine.drafter.propose = self.propose  # type: ignore[method-assign]
        if isinstance(engine.drafter, HeadDrafter):
            engine.drafter._window = 8  # so that states wait in few places

    def propose(self, state: State, count: tuple[int, ...]) -> Any:
        proposal = self._propose(state, count)
        for row, drafted in enumerate(proposal.count):
            text, drafts = state.texts[row], proposal.drafted_BK[row, :drafted].tolist()
            for place in range(drafted):
                states = states_of(self.module, text, self.taps)[:-1]
                expected = self.reference.probs(states, text, drafts[:place], VOCAB, HEAT)
                declared = proposal.draft_BKV[row, place].double()
                torch.testing.assert_close(declared, expected, rtol=0, atol=1e-5)
                self.count += 1
        return proposal


def compared(folder: Path, kind: type[Reference] = Reference, fast: bool = False) -> int:
    """A sampled run of ragged rows with rejections; how many declared distributions were compared."""
    module, model, head = pair_of(folder, fast=fast)
    engine = engine_of(model, head, sampling=SamplingConfig(temperature=HEAT), draws=3, chunk=3)
    watched = Compared(module, kind(folder, *tables_of(module)), engine, head.taps)
    _, steps = steps_of(engine, PROMPTS, 10, 3)
    accepted = sum(row.accepted for step in steps for row in step.rows)
    drafted = sum(len(row.drafted) for step in steps for row in step.rows)
    assert 0 < accepted < drafted, "the run saw no rejection, or no draft that stood"
    return watched.count


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_declared_distributions_are_the_published_formulas(layout: str) -> None:
    """After rejections, of ragged rows, in every layout and with every flag; the reference keeps nothing."""
    save, kind = (dflash, DFlashReference) if layout.startswith("DFlash") else (eagle, Reference)
    with TemporaryDirectory() as folder:
        assert compared(save(Path(folder), **LAYOUTS[layout]), kind) > 15


def theirs_of(model: Any, config: Any, folder: Path, **keys: Any) -> Any:
    content = json.loads((folder / "config.json").read_text())
    layer = {**content["transformer_layer_config"], "attn_implementation": "eager"}
    settings = config(transformer_layer_config=layer, draft_vocab_size=VOCAB, **keys)
    settings.transformer_layer_config._attn_implementation = "eager"
    head = model(settings).float().eval()
    loaded = head.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not loaded.unexpected_keys
    return head


@pytest.mark.parametrize(
    "flags",
    [(), ("norm_before_residual", "norm_before_fc"), ("fc_norm", "norm_output")],
    ids=["no norms", "norms before", "norms of fc"],
)
@torch.inference_mode()
def test_the_second_reading_is_that_of_speculators(flags: tuple[str, ...], tmp_path: Path) -> None:
    """All logits of its training pass of three steps: where that library is installed."""
    core = pytest.importorskip("speculators.models.eagle3.core", reason="speculators is not installed")
    folder = eagle(tmp_path, flags=flags, dim=DIM)
    keys = {**dict.fromkeys(flags, True), "eagle_aux_hidden_state_layer_ids": list(TAPS)}
    theirs = theirs_of(core.Eagle3DraftModel, core.Eagle3SpeculatorConfig, folder, **keys)
    steps: list[Tensor] = []
    theirs.lm_head.register_forward_hook(lambda _, __, logits: steps.append(logits[0]))
    reference, text = Reference(folder), [5, 9, 30, 31, 60, 7, 7, 12]
    states = torch.randn(len(text) - 1, 3 * DIM, generator=torch.Generator().manual_seed(2))
    theirs(states[None], torch.tensor([text[1:]]), torch.zeros(1, len(text) - 1, dtype=torch.int64))
    for step, logits in enumerate(steps):
        for place in range(len(text) - 1 - step):
            now, drafts = text[: place + 2], text[place + 2 : place + 2 + step]
            expected = reference.logits(states[: place + 1], now, drafts)
            assert (logits[place] - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert len(steps) == 3


@torch.inference_mode()
def test_the_second_reading_of_blocks_is_that_of_speculators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All logits of two blocks of its training pass."""
    core = pytest.importorskip("speculators.models.dflash.core", reason="speculators is not installed")
    folder = dflash(tmp_path, whole=True)
    keys = {"block_size": 4, "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": VOCAB - 1}
    theirs = theirs_of(core.DFlashDraftModel, core.DFlashSpeculatorConfig, folder, **keys)
    anchors = torch.tensor([3, 6])
    monkeypatch.setattr(core, "select_anchors", lambda *_: (anchors, torch.ones(2, dtype=torch.bool)))
    text = [5, 9, 30, 31, 60, 7, 7, 12, 40, 41, 3, 8]
    states = torch.randn(len(text), 2 * DIM, generator=torch.Generator().manual_seed(2))
    ones, last = torch.ones(1, len(text)), torch.zeros(1, len(text), DIM)
    given = states[None], torch.tensor([text]), ones, last, torch.zeros(1, len(text), dtype=torch.int64)
    logits = theirs._backbone_forward(*given, max_anchors=2)[1][0].view(2, 4, VOCAB)
    reference = DFlashReference(folder)
    for block, anchor in enumerate(anchors.tolist()):
        for place in range(3):
            expected = reference.logits(states[:anchor], text[: anchor + 1], [0] * place)
            assert (logits[block, place + 1] - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_another_text_goes_on_from_a_common_beginning(tmp_path: Path) -> None:
    """As in a conversation: longer, changed in the middle, and cut; every declared distribution is right.

    Then as in a batch: a row gets another text, which is longer than the states that wait.
    """
    folder = eagle(tmp_path)
    engine = engine_with(folder)
    watched = Compared(build("llama-gqa"), Reference(folder), engine, TAPS)
    state = engine.prefill(PROMPTS[:1], 40)
    first = list(PROMPTS[0].token_ids)
    turns = [first, [*first, 9, 9], [*first[:6], 7, 8, 9, 10], first[:4], [11, 12], [13], [13, 14, 15]]
    for reuse, text in [
        *((True, turn) for turn in turns),
        *((False, t) for t in ([*range(1, 21)], [5], first)),
    ]:
        before = watched.count
        engine.admit(state, {0: Prompt(str(len(text)), tuple(text))}, reuse)
        for _ in generate(engine, state, Limits(8), FixedDraftLength(2, 1)):
            pass
        assert watched.count >= before + 4, (reuse, text)


def test_a_text_has_the_log_probabilities_that_it_was_written_with(tmp_path: Path) -> None:
    """The head takes no part in scores, before it has read a text and after."""
    engine = engine_with(eagle(tmp_path))
    engine.logprobs = LogprobReader(1)
    before = engine.score(PROMPTS, engine.logprobs)
    state, _ = steps_of(engine, PROMPTS, 12, 3)
    texts = [Prompt(prompt.id, tuple(text)) for prompt, text in zip(PROMPTS, state.texts, strict=True)]
    scores = engine.score(texts, engine.logprobs)
    for prompt, written, whole in zip(before, state.logprobs, scores, strict=True):
        expected = [token.logprob for token in whole[1:]]
        assert [token.logprob for token in [*prompt[1:], *written]] == pytest.approx(expected, abs=1e-4)


@KINDS
@pytest.mark.parametrize("rule", RULES)
def test_greedy_texts_are_the_targets(rule: str, save: Callable[..., Path], tmp_path: Path) -> None:
    """A block of DFlash has places for 3 drafts, which one pass gives."""
    engine = engine_with(save(tmp_path), rule, heat=0.0)
    run = drive(engine, PROMPTS, k=8)
    assert run.texts == speculate(model_of("llama-gqa"), PROMPTS, None, k=0).texts
    assert 0 < run.drafted <= (3 if save is dflash else 1) * len(PROMPTS) * engine.drafter.forwards


@pytest.mark.parametrize(
    ("save", "context"),
    [(eagle, 160), (dflash, 160), (dflash, 17)],
    ids=["EAGLE-3", "DFlash", "DFlash, whose context ends within a block"],
)
def test_a_head_holds_the_bytes_that_are_planned(
    save: Callable[..., Path], context: int, command: Command, tmp_path: Path
) -> None:
    """Weights, caches and waiting states; a block stands in the cache beyond the text, up to the context."""
    module = build("llama-gqa", vocab_size=300, bos_token_id=0, eos_token_id=1, pad_token_id=1)
    module.save_pretrained(tmp_path / "target")
    checkpoints.write_tokenizer(tmp_path / "target", checkpoints.tokenizer(300))
    head = save(tmp_path / "head", vocab=300, context=context)

    pair = f"model={tmp_path / 'target'}", f"draft={head}", "model.dtype=fp32", "draft.dtype=fp32"
    limits = "speculation.k=3", "task.max_new_tokens=12", "task.ignore_eos=true", "seed=3"
    answer = command(*pair, *limits, "prompt=the fox", "output=json")
    assert answer.code == 0 and answer.document["tokens_drafted"] > 0, answer.errors
    (memory,) = answer.document["plan"]["memory"]
    assert memory["held_bytes"]["predicted"] == memory["held_bytes"]["measured"]


def test_damaged_logits_are_noticed(tmp_path: Path) -> None:
    tensors = load_file(file := eagle(tmp_path) / "model.safetensors")
    tensors["lm_head.weight"][4] = torch.nan
    save_file(tensors, file)
    assert drive(engine_with(tmp_path), PROMPTS[:1], k=2, max_new=4).finish == ["error"]


@pytest.mark.long  # the kernels and the programs are compiled
@pytest.mark.compiler
def test_compiled_steps_are_those_of_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The published formulas hold, and one program serves all numbers of tokens."""
    monkeypatch.setattr(kept_files, "cache_folder", lambda: tmp_path / "kept")
    with torch.inference_mode():
        assert compared(eagle(tmp_path / "head", ids=SOME), fast=True) > 15
    assert len(list((tmp_path / "kept").rglob("step-*.bin"))) == 1


MEDUSA = {"speculators_model_type": None, "architectures": ["MedusaModel"]}
SHIFTED = torch.tensor(SOME) - torch.arange(len(SOME)) + 1
DEEP = {"transformer_layer_config": {"model_type": "llama", "num_hidden_layers": 2}}
SLIDING = {"transformer_layer_config": {"layer_types": ["sliding_attention"]}}
READS, BLOCK_READS = settings.TAPS, settings.BLOCK_TAPS
# Keys of the config, or tensors, that are others; None takes one away.
REFUSED: list[tuple[Callable[..., Path], dict[str, Any], str]] = [
    (eagle, {"speculators_model_type": "dspark"}, "found dspark, allowed EAGLE-3 or DFlash"),
    (eagle, MEDUSA, "not read; .*MedusaModel"),
    (eagle, {"norm_before_fc": True, "fc_norm": True}, "contradict"),
    (eagle, {READS: ["2"]}, "no usable layers"),
    (eagle, DEEP, "another kind; .*2 of llama"),
    (eagle, {"lm_head.weight": None}, "lacks tensors"),
    (eagle, {"norm.weight": None}, "missing keys.*: norm.weight"),
    (eagle, {"norm.weight": torch.ones(3)}, "mismatched keys.*norm.weight"),
    (eagle, {"mask.hidden": torch.ones(3)}, "unexpected keys.*mask.hidden"),
    (eagle, {"d2t": SHIFTED}, "do not agree"),
    (eagle, {"d2t": None, "t2d": None}, "do not agree"),
    (eagle, {READS: [1, 2, 9]}, "cannot give.*found 9"),
    (eagle, {READS: [1, 2, 2]}, "cannot give.*found 2, 2"),
    (dflash, {"mask_token_id": None}, "no usable block"),
    (dflash, {"mask_token_id": VOCAB}, "no usable block"),
    (dflash, {"block_size": 1}, "no usable block"),
    (dflash, {BLOCK_READS: [1]}, "fc does not fit"),
    (dflash, {BLOCK_READS: None}, "fc does not fit"),
    (dflash, SLIDING, "another kind"),
    (dflash, {BLOCK_READS: [1, 3]}, "cannot give; .*found 3"),  # is normed in transformers
]


@pytest.mark.parametrize(("save", "changes", "words"), REFUSED)
def test_what_is_refused(
    save: Callable[..., Path], changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    save(tmp_path, ids=SOME)
    says, holds = tmp_path / "config.json", tmp_path / "model.safetensors"
    content, tensors = json.loads(says.read_text()), load_file(holds)
    for name, value in changes.items():
        place = tensors if name in tensors or "." in name else content
        place.pop(name, None)
        place |= {} if value is None else {name: value}
    says.write_text(json.dumps(content))
    save_file(tensors, holds)
    with pytest.raises(ModelError, match=words):
        complete(local(tmp_path), "draft")
        loaded(tmp_path, 3, *tables_of(build("llama-gqa")))


def local(folder: Path) -> ModelConf:
    return ModelConf(name="local", path=str(folder))


def test_where_a_head_may_sit(tmp_path: Path) -> None:
    """Beside the target that it was trained for, on the leader; no weights are pickled."""
    folder = eagle(tmp_path)
    with pytest.raises(ModelError, match="not a model of its own"):
        complete(local(folder), "model")
    head, _ = complete(local(folder), "draft")
    assert (head.head_inputs, head.head_vocab, head.vocab, head.n_layers) == (3 * DIM, VOCAB, VOCAB, 1)
    target = replace(local(folder), dim=DIM)
    require_head(head, target, PlacementConf(), 2)
    with pytest.raises(ModelError, match="not one of this target"):
        require_head(head, replace(target, dim=DIM + 4), PlacementConf(), 1)
    with pytest.raises(ModelError, match="not one of this target"):
        plan("demo", draft=folder)
    for placement in (PlacementConf(draft=DraftSeat.own), PlacementConf(splitting=Splitting.layers)):
        with pytest.raises(UsageError, match="a head"):
            require_head(head, target, placement, 2)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickled.*save_file"):
        complete(local(folder), "draft")


def test_a_proposal_has_one_price() -> None:
    """Where a pass gives all drafts, more of them cost only what their verification costs."""
    for_each, at_once = (Costs.of_ratio(0.5, 8, at_once=at_once) for at_once in (False, True))
    assert for_each.rounds[4] == 3.0 and at_once.rounds[4] == 1.5 and at_once.rounds[0] == 1.0
    assert for_each.best(0.7, 0.7) == 1 and at_once.best(0.7, 0.7) == 8
    times = RoundTimes(draft=0.0, verify=(1.0,) * 9, rows=1, once=0.5)
    assert times.best_k(0.7) == 8 and replace(times, draft=0.5, once=0.0).best_k(0.7) == 1
    assert times.round_s(0, 0.7) == 1.0 and times.round_s(3, 0.7) == 1.5
