"""Small folders in quantised formats, each made by the tool that people use, with what the tool gives for it.

`python -m tests.tool_folders [NAME ...]` writes them into tests/tool_files/ anew, whose README says by which
versions. A tool is needed for that alone.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FILES = Path(__file__).parent / "tool_files"
LOGITS = FILES / "logits"  # of each folder by its tool, and of the weights before they were quantised
MAX_BYTES = 100 * 2**10  # of a folder
VOCAB = 64
TOKENS = [(7 * place + 3) % VOCAB for place in range(12)]


def plain(n_kv: int = 2) -> LlamaForCausalLM:
    """Returns a random Llama, the same at every call; its logits are far from one another."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": n_kv, "max_position_embeddings": 128,
        "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.1,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16().eval()


@torch.inference_mode()
def logits_of(module: Any) -> Tensor:
    """Returns the logits of TOKENS, (S, V), in fp32."""
    found: Tensor = module(input_ids=torch.tensor([TOKENS])).logits[0].float()
    return found.clone()


def in_fp32(module: Any) -> LlamaForCausalLM:
    """Returns a module with these weights in fp32, and everything else as at first."""
    fresh = LlamaForCausalLM(plain(module.config.num_key_value_heads).config)
    known = fresh.state_dict()
    fresh.load_state_dict({name: module.state_dict()[name].float() for name in known})
    return fresh.eval()


def by_compressed_tensors(folder: Path, **weights: Any) -> Any:
    """Quantises to the nearest code, as llm-compressor's data-free modifier does, by the library it uses.

    Returns the module with the weights that the library makes of the codes, in the type of the scales.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    module = plain()
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(module, config, show_progress=False)
    for layer in module.modules():
        if getattr(layer, "quantization_scheme", None) is None:
            continue
        blocks = layer.weight.unflatten(1, (-1, args.group_size or layer.weight.shape[1]))
        scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
        layer.weight_scale.data.copy_(scale)
        if hasattr(layer, "weight_zero_point"):
            layer.weight_zero_point.data.copy_(zero)

    compressor = ModelCompressor.from_pretrained_model(module)
    compressor.compress_model(module)
    module.save_pretrained(folder)
    compressor.update_config(str(folder))
    compressor.decompress_model(module)
    return in_fp32(module)


def by_bitsandbytes(folder: Path, **settings: Any) -> Any:
    """Saves what transformers quantises with it while it loads; returns the module with decoded weights.

    The library's own products on a CPU are in bf16.
    """
    from transformers import BitsAndBytesConfig

    with tempfile.TemporaryDirectory() as scratch:
        plain().save_pretrained(scratch)
        module = AutoModelForCausalLM.from_pretrained(
            scratch,
            dtype=torch.float32,
            device_map="cpu",
            quantization_config=BitsAndBytesConfig(**settings),
        )
    module.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
    return in_fp32(again.dequantize())


def samples() -> list[Tensor]:
    """Returns the random texts that a quantiser calibrates with, (1, S) each."""
    texts = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (1, 64), generator=texts) for _ in range(16)]


def by_gptqmodel(folder: Path, kernel: str, n_kv: int = 2, **settings: Any) -> Any:
    """Quantises and saves as gptqmodel's users do; returns the module with the weights that it decodes."""
    os.environ["GPTQMODEL_CPU_WORKERS"] = "2"  # it wants as many, however few cores there are
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    words = {f"<{token}>": token for token in range(VOCAB)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(WordLevel(words, unk_token="<0>")),
        bos_token="<0>",
        eos_token="<1>",
        pad_token="<0>",
    )
    with tempfile.TemporaryDirectory() as scratch:
        module = plain(n_kv)
        module.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        quantiser = GPTQModel.load(scratch, QuantizeConfig(**settings), device="cpu")
        texts = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in samples()]
        quantiser.quantize(texts, batch_size=1)
        quantiser.save(str(folder))

    again = GPTQModel.load(str(folder), backend=BACKEND[kernel], device="cpu").model
    on_disk = load_file(folder / "model.safetensors")
    for name, layer in again.named_modules():
        if hasattr(layer, "qweight"):
            layer.scales.data = on_disk[
                f"{name}.scales"
            ]  # in fp16; those that are loaded are rounded to bf16
            module.get_submodule(name).weight.data = decoded(layer).T.contiguous()
    for name, tensor in again.named_parameters():
        if name in dict(module.named_parameters()):
            module.get_parameter(name).data = tensor.data.float()
    return in_fp32(module)


def decoded(layer: Any) -> Tensor:
    """Returns a quantised layer's weights as gptqmodel makes them, (inputs, outputs), in the scales' type."""
    if hasattr(layer, "dequantize_weight"):
        weights: Tensor = layer.dequantize_weight()
        return weights
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    codes: Tensor = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, layer.bits, layer.group_size)
    return codes


def by_modelopt(folder: Path, config: str) -> Any:
    """Quantises and exports as modelopt's users do; returns the module with the weights that it decodes."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    module = plain()

    def calibrate(quantised: Any) -> None:
        for ids in samples():
            quantised(input_ids=ids)

    module.config.architectures = ["LlamaForCausalLM"]
    mtq.quantize(module, getattr(mtq, config), calibrate)
    export_hf_checkpoint(module, export_dir=str(folder))

    fresh = plain()
    tensors = load_file(folder / "model.safetensors")
    for name, layer in fresh.named_modules():
        scale = tensors.get(f"{name}.weight_scale")
        if scale is None:
            continue
        shape = layer.weight.shape
        codes = tensors[f"{name}.weight"]
        if codes.dtype == torch.uint8:
            of_all = tensors[f"{name}.weight_scale_2"]
            how = {"scale": scale, "double_scale": of_all, "block_sizes": {-1: 16}}
            found = NVFP4QTensor(shape, torch.float32, codes).dequantize(**how)
        else:
            found = FP8QTensor(shape, torch.float32, codes).dequantize(scale=scale)
        layer.weight.data = found
    return in_fp32(fresh)


NF4: dict[str, Any] = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32,
}  # fmt: skip
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel"}
GPTQ: dict[str, Any] = {"kernel": "TORCH", "bits": 4, "group_size": 32, "desc_act": False}
# AWQ's search takes 64 outputs at a time: keys and values have as many.
AWQ: dict[str, Any] = {
    "kernel": "TORCH_AWQ", "n_kv": 4, "method": "awq", "format": "gemm", "bits": 4, "group_size": 32,
}  # fmt: skip
MADE: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "compressed-tensors-int4": (by_compressed_tensors, {**INT4, "symmetric": True}),
    "compressed-tensors-int4-zeros": (by_compressed_tensors, {**INT4, "symmetric": False}),
    "compressed-tensors-int8": (by_compressed_tensors, {**INT8, "symmetric": True}),
    "compressed-tensors-fp8": (by_compressed_tensors, {**INT8, "type": "float", "symmetric": True}),
    "bitsandbytes-nf4": (by_bitsandbytes, NF4),
    "bitsandbytes-nf4-nested": (by_bitsandbytes, {**NF4, "bnb_4bit_use_double_quant": True}),
    "bitsandbytes-nf4-in-bf16": (by_bitsandbytes, {**NF4, "bnb_4bit_quant_storage": torch.bfloat16}),
    "bitsandbytes-fp4": (by_bitsandbytes, {**NF4, "bnb_4bit_quant_type": "fp4"}),
    "bitsandbytes-int8": (by_bitsandbytes, {"load_in_8bit": True}),
    "gptqmodel-int4": (by_gptqmodel, GPTQ),
    "gptqmodel-int4-act-order": (by_gptqmodel, {**GPTQ, "desc_act": True}),
    "gptqmodel-awq": (by_gptqmodel, AWQ),
    "modelopt-fp8": (by_modelopt, {"config": "FP8_DEFAULT_CFG"}),
    "modelopt-nvfp4": (by_modelopt, {"config": "NVFP4_DEFAULT_CFG"}),
}


def write(name: str) -> None:
    """Makes the folder, and keeps the logits that its tool gives with it."""
    folder = FILES / name
    shutil.rmtree(folder, ignore_errors=True)
    make, settings = MADE[name]
    module = make(folder, **settings)
    LOGITS.mkdir(exist_ok=True)
    before = in_fp32(plain(module.config.num_key_value_heads))
    found = {"tool": logits_of(module), "plain": logits_of(before)}
    save_file(found, LOGITS / f"{name}.safetensors")
    print(name, sum(file.stat().st_size for file in folder.iterdir()))


if __name__ == "__main__":
    for given in sys.argv[1:] or MADE:
        write(given)
