"""The configuration: presets and experiments compose and count as published, and types are checked."""

import itertools
import math
import random
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from llama_ssp import config
from llama_ssp.config import TASKS, GenerateConf, ModelConf, RunConf, Weights
from llama_ssp.config import presets as preset_files
from llama_ssp.config import validation as checks
from llama_ssp.config.compose import to_run
from llama_ssp.config.yaml_files import MAX_VALUES, require_bounded, values_in
from llama_ssp.errors import UsageError
from llama_ssp.planner.weights import parameters
from llama_ssp.tasks.plan import plan

PUBLISHED = {
    "7B": 6_738_415_616, "13B": 13_015_864_320, "30B": 32_528_943_616, "65B": 65_285_660_672,
    "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192,
    "llama3.1-8b": 8_030_261_248, "llama3.1-70b": 70_553_706_496, "llama3.3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824, "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-7b": 7_615_616_512, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264, "gemma2-2b": 2_614_341_888, "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320, "gpt-neo-1.3b": 1_315_575_808, "gpt-neox-20b": 20_554_567_680,
    "gpt-oss-20b": 20_914_757_184, "smollm2-135m": 134_515_008, "smollm2-135m-instruct": 134_515_008,
    "smollm2-1.7b-instruct": 1_711_376_384,
    # As transformers' modules count, made of tests/published_configs.py.
    "qwen3-vl-2b": 1_720_574_976, "qwen3-vl-4b": 4_022_468_096, "qwen3-vl-8b": 8_190_735_360,
    "qwen3-vl-32b": 32_762_123_264, "qwen3-vl-30b-a3b": 30_532_122_624, "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096, "qwen3-14b": 14_768_307_200, "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-coder-30b-a3b": 30_532_122_624, "qwen2.5-coder-7b": 7_615_616_512,
    "qwen2.5-coder-32b": 32_763_876_352, "r1-distill-llama-8b": 8_030_261_248,
    "gpt-oss-120b": 116_829_156_672, "gemma3-1b": 999_885_952, "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176, "gemma3-27b": 27_009_346_304, "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo": 12_247_782_400, "mistral-small-3.2-24b": 23_572_403_200, "phi4": 14_659_507_200,
    "smollm3-3b": 3_075_098_624, "glm4.5-air": 106_851_586_048, "olmo3.1-32b": 32_233_522_176,
    "exaone4-32b": 32_003_216_384, "seed-oss-36b": 36_151_104_512, "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688, "qwen3-next-80b-a3b": 79_674_391_296, "gemma4-12b": 11_907_350_272,
    "gemma4-26b-a4b": 25_233_141_760, "gemma4-31b": 30_697_345_280,
}  # fmt: skip
UNCOUNTED = {"local", "tiny", "tiny_draft", "demo", "demo_draft"}  # the last: test_shipped.py

OF_THE_TARGET = ("int4", "int8")


def presets(group: str) -> list[str]:
    return sorted(file.stem for file in (preset_files.CONF / group).glob("*.yaml"))


OTHERS = [(g, n) for g in preset_files.GROUPS if g not in ("model", "draft") for n in presets(g)]


@pytest.fixture(scope="module")
def hydra() -> Iterator[None]:
    config.register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(preset_files.CONF), version_base="1.3"):
        yield


def composed(*overrides: str) -> RunConf:
    return to_run(compose("run", list(overrides)))


def plain(name: str) -> str:
    """The preset that a quantised one is made of."""
    return re.sub("(_8bit|_4bit|-fp8|-awq|-int4|-q4)$", "", name)


@cache
def of_preset(name: str) -> RunConf:
    return composed(f"model={name}", f"draft={name}")


@pytest.mark.few(10)
@pytest.mark.parametrize("name", presets("model"))
def test_every_model_composes(name: str, hydra: None) -> None:
    run = of_preset(name)
    assert run.draft == run.model
    assert run.model.name == name


@pytest.mark.few(10)
@pytest.mark.parametrize("name", [name for name in presets("model") if name not in UNCOUNTED])
def test_every_model_counts_as_published(name: str, hydra: None) -> None:
    model = of_preset(name).model
    padded = 3 * 80 * 8192 * 128 if name == "qwen2.5-72b-awq" else 0  # a group more in each MLP
    assert parameters(model) == PUBLISHED[plain(name)] + padded


@pytest.mark.few(10)
@pytest.mark.parametrize("name", [name for name in presets("model") if name not in UNCOUNTED])
def test_the_name_of_a_model_tells_its_bits(name: str, hydra: None) -> None:
    model = of_preset(name).model
    assert (model.dtype is config.Dtype.int8) == name.endswith("_8bit")
    assert (model.dtype is config.Dtype.nf4) == name.endswith("_4bit")


def test_each_model_of_others_names_its_licence(hydra: None) -> None:
    """Those of the hub name the commit, too, whose files they were made for."""
    floating = set()
    for name in presets("model"):
        model = of_preset(name).model
        has_files = model.path or model.repo or model.package
        assert bool(model.licence) == bool(has_files), name
        if model.repo and model.commit is None:
            floating.add(name)
        assert re.fullmatch("[0-9a-f]{40}", model.commit or "0" * 40), name
    # No public record of its commits was found.
    assert floating == {"llama3.1-8b-int4"}


@pytest.mark.few(10)
@pytest.mark.parametrize(("group", "name"), OTHERS)
def test_every_option_composes(group: str, name: str, hydra: None) -> None:
    run = composed(f"{group}={name}")
    if group == "task":
        assert run.task.name == name


def test_drafts_are_the_models(hydra: None) -> None:
    assert set(presets("draft")) == {*presets("model"), "none", "demo_head", *OF_THE_TARGET}
    assert composed("draft=none").draft is None
    assert PUBLISHED.keys() | UNCOUNTED == {plain(name) for name in presets("model")}


@pytest.mark.parametrize("bits", OF_THE_TARGET)
def test_a_draft_of_the_target_s_weights_is_the_target_but_for_the_dtype(bits: str, hydra: None) -> None:
    run = composed("model=gemma2-9b", "model.path=/models/mine", "model.context=512", f"draft={bits}")
    assert run.draft == replace(run.model, name=f"gemma2-9b_{bits}", dtype=config.Dtype(bits))
    own = OmegaConf.load(preset_files.CONF / "draft" / "int4.yaml").keys()
    assert {*own, "agreement"} == {entry.name for entry in fields(ModelConf)}  # also keys of later versions
    other = composed("model=qwen2.5-7b", f"draft={bits}", "draft.seed=3").draft
    assert other is not None and other.seed == 3


def test_the_defaults_are_the_schema_s(hydra: None) -> None:
    """A preset says what it changes; what it leaves out is what the dataclass says."""
    run = composed()
    assert run.sampling == config.SamplingConfig()
    assert run.speculation == config.SpeculationConfig()
    assert run.placement == config.PlacementConf()
    assert run.cluster == config.ClusterConf()
    assert isinstance(run.task, GenerateConf)
    assert run.task == GenerateConf(name="generate")


def test_a_config_survives_its_record(hydra: None) -> None:
    """A text with signs of an interpolation, too."""
    run = composed("model=gemma2-2b", "draft=none", "+sampling.logit_bias={5: -1}", 'task.stop=["a"]')
    plain = config.resolved(run)
    again = OmegaConf.to_yaml(OmegaConf.create(plain))
    assert OmegaConf.to_container(OmegaConf.create(again)) == plain
    assert plain["draft"] is None and plain["model"]["weights"] == "checkpoint"
    texts = ["${seed}", "${oc.env:HOME}", "${", "\\${seed}", "${nope}"]
    task = config.resolved(filled(task__prompts=texts))["task"]
    assert task["prompts"] == texts and task["on_bad_row"] == "fail"


def test_every_key_has_its_type() -> None:
    types = config.key_types()
    for key, kind in {
        "model.path": str | None, "draft.dtype": config.Dtype, "sampling.top_k": int | None,
        "task.stop": list[str], "speculation.k_max": int,
        "cluster.slurm.setup": list[str], "seed": int | None,
    }.items():  # fmt: skip
        assert types[key] == kind


def filled(**changes: Any) -> RunConf:
    sizes = dict.fromkeys(config.SIZES, 8)
    run = RunConf(
        model=ModelConf(name="m", weights=Weights.synthetic, **sizes), task=GenerateConf(name="generate")
    )
    for dotted, value in changes.items():
        *parents, leaf = dotted.split("__")
        node: Any = run
        for name in parents:
            node = getattr(node, name)
        setattr(node, leaf, value)
    return run


@pytest.mark.parametrize(
    "changes",
    [
        {"speculation__k": 1.0}, {"speculation__k": True}, {"speculation__k": "1"},
        {"speculation__k_max": None},
        {"sampling__temperature": "1"}, {"sampling__temperature": True}, {"task__prompts": ["a", None]},
        {"task__prompts": [["a"]]}, {"task__prompts": "a"}, {"task__stop": None}, {"task__chat": 1},
        {"sampling__logit_bias": {"5": 1.0}}, {"sampling__logit_bias": {5: "x"}},
        {"sampling__bad_tokens": [1.5]}, {"model__dtype": "bf16"}, {"model__path": ""},
        {"model__path": "a\0"}, {"model__name": ""}, {"out": ""}, {"task__name": "plan"},
        {"cluster__gib": 0.0}, {"cluster__gib": -1.0}, {"cluster__gib": float("inf")},
        {"placement__draft_device": "cuda:x"}, {"placement__draft_device": "CPU"},
    ],
    ids=str,
)  # fmt: skip
def test_values_are_checked_whoever_made_the_config(changes: dict[str, Any]) -> None:
    checks.check(filled())
    with pytest.raises(UsageError) as raised:
        checks.check(filled(**changes))
    key = next(iter(changes)).replace("__", ".")
    assert str(raised.value).startswith(key)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling__temperature": 0}, {"sampling__temperature": 1}, {"sampling__logit_bias": {5: -1}},
        {"task__prompts": ["a"]}, {"cluster__gib": 24}, {"out": None}, {"speculation__k": 0},
        {"placement__target_device": "cuda:1"}, {"sampling__top_p": 1e-9},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_allowed(changes: dict[str, Any]) -> None:
    checks.check(filled(**changes))


def test_an_unknown_home_stays_as_it_was() -> None:
    assert config.home_expanded("~no-such-user-here/x") == Path("~no-such-user-here/x")
    assert config.home_expanded("~/x") == Path.home() / "x"


def unbounded(schema: type, prefix: str = "") -> Iterator[str]:
    """The keys with numbers that have no range, or one without an end."""
    hints = get_type_hints(schema)
    for entry in fields(schema):
        kinds = {hints[entry.name], *get_args(hints[entry.name])}
        kinds |= {inner for kind in kinds for inner in get_args(kind)}
        for kind in kinds:
            if is_dataclass(kind) and isinstance(kind, type):
                yield from unbounded(kind, f"{prefix}{entry.name}.")
        if kinds & {int, float}:
            low, high, *_ = entry.metadata["range"] or (-math.inf, math.inf)
            if low < -(2**63) or high > 2**63:
                yield prefix + entry.name


def test_every_number_of_every_task_has_a_range() -> None:
    """`check` bounds the temperature: it is 0, or not too small to divide by."""
    found = {key for schema in (RunConf, *TASKS.values()) for key in unbounded(schema)}
    assert found == {"sampling.temperature"}
    for value in (-5.0, 1e-30, 1e30, math.nan, math.inf):
        with pytest.raises(UsageError, match=r"sampling\.temperature is out of range"):
            checks.check(filled(sampling__temperature=value))


WRITE_UPS = {
    "amd2024": ("compare", "mi300x8"),
    "clay2024": ("measure", "a10"),
    "guha": ("agree", "a10"),
    "llamassp2023": ("measure", "p4d"),
    "llamassp2023_g5": ("measure", "g5_12xlarge"),
    "llamassp2023_score": ("eval", "p4d"),
}  # the task of each, and the cluster that docs/compare.md plans it on


def test_each_experiment_is_a_valid_run(hydra: None) -> None:
    tasks = {"chen2023": "generate", **{name: task for name, (task, _) in WRITE_UPS.items()}}
    assert set(presets("experiment")) == tasks.keys()
    for name, task in tasks.items():
        assert composed(f"experiment={name}").task.name == task


@pytest.mark.few(3)
@pytest.mark.parametrize("name", WRITE_UPS)
def test_the_pairs_of_a_write_up_are_planned(name: str, hydra: None) -> None:
    run = composed(f"experiment={name}")
    own = f"{run.model.name}/{run.draft.name if run.draft else 'none'}"
    for pair in run.task.pairs or [own]:
        target, _, draft = pair.partition("/")
        chosen = plan(target, draft or None, cluster=WRITE_UPS[name][1]).chosen
        assert chosen.verdict.value == "fits", pair


def written_out(value: Any) -> int:
    """How many values it holds, a shared part as often as it stands."""
    if isinstance(value, dict):
        return 1 + sum(map(written_out, [*value.keys(), *value.values()]))
    return 1 + sum(map(written_out, value)) if isinstance(value, list) else 1


@pytest.mark.parametrize("seed", range(20))
def test_values_are_counted_as_often_as_aliases_mean_them(seed: int) -> None:
    """Of random structures whose parts are shared, which are dumped as aliases."""
    chance = random.Random(seed)
    made: list[Any] = [1, "a", {"b": 2}]
    for _ in range(12):
        parts = [chance.choice(made) for _ in range(chance.randrange(4))]
        made.append(parts if chance.random() < 0.5 else {f"k{n}": part for n, part in enumerate(parts)})
    whole = {"all": made[-6:]}
    assert values_in(yaml.safe_dump(whole)) - 1 == written_out(whole)  # the document counts, too


def test_a_file_of_many_values_is_not_told_of_aliases_that_it_has_not(tmp_path: Path) -> None:
    file = tmp_path / "many.yaml"
    file.write_text("a: '2 * 3'\nb: [" + "1," * MAX_VALUES + "1]\n")
    with pytest.raises(UsageError, match=r"too many values; .*; write fewer values") as refused:
        require_bounded(file)
    assert "aliases stand for aliases" not in str(refused.value)


def test_counting_ends_soon_however_many_values_aliases_mean() -> None:
    lists: list[Any] = [[1, 2], *([] for _ in range(200))]
    for before, after in itertools.pairwise(lists):
        after += [before] * 9
    assert MAX_VALUES < values_in(yaml.safe_dump(lists[-1])) < 10 * MAX_VALUES
