"""The bytes of each preset's tensors, as planned and as built, over one and more ranks.

    python -m tests.loaded_bytes write=FILE.json    # of this checkout

`tests/bytes_at_9bf7ec36.json` was written by this file at that commit, which had a table of tensors in the
planner and another one in the loader. What is built is on torch's meta device: the modules' own tensors are
counted there, and no table of the program.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.config.compose import composed
from llama_ssp.errors import RunError
from llama_ssp.models.assemble import decoder
from llama_ssp.models.linear import LayerFormat
from llama_ssp.models.sharding import require_split
from llama_ssp.models.synthetic import config_for
from llama_ssp.planner.storage import CPU, CUDA, UNIT, WEIGHTS, Storage
from llama_ssp.planner.weights import ModelPart, RolePart, held
from llama_ssp.planner.workload import TARGET, Role
from tests.distributed.threads import ranks_of

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = ROOT / "tests" / "bytes_at_9bf7ec36.json"
WORLDS = (1, 2, 3, 8)
DTYPES = (Dtype.bf16, Dtype.int8, Dtype.nf4, Dtype.packed)
STORES = {"plain": Storage(), "gpu": Storage(UNIT, CUDA, True), "cpu": Storage(1, CPU, True)}
BUILT_LAYERS = 4
META = torch.device("meta")


class NoFile:
    """A source with names alone: on the meta device nothing is read."""

    def __init__(self, names: list[str]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())

    def read(self, name: str, _: object) -> torch.Tensor:
        raise AssertionError(name)


def preset(name: str) -> ModelConf:
    return composed([f"model={name}", "draft=none"]).model


def presets() -> list[str]:
    """The presets with files of their own; those of 8 and 4 bit have the tensors of these."""
    return sorted(
        path.stem
        for path in (ROOT / "conf" / "model").glob("*.yaml")
        if path.stem != "local" and not path.stem.endswith(("_8bit", "_4bit"))
    )


def presets_then() -> list[str]:
    """Returns those of the committed file; later ones are compared in test_plan_memory.py."""
    rows = json.loads(COMMITTED.read_text(encoding="utf-8"))
    return [name for name in presets() if f"{name} planned" in rows]


def splits(model: ModelConf) -> Iterator[tuple[int, int]]:
    """Each world that the model can be split over, with its first and last rank, whose shares may differ."""
    for world in WORLDS:
        try:
            require_split(model, world)
        except RunError:
            continue
        for rank in sorted({0, world - 1}):
            yield world, rank


def planned(model: ModelConf) -> dict[str, list[int]]:
    """Bytes of each group of WEIGHTS, by number format, world, rank and device; and of caches."""
    found: dict[str, list[int]] = {}
    for world, rank in splits(model):
        for leader_looks_up in (False, True):
            part = ModelPart.of(model, world, rank, leader_looks_up)
            for dtype in DTYPES:
                if dtype is Dtype.packed and not model.code_bits:
                    continue
                for device, store in STORES.items():
                    way = "draft" if leader_looks_up else "target"
                    groups = held(part, dtype, store)
                    numbers = [groups.get(group, 0) for group in WEIGHTS]
                    found[f"{dtype.value} {way} {device} {rank}/{world}"] = numbers
        role = RolePart.of(Role(TARGET, model, Dtype.bf16), ModelPart.of(model, world, rank), 1000)
        found[f"caches {rank}/{world}"] = [role.caches_bytes(3, 512)]
    return found


def built(model: ModelConf) -> dict[str, dict[str, int]]:
    """How many tensors of each size a rank's modules have, in the model's first blocks.

    The table of a tied model counts once.
    """
    few = replace(model, n_layers=min(model.n_layers, BUILT_LAYERS))
    config = config_for(few)
    found: dict[str, dict[str, int]] = {}
    for world, rank in splits(model):
        (ranks,) = [each for each in ranks_of(world) if each.rank == rank]
        for drafts in (False, True):
            source = NoFile([])
            form = LayerFormat(dtype=Dtype.bf16, device=META)
            if not config.tie_word_embeddings:
                source.shapes["lm_head.weight"] = source.shapes["embed_out.weight"] = ()
            module = decoder(config, source, ranks, form, drafts)
            sizes = Counter("x".join(map(str, tensor.shape)) for tensor in module.parameters())
            way = "draft" if drafts else "target"
            found[f"{way} {rank}/{world}"] = dict(sorted(sizes.items()))
    return found


def table() -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for name in presets():
        model = preset(name)
        rows[f"{name} planned"] = once_each(planned(model))
        rows[f"{name} built"] = once_each(built(model))
    return rows


def once_each(found: Mapping[str, Any]) -> dict[str, Any]:
    """The same, with ways of equal numbers in one entry."""
    ways: dict[str, list[str]] = {}
    for way, numbers in found.items():
        ways.setdefault(json.dumps(numbers, sort_keys=True), []).append(way)
    return {", ".join(names): json.loads(numbers) for numbers, names in ways.items()}


def written(rows: dict[str, dict[str, Any]]) -> str:
    """Returns the table as JSON, with a line for each preset."""
    lines = [f"{json.dumps(name)}: {json.dumps(rows[name], separators=(',', ':'))}" for name in sorted(rows)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    Path(sys.argv[1].removeprefix("write=")).write_text(written(table()))
