"""Small model folders in each quantised format, and the weights that the format's library reads back.

`write` gives the tensors of one matrix in the format, `read` the matrix as the library dequantises it. What
is quantised on GPUs only (GPTQ, AWQ, MXFP4) gets random codes, and scales of the size that the matrix needs;
GPTQ and AWQ are read here, as the layouts are published.
"""

import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.checkpoints import WEIGHTS, Tensors, edit, edit_tensors
from tests.families import build

# Sizes of which 2 and 3 ranks have unequal shares: 7 groups of 128 in the MLP; heads that end inside a group.
SIZES: dict[str, Any] = {
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 896,
    "num_hidden_layers": 2, "attention_bias": True,
}  # fmt: skip


@dataclass(frozen=True)
class Format:
    """A quantised format: its claim in config.json, and how it stores a matrix."""

    claim: dict[str, Any]
    write: Callable[[Tensor], Tensors]  # a matrix -> its tensors, by the end of their names
    read: Callable[[Tensors], Tensor]  # as the library dequantises it
    changes: dict[str, Any] = field(default_factory=dict)  # of the model
    family: str = "llama-gqa"


def compressed(
    bits: int, type_: str, strategy: str, symmetric: bool = True, dtype: Any = torch.bfloat16,
    inputs: dict[str, Any] | None = None, **sizes: Any,
) -> Format:  # fmt: skip
    """compressed-tensors: scales have the given type; `inputs`: how inputs of layers are to be quantised."""
    weights = {"num_bits": bits, "type": type_, "strategy": strategy, "symmetric": symmetric, **sizes}
    packs = type_ == "int" and (bits == 4 or strategy == "group")
    kind = "pack-quantized" if packs else f"{type_}-quantized"
    claim = {
        "quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed",
        "config_groups": {"0": {
            "targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": kind,
        }},
        "ignore": ["lm_head"],
    }  # fmt: skip

    def library() -> tuple[Any, Any]:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
        return BaseCompressor.get_value_from_registry(kind), scheme

    def write(weight: Tensor) -> Tensors:
        from compressed_tensors.quantization.utils import calculate_qparams

        compressor, scheme = library()
        whole = weight.shape if strategy == "tensor" else (1, weight.shape[1])
        rows, columns = sizes.get("block_structure") or (whole[0], sizes.get("group_size", whole[1]))
        blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), scheme.weights)
        if strategy == "tensor":
            scale, zero = scale.flatten(), zero.flatten()
        tensors = {
            "weight": weight.to(dtype),
            "weight_scale": scale.to(dtype),
            "weight_zero_point": zero.to(torch.int8),
        }
        if inputs and not inputs["dynamic"]:
            tensors["input_scale"] = torch.tensor([0.03])
            tensors["input_zero_point"] = torch.zeros(1, dtype=torch.int8)
        return {f".{end}": tensor for end, tensor in compressor.compress(tensors, scheme).items()}

    def read(tensors: Tensors) -> Tensor:
        compressor, scheme = library()
        parts = {end.removeprefix("."): tensor for end, tensor in tensors.items()}
        return compressor.decompress(parts, scheme)["weight"]

    return Format(claim, write, read)


def fine_grained(block: int = 128) -> Format:
    """transformers' FP8 in square blocks. It stores what compressed-tensors does, under another name."""
    size = [block, block]
    twin = compressed(8, "float", "block", dtype=torch.float32, block_structure=size)

    def write(weight: Tensor) -> Tensors:
        return {end.replace("_scale", "_scale_inv"): tensor for end, tensor in twin.write(weight).items()}

    def read(tensors: Tensors) -> Tensor:
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        stored = tensors[".weight"], tensors[".weight_scale_inv"]
        return Fp8Dequantize(None)._dequantize_one(*stored, torch.float32)

    claim = {"quant_method": "fp8", "weight_block_size": size, "activation_scheme": "dynamic"}
    return Format(claim, write, read)


def gptq(
    bits: int = 4, group: int = 128, act_order: bool = False, symmetric: bool = True, version: int = 1
) -> Format:
    """Codes along inputs, zeros along outputs; in version 1 zeros are stored less one."""
    claim = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip
    less = int(version == 1)

    def write(weight: Tensor) -> Tensors:
        code_KN, zero_GN, scale_GN, group_K = random_codes(weight, bits, group, symmetric)
        if act_order:
            group_K = group_K[torch.randperm(len(group_K), generator=torch.Generator().manual_seed(0))]
        return {
            ".qweight": words(code_KN.T, bits).T, ".qzeros": words(zero_GN - less, bits),
            ".scales": scale_GN, ".g_idx": group_K.int(),
        }  # fmt: skip

    def read(tensors: Tensors) -> Tensor:
        code_KN, zero_GN = codes(tensors[".qweight"].T, bits).T, codes(tensors[".qzeros"], bits) + less
        return scaled(code_KN, zero_GN, tensors[".scales"], tensors[".g_idx"].long())

    return Format(claim, write, read)


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the outputs whose codes a word has, from its lowest bits up


def awq(group: int = 128) -> Format:
    """Codes and zeros along outputs (gemm)."""
    claim = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}

    def write(weight: Tensor) -> Tensors:
        code_KN, zero_GN, scale_GN, _ = random_codes(weight, 4, group, symmetric=False)
        words_of = {".qweight": words(code_KN, 4, AWQ_ORDER), ".qzeros": words(zero_GN, 4, AWQ_ORDER)}
        return {**words_of, ".scales": scale_GN}

    def read(tensors: Tensors) -> Tensor:
        code_KN, zero_GN = (codes(tensors[end], 4, AWQ_ORDER) for end in (".qweight", ".qzeros"))
        return scaled(code_KN, zero_GN, tensors[".scales"], torch.arange(len(code_KN)) // group)

    return Format(claim, write, read)


def random_codes(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, ...]:
    """Returns codes, and zeros and scales of groups of inputs, inputs first, and the group of each input."""
    outputs, inputs = weight.shape
    generator = torch.Generator().manual_seed(outputs)
    group_K = torch.arange(inputs) // (group if group > 0 else inputs)
    shape, middle = (int(group_K[-1]) + 1, outputs), 2 ** (bits - 1)
    code_KN = torch.randint(2**bits, (inputs, outputs), generator=generator)
    zero_GN = torch.full(shape, middle)
    if not symmetric:
        zero_GN += torch.randint(-2, 3, shape, generator=generator)
    scale_GN = weight.std() / 2**bits * (2 + 3 * torch.rand(shape, generator=generator))
    return code_KN, zero_GN, scale_GN.half(), group_K


def words(code: Tensor, bits: int, order: Any = slice(None)) -> Tensor:
    """Returns 32-bit words along the last dimension; code order[i] of a word is i-th from its lowest bits."""
    parts = code.long().unflatten(-1, (-1, 32 // bits))[..., order]
    return (parts << torch.arange(0, 32, bits)).sum(-1).int()


def codes(word: Tensor, bits: int, order: Any = slice(None)) -> Tensor:
    parts = word.long()[..., None] >> torch.arange(0, 32, bits) & 2**bits - 1
    result = torch.empty_like(parts)
    result[..., order] = parts
    return result.flatten(-2)


def scaled(code_KN: Tensor, zero_GN: Tensor, scale_GN: Tensor, group_K: Tensor) -> Tensor:
    return ((code_KN - zero_GN[group_K]) * scale_GN[group_K]).T


def four_bit(
    table: str,
    nested: bool = False,
    dtype: torch.dtype = torch.float32,
    block: int = 64,
    storage: torch.dtype = torch.uint8,
) -> Format:
    """By bitsandbytes, with the scales of blocks coded in turn if `nested`; read as `dtype`.

    Codes stand in the place of numbers of the type `storage`.
    """

    def write(weight: Tensor) -> Tensors:
        from bitsandbytes.functional import quantize_4bit

        codes, state = quantize_4bit(
            weight.to(dtype),
            blocksize=block,
            quant_type=table,
            compress_statistics=nested,
            quant_storage=storage,
        )
        parts = {f".weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        return {".weight": codes, **parts}

    def read(tensors: Tensors) -> Tensor:
        from bitsandbytes.functional import QuantState, dequantize_4bit

        state = {end.removeprefix(".weight."): tensor for end, tensor in tensors.items() if end != ".weight"}
        return dequantize_4bit(tensors[".weight"], QuantState.from_dict(state, torch.device("cpu")))

    claim = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": table,
        "bnb_4bit_use_double_quant": nested, "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": str(storage).removeprefix("torch."),
    }  # fmt: skip
    return Format(claim, write, read)


def eight_bit() -> Format:
    """LLM.int8, by bitsandbytes. Its own product quantises activations, too."""

    def write(weight: Tensor) -> Tensors:
        from bitsandbytes.functional import int8_vectorwise_quant

        codes, scales, _ = int8_vectorwise_quant(weight.half())
        return {".weight": codes, ".SCB": scales, ".weight_format": torch.zeros((), dtype=torch.uint8)}

    def read(tensors: Tensors) -> Tensor:
        from bitsandbytes.functional import int8_vectorwise_dequant

        return int8_vectorwise_dequant(tensors[".weight"], tensors[".SCB"])

    return Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, write, read)


def mxfp4() -> Format:
    """Experts of gpt-oss: blocks of 32 inputs, each with the exponent of its scale."""

    def write(weight_EKN: Tensor) -> Tensors:
        experts, inputs, outputs = weight_EKN.shape
        shape, generator = (experts, outputs, inputs // 32), torch.Generator().manual_seed(outputs)
        middle = 127 + round(math.log2(weight_EKN.std() / 3))  # 3 is the usual size of a code's number
        return {
            "_blocks": torch.randint(256, (*shape, 16), generator=generator).byte(),
            "_scales": torch.randint(middle - 1, middle + 2, shape, generator=generator).byte(),
        }

    def read(tensors: Tensors) -> Tensor:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        return convert_moe_packed_tensors(tensors["_blocks"], tensors["_scales"])

    changes = {"hidden_size": 64, "intermediate_size": 224, "head_dim": 8, "num_hidden_layers": 3}
    return Format({"quant_method": "mxfp4"}, write, read, changes, "gpt_oss")


def nvfp4(modelopt: bool = False) -> Format:
    """Random codes, with a scale of 16 inputs in FP8 and one of the matrix."""
    weights = {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "symmetric": True, "group_size": 16,
    }  # fmt: skip
    claim: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    if not modelopt:
        claim = {
            "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
            "config_groups": {"0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"],
        }  # fmt: skip

    def write(weight: Tensor) -> Tensors:
        outputs, inputs = weight.shape
        generator = torch.Generator().manual_seed(outputs)
        codes_NC = torch.randint(256, (outputs, inputs // 2), generator=generator).byte()
        scale_NG = 1 + torch.rand((outputs, inputs // 16), generator=generator) * 100
        whole = torch.tensor([float(weight.std()) / 150])  # 3 is the usual size of a code's number
        tensors = {".weight_scale": scale_NG.to(torch.float8_e4m3fn), ".input_scale": torch.ones(1)}
        if modelopt:
            return tensors | {".weight": codes_NC, ".weight_scale_2": whole[0]}
        return tensors | {".weight_packed": codes_NC, ".weight_global_scale": 1 / whole}

    def read(tensors: Tensors) -> Tensor:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        parts = {end.removeprefix("."): tensor for end, tensor in tensors.items() if "input" not in end}
        if modelopt:  # as the library's own converter
            parts["weight_packed"] = parts.pop("weight")
            parts["weight_global_scale"] = 1 / parts.pop("weight_scale_2").reshape(1)
        compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
        return compressor.decompress(parts, scheme)["weight"]

    return Format(claim, write, read)


def modelopt_fp8() -> Format:
    """modelopt: codes in FP8, and a scale of the matrix."""

    def write(weight: Tensor) -> Tensors:
        scale = weight.abs().max() / 448
        return {
            ".weight": (weight / scale).to(torch.float8_e4m3fn), ".weight_scale": scale.float(),
            ".input_scale": torch.ones(()),
        }  # fmt: skip

    def read(tensors: Tensors) -> Tensor:
        return tensors[".weight"].float() * tensors[".weight_scale"]

    return Format({"quant_method": "modelopt", "quant_algo": "FP8"}, write, read)


TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
STATIC = {**TOKEN, "strategy": "tensor", "dynamic": False, "symmetric": False}
# Folders that want activations quantised, too: their weights alone count.
WITH_ACTIVATIONS = {
    "w8a8": compressed(8, "int", "channel", inputs=TOKEN),
    "w8a8-static": compressed(8, "int", "tensor", inputs=STATIC),
    "fp8-fp8": compressed(8, "float", "channel", inputs={**TOKEN, "type": "float"}),
    "w4a8": compressed(4, "int", "group", group_size=128, inputs=TOKEN),
    "llm-int8": eight_bit(),
}
FORMATS = {
    "fp8-tensor": compressed(8, "float", "tensor"),
    "fp8-channel": compressed(8, "float", "channel"),
    "fp8-block": compressed(8, "float", "block", block_structure=[128, 128]),
    "int8-channel": compressed(8, "int", "channel"),
    "int8-zeros": compressed(8, "int", "channel", symmetric=False),
    "int4-groups": compressed(4, "int", "group", group_size=128),
    "int4-groups-of-32": compressed(4, "int", "group", group_size=32, dtype=torch.float16),
    "int4-zeros": compressed(4, "int", "group", symmetric=False, group_size=128),
    "int4-channel": compressed(4, "int", "channel"),
    "int8-groups": compressed(8, "int", "group", group_size=128),
    "int8-groups-zeros": compressed(8, "int", "group", symmetric=False, group_size=64),
    "fine-grained": fine_grained(),
    "awq": awq(),
    "gptq": gptq(),
    "gptq-zeros": gptq(symmetric=False),
    "gptq-v2": gptq(symmetric=False, version=2),
    "gptq-row": gptq(group=-1),
    "gptq-8-bit": gptq(bits=8),
    "gptq-64": gptq(group=64),
    "gptq-act-order": gptq(act_order=True, symmetric=False),
    "gptq-act-order-row": gptq(group=-1, act_order=True),
    "nvfp4": nvfp4(),
    "nvfp4-modelopt": nvfp4(modelopt=True),
    "fp8-modelopt": modelopt_fp8(),
    "nf4": four_bit("nf4"),
    "nf4-bf16": four_bit("nf4", dtype=torch.bfloat16),
    "nf4-nested": four_bit("nf4", nested=True),
    "nf4-stored-bf16": four_bit("nf4", storage=torch.bfloat16),
    "fp4-stored-fp32": four_bit("fp4", storage=torch.float32),
    "fp4": four_bit("fp4"),
    "mxfp4": mxfp4(),
    **WITH_ACTIVATIONS,
}

# Experts with a tensor each: 7 groups of 32 over the ranks.
EXPERTS = {
    "hidden_size": 128, "head_dim": 16, "intermediate_size": 224, "moe_intermediate_size": 224,
    "attention_bias": False,
}  # fmt: skip
IN_BLOCKS = EXPERTS | {"head_dim": 32, "intermediate_size": 256, "moe_intermediate_size": 256}
LINEAR: dict[str, Any] = {  # of which 3 ranks have unequal shares, in groups of 32
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 32,
}  # fmt: skip
MOE = {
    f"{family}-{name}": replace(form, family=family, changes=sizes)
    for families, name, form, sizes in (
        (
            ("mixtral", "qwen3_moe", "glm4_moe"),
            "int4",
            compressed(4, "int", "group", group_size=32),
            EXPERTS,
        ),
        (("mixtral",), "fp8", compressed(8, "float", "channel"), EXPERTS),
        (("mixtral", "qwen3_moe", "glm4_moe"), "blocks", fine_grained(), IN_BLOCKS),
        (
            ("qwen3_5_moe", "qwen3_next"),
            "int4",
            compressed(4, "int", "group", group_size=32),
            EXPERTS | LINEAR | {"shared_expert_intermediate_size": 224},
        ),
        (
            ("qwen3_next",),
            "blocks",
            fine_grained(),
            IN_BLOCKS | LINEAR | {"shared_expert_intermediate_size": 256},
        ),
        (("mixtral",), "awq", awq(32), EXPERTS),
        (("mixtral",), "gptq", gptq(group=32, symmetric=False), EXPERTS),
    )
    for family in families
}
# Rows with names, biases, norms and parts of their own.
ROWS = {
    f"{family}-int4": replace(compressed(4, "int", "group", group_size=32), family=family, changes=changes)
    for family, changes in (
        ("apertus", {}),
        ("cohere", {"use_qk_norm": True}),
        ("glm4", {"head_dim": 32}),
        ("seed_oss", {"head_dim": 32}),
        ("gemma4", {"num_hidden_layers": 3, "head_dim": 32, "global_head_dim": 64}),
        ("qwen3_5", LINEAR),
    )
}
ROWS["qwen3_5-awq"] = replace(awq(32), family="qwen3_5", changes=LINEAR)
ALL = FORMATS | MOE | ROWS
# In published folders betas and decays of linear attention are left in 16 bit.
MATRIX = re.compile(r"experts\.\d+\.|_proj\.weight$|in_proj_(qkv|qkvz|z)\.weight$")


def quantised(name: str, folder: Path, **sizes: int) -> Path:
    """Returns the folder of a random model in this format, once made, and keeps a plain one beside it."""
    form = ALL[name]
    if not (folder / "config.json").exists():
        module = build(form.family, mild=True, **{**SIZES, **form.changes, **sizes})
        module.save_pretrained(plain(folder))
        shutil.copytree(plain(folder), folder)
        rewrite(folder, form)
    return folder


def plain(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-plain")


def rewrite(folder: Path, form: Format, **claim: Any) -> None:
    """Quantises a plain folder; `claim` are keys of quantization_config that say something else."""
    says = {"quantization_config": {**form.claim, **claim}}
    edit(folder / "config.json", lambda config: config.update(says))
    names = matrices(folder)

    def change(tensors: Tensors) -> None:
        for name, tensor in list(tensors.items()):
            tensors[name] = tensor.bfloat16()
        for name in names:
            parts = form.write(tensors.pop(name).float())
            tensors |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}

    edit_tensors(folder, change)


def matrices(folder: Path) -> list[str]:
    """The names in a plain folder of what is quantised: weights of linear layers, or stacked experts."""
    tensors = load_file(folder / WEIGHTS)
    stacked = [name for name, weight in tensors.items() if weight.ndim == 3 and "conv1d" not in name]
    return stacked or [name for name in tensors if MATRIX.search(name)]


def weights_of(name: str, folder: Path) -> Tensors:
    """All weights of the folder, as the library of the format reads them."""
    tensors = load_file(folder / WEIGHTS)
    for matrix in matrices(plain(folder)):
        stem = matrix.removesuffix(".weight")
        keys = [key for key in tensors if key.startswith(stem) and not key.endswith("bias")]
        parts = {key.removeprefix(stem): tensors.pop(key) for key in keys}
        tensors[matrix] = ALL[name].read(parts).contiguous()
    return tensors


def reference(name: str, folder: Path) -> Any:
    """transformers' module with the weights that the library reads."""
    save_file(weights_of(name, folder), plain(folder) / WEIGHTS, {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(plain(folder), dtype=torch.float32).eval()
