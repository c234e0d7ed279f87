"""LoRA adapters of small models, made with peft, and the models that peft merges them into.

`python -m tests.adapters` writes tests/adapter_files/ anew, whose README says what is in it.
"""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from llama_ssp.models.folder import ADAPTER, ADAPTER_WEIGHTS
from tests.checkpoints import WEIGHTS

FILES = Path(__file__).parent / "adapter_files"
LOGITS = "logits.safetensors"
STRENGTH = 0.3  # of the numbers in A and B: a merged model writes other texts than the plain one
TOKENS = [[3, 14, 15, 9, 26, 5, 35, 8, 31], [27, 18, 28, 18, 2, 8, 4, 5, 9]]
Settings = dict[str, Any]


def base_of(folder: Path) -> Any:
    """transformers' module of a folder, in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def adapt(folder: Path, where: Path, strength: float = STRENGTH, **settings: Any) -> Path:
    """Saves an adapter of random numbers for the model in `folder`, as peft does after training."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, **settings})
    model = get_peft_model(base_of(folder), config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(strength * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(where)
    return where


def merged(folder: Path, adapter: Path) -> Any:
    """The model of a folder with its adapter merged by peft, as its users do."""
    from peft import PeftModel

    return PeftModel.from_pretrained(base_of(folder), adapter).merge_and_unload().eval()


def edited(adapter: Path, where: Path, **values: Any) -> Path:
    """A copy of an adapter whose adapter_config.json says otherwise."""
    shutil.copytree(adapter, where)
    file = where / ADAPTER
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return where


def with_tensors(adapter: Path, where: Path, change: Any) -> Path:
    """A copy of an adapter whose tensors are changed by a function of them all."""
    shutil.copytree(adapter, where)
    tensors = change(load_file(adapter / ADAPTER_WEIGHTS))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, where / ADAPTER_WEIGHTS)
    return where


def written(folder: Path, where: Path, names: Sequence[str], strength: float = STRENGTH) -> Path:
    """Writes an adapter of rank 4 and alpha 6 for these modules of the model in `folder`, without peft."""
    where.mkdir(parents=True)
    config = json.loads((FILES / "plain" / ADAPTER).read_text()) | {"target_modules": list(names)}
    (where / ADAPTER).write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, Tensor] = {}
    for name, weight in sorted(load_file(folder / WEIGHTS).items()):
        module = name.removesuffix(".weight")
        if module.endswith(tuple(names)):
            for factor, sizes in (("A", (4, weight.shape[1])), ("B", (weight.shape[0], 4))):
                numbers = strength * torch.randn(sizes, generator=generator)
                tensors[f"base_model.model.{module}.lora_{factor}.weight"] = numbers
    save_file(tensors, where / ADAPTER_WEIGHTS)
    return where


def summed_by_hand(folder: Path, adapter: Path, where: Path) -> Path:
    """Writes a copy of the model in `folder` whose weights are W + 6 / 4 * B A."""
    shutil.copytree(folder, where)
    tensors, added = load_file(folder / WEIGHTS), load_file(adapter / ADAPTER_WEIGHTS)
    for key, a in added.items():
        if key.endswith(".lora_A.weight"):
            b = added[key.replace(".lora_A.", ".lora_B.")]
            name = key.removeprefix("base_model.model.").replace(".lora_A.", ".")
            tensors[name] = tensors[name] + 1.5 * (b @ a)
    save_file(tensors, where / WEIGHTS, {"format": "pt"})
    return where


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
# Settings of the committed adapters.
KEPT: Mapping[str, Settings] = {
    "plain": {"target_modules": [*ATTENTION, *MLP]},
    "patterns": {
        "target_modules": r".*\.(q_proj|v_proj|down_proj)", "use_rslora": True,
        "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 2, "down_proj": 3}, "alpha_pattern": {"v_proj": 9},
    },
}  # fmt: skip


def logits_of(module: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = module(torch.tensor(TOKENS), use_cache=False).logits
    return logits


def write() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.rmtree(FILES / "model", ignore_errors=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    module = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(8.0 if parameter.ndim > 1 else 1.0)
    module.save_pretrained(FILES / "model")
    logits = {"base": logits_of(module)}
    for name, settings in KEPT.items():
        shutil.rmtree(FILES / name, ignore_errors=True)
        adapt(FILES / "model", FILES / name, **settings)
        (FILES / name / "README.md").unlink(missing_ok=True)  # a card without content
        file = FILES / name / ADAPTER
        content = json.loads(file.read_text()) | {"base_model_name_or_path": "../model"}
        file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        logits[name] = logits_of(merged(FILES / "model", FILES / name))
    save_file(logits, FILES / LOGITS)


if __name__ == "__main__":
    sys.exit(write())
