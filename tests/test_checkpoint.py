"""Model folders: what is read from config.json and headers, and what is let through."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_ssp.checkpoint import Checkpoint, complete, inspect, shape_of, with_shape
from llama_ssp.config import ModelConf, Weights
from llama_ssp.errors import ModelError
from llama_ssp.plan import parameters
from tests import checkpoints, families
from tests.checkpoints import INDEX, copied, edit, join, split
from tests.conftest import Saved

WEIGHTS = "model.safetensors"
exhaustive = settings(derandomize=True, deadline=None, database=None)


def local(path: Path, **changes: Any) -> ModelConf:
    return ModelConf(name="local", path=str(path), **changes)


def test_shards_hold_what_one_file_holds(saved: Saved) -> None:
    whole, sharded = inspect(saved.whole), inspect(saved.sharded)
    assert whole.shapes == sharded.shapes
    assert whole.shapes["model.embed_tokens.weight"] == (300, 64)
    assert len(list(saved.sharded.glob("*.safetensors"))) == 5


def test_the_shape_is_read_from_the_folder(saved: Saved) -> None:
    model, path = complete(local(saved.whole), "model")
    assert path == saved.whole
    assert (model.family, model.n_layers, model.n_heads, model.n_kv_heads) == ("llama", 2, 4, 2)
    assert (model.head_dim, model.dim, model.ffn, model.vocab) == (16, 64, 96, 300)
    assert (model.context, model.tied) == (checkpoints.CONTEXT, False)


def test_a_synthetic_model_needs_no_folder() -> None:
    asked = ModelConf(name="x", weights=Weights.synthetic)
    assert complete(asked, "model") == (asked, None)


@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_the_counted_weights_are_the_saved_ones(name: str, tmp_path: Path) -> None:
    """The closed form against what is in the files, for every family as transformers saves it."""
    module = families.build(name)
    module.save_pretrained(tmp_path)
    checkpoint = inspect(tmp_path)
    model = with_shape(local(tmp_path), checkpoint, "model")
    assert model.tied is (module.get_input_embeddings().weight is module.get_output_embeddings().weight)
    assert parameters(model) == sum(p.numel() for p in module.parameters())


def test_a_tied_head_may_be_saved_a_second_time(saved: Saved) -> None:
    """The preset's word does not count against the folder's: both are the same model."""
    model = with_shape(local(saved.whole, tied=True), inspect(saved.whole), "model")
    assert model.tied is False


@pytest.mark.parametrize(
    "key", ["n_layers", "n_heads", "n_kv_heads", "head_dim", "dim", "ffn", "vocab", "context"]
)
def test_a_preset_that_says_otherwise_is_refused(key: str, saved: Saved) -> None:
    with pytest.raises(ModelError, match=f"{key} 7 in the config"):
        with_shape(local(saved.whole, **{key: 7}), inspect(saved.whole), "model")


def test_what_config_json_leaves_out_is_derived() -> None:
    config = {
        "model_type": "x", "num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2,
        "vocab_size": 10, "max_position_embeddings": 8, "num_key_value_heads": None,
    }  # fmt: skip
    shape = shape_of(Checkpoint(Path("x"), config, {}))
    assert (shape["n_kv_heads"], shape["head_dim"], shape["ffn"], shape["tied"]) == (4, 16, 256, True)


def test_hub_copies_link_to_their_blobs(saved: Saved, tmp_path: Path) -> None:
    blobs, home = tmp_path / "blobs", tmp_path / "snapshots" / "commit"
    blobs.mkdir()
    home.mkdir(parents=True)
    for number, file in enumerate(sorted(saved.sharded.iterdir())):
        (blobs / str(number)).write_bytes(file.read_bytes())
        (home / file.name).symlink_to(blobs / str(number))
    assert inspect(home).shapes == inspect(saved.sharded).shapes


def test_a_link_out_of_a_shard_list_is_refused(saved: Saved, tmp_path: Path) -> None:
    path = copied(saved.sharded, tmp_path / "home" / "model")
    file = path / "model-00001-of-00005.safetensors"
    file.rename(tmp_path / "stolen")
    file.symlink_to(tmp_path / "stolen")
    with pytest.raises(ModelError, match="not a plain file of the folder"):
        inspect(path)


@pytest.mark.parametrize("name", ["../a", "/a", "a/../b", "..", ".", "", "a/b", None, 3, ["a"]])
def test_shard_names_stay_inside(name: object, saved: Saved, tmp_path: Path) -> None:
    path = copied(saved.sharded, tmp_path / "model")
    edit(path / INDEX, lambda c: c["weight_map"].update({"model.norm.weight": name}))
    with pytest.raises(ModelError, match="leaves the folder"):
        inspect(path)


@pytest.mark.parametrize("name", ["chat_template.jinja", "vocab.txt", "tokenizer.model", "added.json"])
def test_no_pipe_is_left_for_a_library_to_wait_at(name: str, saved: Saved, tmp_path: Path) -> None:
    path = copied(saved.whole, tmp_path / "model")
    os.mkfifo(path / name)
    with pytest.raises(ModelError, match="not a regular file"):
        inspect(path)


def test_keys_that_stand_twice_are_refused(saved: Saved, tmp_path: Path) -> None:
    path = copied(saved.whole, tmp_path / "model")
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace("{", '{"vocab_size": 7,', 1))
    with pytest.raises(ModelError, match="'vocab_size' stands twice"):
        inspect(path)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"data_offsets": [0, 10**9]}, "damaged"),
        ({"data_offsets": [4, 0]}, "damaged"),
        ({"data_offsets": [0]}, "not a table"),
        ({"data_offsets": "ab"}, "not a table"),
        ({"shape": 64}, "not a table"),
        ({"shape": [2**62, 2**62]}, "damaged"),
        ({"dtype": None}, "number format"),
        ({"dtype": "F8_E4M3"}, "number format"),
    ],
)
def test_headers_that_lie(change: dict[str, Any], found: str, saved: Saved, tmp_path: Path) -> None:
    path = copied(saved.whole, tmp_path / "model")
    content, data = split(path / WEIGHTS)
    content["model.norm.weight"].update(change)
    join(path / WEIGHTS, content, data)
    with pytest.raises(ModelError, match=found):
        inspect(path)


@exhaustive
@given(position=st.integers(0, 200), value=st.integers(0, 255), cut=st.integers(0, 300))
def test_a_damaged_header_gives_one_of_our_errors_or_none(
    position: int, value: int, cut: int, saved: Saved, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A changed byte in the first 200, or a cut: refused as ours, or harmless (another tensor's name)."""
    path = tmp_path_factory.mktemp("damaged", numbered=True)
    (path / "config.json").write_bytes((saved.whole / "config.json").read_bytes())
    content = bytearray((saved.whole / WEIGHTS).read_bytes())
    content[position] = value
    (path / WEIGHTS).write_bytes(content[: len(content) - cut])
    try:
        checkpoint = inspect(path)
    except ModelError as error:
        assert "\n" not in str(error)
        return
    assert cut == 0
    assert len(checkpoint.shapes) == len(inspect(saved.whole).shapes)


def test_loading_leaves_no_tensor_to_chance(saved: Saved) -> None:
    """What is loaded is what was saved, bit for bit."""
    from safetensors.torch import load_file

    from llama_ssp.config import Dtype
    from llama_ssp.load.models import load

    causal = load(local(saved.sharded), saved.sharded, Dtype.fp32, torch.device("cpu"), "model")
    for name, tensor in load_file(saved.whole / WEIGHTS).items():
        assert torch.equal(causal.module.state_dict()[name], tensor)
