"""Trained heads: logits against a second reading of the formulas, what is declared, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llama_ssp import plan
from llama_ssp.config import DraftSeat, Dtype, ModelConf, PlacementConf, SamplingConfig, Splitting
from llama_ssp.distributed.placement import resolve
from llama_ssp.errors import ModelError, UsageError
from llama_ssp.models import programs
from llama_ssp.models.checkpoint import complete
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.planner.memory import rank_work
from llama_ssp.planner.resolve import require_head
from llama_ssp.planner.weights import held
from llama_ssp.planner.workload import DRAFT, TARGET, Role, Workload
from llama_ssp.speculative.draft_length import FixedDraftLength
from llama_ssp.speculative.drafters.head import HeadDrafter, head_drafter
from llama_ssp.speculative.drafters.local import Drafter
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.logprobs import LogprobReader
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.verification import RULES
from tests.families import VOCAB, build, decoder_of
from tests.heads import Reference, loaded, save_head
from tests.rig import drive, drive_refilled, engine_of, speculate, steps_of

TAPS = (0, 1, 3)  # of three blocks: before the first, between, behind the last
DIM = 32  # of the small targets
SOME = [token for token in range(VOCAB) if token % 3]
PROMPTS = [
    Prompt(str(n), tuple((7 * n + 3 * i) % (VOCAB - 3) + 3 for i in range(length)))
    for n, length in enumerate([9, 1, 4, 2])
]
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
}


def target_of(name: str = "llama-gqa", taps: tuple[int, ...] = TAPS) -> tuple[Any, DecoderModel]:
    module = build(name)
    model = DecoderModel(decoder_of(module), module.config, "target")
    model.tap(taps)
    return module, model


def tables_of(module: Any) -> tuple[Tensor, Tensor]:
    return module.get_input_embeddings().weight, module.get_output_embeddings().weight


def head_of(folder: Path, **how: Any) -> Path:
    return save_head(folder, **({"vocab": VOCAB, "target_dim": DIM, "taps": TAPS} | how))


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

    def __init__(
        self, module: Any, reference: Reference, drafter: Drafter, taps: tuple[int, ...] = TAPS
    ) -> None:
        self.module, self.reference, self.taps = module, reference, taps
        self.count, self._propose = 0, drafter.propose
        drafter.propose = self.propose  # type: ignore[method-assign]

    def propose(self, state: State, count: tuple[int, ...]) -> Any:
        proposal = self._propose(state, count)
        for row, drafted in enumerate(proposal.count):
            text, drafts = state.texts[row], proposal.drafted_BK[row, :drafted].tolist()
            for place in range(drafted):
                states = states_of(self.module, text, self.taps)[:-1]
                expected = self.reference.probs(states, text, drafts[:place], VOCAB, HEAT)
                found = proposal.draft_BKV[row, place].double()
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
                self.count += 1
        return proposal


HEAT = 4.0  # the small targets are so certain that they would accept nothing


def compared(
    folder: Path, kind: type[Reference] = Reference, taps: tuple[int, ...] = TAPS, fast: bool = False
) -> int:
    """A sampled run of ragged rows with rejections; how many declared distributions were compared."""
    rows, k, new, chunk = 4, 3, 10, 3
    module, model = target_of(taps=taps)
    head = loaded(folder, 3, *tables_of(module), fast=fast)
    engine = engine_of(
        model, head, sampling=SamplingConfig(temperature=HEAT), vocab=VOCAB, draws=3, chunk=chunk
    )
    if isinstance(engine.drafter, HeadDrafter):
        engine.drafter._window = 8  # so that states wait in few places
    watched = Compared(module, kind(folder, *tables_of(module)), engine.drafter, taps)
    _, steps = steps_of(engine, PROMPTS[:rows], new, k)
    accepted = sum(row.accepted for step in steps for row in step.rows)
    rejected = sum(len(row.drafted) for step in steps for row in step.rows) - accepted
    assert rejected and accepted, "the run saw no rejection, or no draft that stood"
    return watched.count


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_declared_distributions_are_the_published_formulas(layout: str) -> None:
    """After rejections, of ragged rows, in every layout and with every flag; the reference keeps nothing."""
    how = LAYOUTS[layout]
    with TemporaryDirectory() as folder:
        assert compared(head_of(Path(folder), **how)) > 15


@pytest.mark.parametrize(
    "flags", [(), ("norm_before_residual", "norm_before_fc"), ("fc_norm", "norm_output")]
)
@torch.inference_mode()
def test_the_second_reading_is_that_of_speculators(flags: tuple[str, ...], tmp_path: Path) -> None:
    """All logits of its training pass of three steps: where that library is installed."""
    core = pytest.importorskip("speculators.models.eagle3.core", reason="speculators is not installed")
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    folder = head_of(tmp_path, flags=flags, dim=DIM)
    content = json.loads((folder / "config.json").read_text())
    layer = {**content["transformer_layer_config"], "attn_implementation": "eager"}
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=VOCAB, **dict.fromkeys(flags, True),
        eagle_aux_hidden_state_layer_ids=list(TAPS),
    )  # fmt: skip
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = core.Eagle3DraftModel(config).float().eval()
    missing = theirs.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not missing.unexpected_keys
    made: list[Tensor] = []
    theirs.lm_head.register_forward_hook(lambda _, __, logits: made.append(logits[0]))
    reference, text = Reference(folder), [5, 9, 30, 31, 60, 7, 7, 12]
    states = torch.randn(len(text) - 1, 3 * DIM, generator=torch.Generator().manual_seed(2))
    theirs(states[None], torch.tensor([text[1:]]), torch.zeros(1, len(text) - 1, dtype=torch.int64))
    for step, logits in enumerate(made):
        for place in range(len(text) - 1 - step):
            now, drafts = text[: place + 2], text[place + 2 : place + 2 + step]
            expected = reference.logits(states[: place + 1], now, drafts)
            assert (logits[place] - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert len(made) == 3


def engine_with(
    folder: Path, rule: str = "block", heat: float = HEAT, taps: tuple[int, ...] = TAPS
) -> Engine:
    module, model = target_of(taps=taps)
    head, sampling = loaded(folder, 3, *tables_of(module)), SamplingConfig(temperature=heat)
    return engine_of(model, head, rule, sampling=sampling, vocab=VOCAB, draws=5, chunk=3)


@pytest.mark.parametrize("adaptive", [False, True])
def test_rows_are_refilled(adaptive: bool, tmp_path: Path) -> None:
    """What a prompt gets is what it gets alone, in whichever row, beside whom, whatever was there before."""
    folder = head_of(tmp_path, ids=SOME)

    def texts(prompts: list[Prompt], rows: int, longest: int) -> dict[str, list[int]]:
        how: dict[str, Any] = {"k": 3, "max_new": 20, "adaptive": adaptive}
        return drive_refilled(engine_with(folder), prompts, rows, longest=longest, **how)

    together = texts(PROMPTS, 2, 40)
    assert together == {p.id: texts([p], 1, 0)[p.id] for p in PROMPTS}
    assert len({tuple(ids) for ids in together.values()}) > 1


def test_another_text_goes_on_from_a_common_beginning(tmp_path: Path) -> None:
    """As in a conversation: longer, changed in the middle, and cut; every declared distribution is right.

    Then as in a batch: a row gets another text, which is longer than the states that wait.
    """
    folder = head_of(tmp_path)
    engine = engine_with(folder)
    watched = Compared(build("llama-gqa"), Reference(folder), engine.drafter)
    assert isinstance(engine.drafter, HeadDrafter)
    engine.drafter._window = 8
    state = engine.prefill(PROMPTS[:1], 40)
    first = list(PROMPTS[0].token_ids)
    on, anew = engine.go_on, partial(engine.admit, row=0)
    turns = [first, [*first, 9, 9], [*first[:6], 7, 8, 9, 10], first[:4], [11, 12], [13], [13, 14, 15]]
    for begin, text in [*((on, turn) for turn in turns), (anew, [*range(1, 21)]), (anew, [5]), (anew, first)]:
        before = watched.count
        begin(state, prompt=Prompt(str(len(text)), tuple(text)))
        for _ in generate(engine, state, Limits(8), FixedDraftLength(2, 1)):
            pass
        assert watched.count >= before + 4


def test_given_texts_are_scored_and_texts_have_log_probabilities(tmp_path: Path) -> None:
    """The head takes no part in scores, before it has read a text and after."""
    engine = engine_with(head_of(tmp_path))
    engine.logprobs = LogprobReader(1)
    first = engine.score(PROMPTS, engine.logprobs)
    state = engine.prefill(PROMPTS, 12)
    for _ in generate(engine, state, Limits(12), FixedDraftLength(3, len(PROMPTS))):
        pass
    texts = [Prompt(prompt.id, tuple(text)) for prompt, text in zip(PROMPTS, state.texts, strict=True)]
    scores = engine.score(texts, engine.logprobs)
    for begun, own, whole in zip(first, state.logprobs, scores, strict=True):
        expected = [one.logprob for one in whole[1:]]
        assert [one.logprob for one in [*begun[1:], *own]] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_greedy_texts_are_the_targets(rule: str, tmp_path: Path) -> None:
    engine, (_, model) = engine_with(head_of(tmp_path), rule, heat=0.0), target_of()
    found = drive(engine, PROMPTS, k=4)
    assert found.texts == speculate(model, PROMPTS, None, k=0).texts
    assert found.drafted > 0


def test_damaged_logits_are_noticed(tmp_path: Path) -> None:
    tensors = load_file(head_of(tmp_path) / "model.safetensors")
    tensors["lm_head.weight"][4] = torch.nan
    folder = changed(tmp_path, **tensors)
    assert drive(engine_with(folder), PROMPTS[:1], k=2, max_new=4).finish == ["error"]


@pytest.mark.long  # the kernels and the programs are compiled
@pytest.mark.compiler
def test_compiled_steps_are_those_of_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The published formulas hold, and one program serves all numbers of tokens."""
    monkeypatch.setattr(programs, "cache_folder", lambda: tmp_path / "kept")
    folder = head_of(tmp_path / "head", ids=SOME)
    with torch.inference_mode():
        assert compared(folder, fast=True) > 15
    assert len(list((tmp_path / "kept").rglob("step-*.bin"))) == 1


def config_of(folder: Path, **changes: Any) -> Path:
    """The folder with other keys in config.json; None takes one away."""
    file = folder / "config.json"
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return folder


def changed(folder: Path, **changes: Tensor | None) -> Path:
    """The folder with other tensors; None takes one away."""
    file = folder / "model.safetensors"
    tensors: dict[str, Any] = load_file(file) | changes
    save_file({key: value for key, value in tensors.items() if value is not None}, file)
    return folder


def pickled(folder: Path) -> Path:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return folder


TWO = {"transformer_layer_config": {"model_type": "llama", "num_hidden_layers": 2}}
MEDUSA = {"speculators_model_type": None, "architectures": ["MedusaModel"]}
TAPS_KEY, SHIFTED = "eagle_aux_hidden_state_layer_ids", torch.tensor(SOME) - torch.arange(len(SOME)) + 1
WRONG: dict[str, tuple[Any, str]] = {
    "another kind": (
        lambda f: config_of(f, speculators_model_type="dspark"),
        "found dspark, allowed EAGLE-3 or DFlash",
    ),
    "another class": (lambda f: config_of(f, **MEDUSA), "not read; .*MedusaModel"),
    "pickled": (pickled, "pickled.*save_file"),
    "two flags": (lambda f: config_of(f, norm_before_fc=True, fc_norm=True), "contradict"),
    "no list of layers": (lambda f: config_of(f, **{TAPS_KEY: ["2"]}), "no usable layers"),
    "two blocks": (lambda f: config_of(f, **TWO), "another kind; .*2 of llama"),
    "no logits": (lambda f: changed(f, **{"lm_head.weight": None}), "lacks tensors"),
}
DAMAGED: dict[str, tuple[Any, str]] = {
    "a tensor is missing": (lambda f: changed(f, **{"norm.weight": None}), "norm.weight is missing"),
    "of another shape": (lambda f: changed(f, **{"norm.weight": torch.ones(3)}), "norm.weight is"),
    "not known": (lambda f: changed(f, mask_hidden=torch.ones(3)), "mask_hidden is not"),
    "maps that do not agree": (lambda f: changed(f, d2t=SHIFTED), "do not agree"),
    "layers beyond the target": (lambda f: config_of(f, **{TAPS_KEY: [1, 2, 9]}), "cannot give.*found 9"),
    "a layer twice": (lambda f: config_of(f, **{TAPS_KEY: [1, 2, 2]}), "cannot give.*found 2, 2"),
    "no map": (lambda f: changed(f, d2t=None, t2d=None), "do not agree"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused_before_weights_are_read(case: str, tmp_path: Path) -> None:
    change, words = WRONG[case]
    with pytest.raises(ModelError, match=words):
        complete(local(change(head_of(tmp_path))), "draft")


@pytest.mark.parametrize("case", DAMAGED)
def test_what_is_refused_when_weights_are_read(case: str, tmp_path: Path) -> None:
    change, words = DAMAGED[case]
    with pytest.raises(ModelError, match=words):
        loaded(change(head_of(tmp_path, ids=SOME)))


def local(folder: Path) -> ModelConf:
    return ModelConf(name="local", path=str(folder))


def test_where_a_head_may_sit(tmp_path: Path) -> None:
    """Beside the target that it was trained for, on the leader."""
    folder = head_of(tmp_path)
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


@pytest.mark.parametrize("embeds", [True, False])
def test_the_plan_knows_what_a_head_holds(embeds: bool, tmp_path: Path) -> None:
    """Weights, cache and waiting states to the byte, but for the few norms that flags add."""
    folder = head_of(tmp_path, ids=SOME, embeds=embeds, dim=DIM)
    _, model = target_of()
    head, _ = complete(local(folder), "draft")
    made = loaded(folder, 3, None if embeds else model.decoder.embedding.weight)
    target = replace(head, dim=DIM, n_layers=3, head_inputs=0, head_vocab=0)
    roles = Role(TARGET, target, Dtype.fp32), Role(DRAFT, head, Dtype.fp32)
    placement = resolve(PlacementConf(), 1, True)
    own = rank_work(*roles, placement, Workload(2, 20, 10, 3, 100), 0).draft
    assert own is not None
    assert sum(held(own.part, Dtype.fp32).values()) == made.weights_bytes
    runner = ModelRunner(model, 100)
    drafter = head_drafter(made, runner, SamplingTransform(SamplingConfig(), (), VOCAB), CounterDraws(0))
    drafter.start(2, 30)
    assert own.caches_bytes(2) == made.caches.most
