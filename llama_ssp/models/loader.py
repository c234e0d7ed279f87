"""Loads one model, or this rank's part of it, from a checkpoint or from a seed."""

import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from llama_ssp.config import OWN_CODES, Dtype, ModelConf
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.errors import ModelError
from llama_ssp.models.adapter import require_for_module
from llama_ssp.models.assemble import decoder, wanted
from llama_ssp.models.causal_lm import CausalModel, kernels_of
from llama_ssp.models.checkpoint import read_config
from llama_ssp.models.cuda_graphs import GraphedModel
from llama_ssp.models.decoder import Decoder
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.devices import TORCH_DTYPES
from llama_ssp.models.families import MTP_LAYERS, TESTED_FAMILIES, family_of
from llama_ssp.models.folder import REFETCH, is_gguf
from llama_ssp.models.formats.adapted_source import adapted, merge
from llama_ssp.models.formats.coded_source import source_of
from llama_ssp.models.formats.quantised_config import quantised_config
from llama_ssp.models.given import GivenModel, ModuleSource
from llama_ssp.models.host_memory import return_memory
from llama_ssp.models.interface import Model
from llama_ssp.models.kernels import attention as attention_kernel
from llama_ssp.models.kernels.kernel_sizes import attends_on_cpu
from llama_ssp.models.linear import Kernels, LayerFormat
from llama_ssp.models.model_config import config_of, empty, hub_config, possible, refusing
from llama_ssp.models.quantization import QUANTISED, choose_kernels, settings
from llama_ssp.models.safetensors_io import Files, ReadWatch, WatchedSource, bytes_on_disk, unwatched
from llama_ssp.models.self_check import require_faithful
from llama_ssp.models.shape import reason_against
from llama_ssp.models.sharding import kinds_of_heads, require_quantised, require_transformers, unsplit
from llama_ssp.models.steps import SteppedModel, has_kernels
from llama_ssp.models.synthetic import SyntheticSource, config_for, fill_module, require_filled
from llama_ssp.models.wrapped import BEGINNINGS, WHOLE, kind_left_out, naming

log = logging.getLogger(__name__)

DRAFT = "draft"


def load(
    model: ModelConf,
    path: Path | None,
    dtype: Dtype,
    device: torch.device,
    role: str,
    ranks: Ranks = ALONE,
    fast: bool = False,
    watch: ReadWatch = unwatched,
) -> Model:
    """Loads the model on one device, ready to run; over several ranks this rank's part, by slices alone.

    `fast`: with compiled steps. A model that decoder.py does not have runs as transformers' module, eagerly,
    in one process; an architecture without a row in families.py is tried first. Only draft rank 0 has token
    ids, so of a draft only this rank holds the embedding.
    """
    config = config_of(model, path, role)
    against = reason_against(config)
    if against is not None:
        if ranks.world > 1:
            raise unsplit(f"{role} {model.name}", against)
        require_quantised(model)
        require_transformers(model.name, dtype, role)
        causal = tried(CausalModel(load_module(model, path, dtype, device, role), model.name))
        log.info("%s %s: %s on %s, by transformers (%s)", role, model.name, dtype.value, device, against)
        return causal

    require_quantised(model, ranks.world)
    form = _form(model, dtype, device, fast)
    drafts = role == DRAFT
    numbers = form.numbers
    if path is None:
        source = SyntheticSource.of_config(config, model, numbers, _made_on(device, dtype), drafts)
        total = numbers.itemsize * sum(map(prod, source.shapes.values()))
        with watch(f"{role} {model.name}", total) as report:
            layers = decoder(config, WatchedSource(source, total, report), ranks, form, drafts)
    else:
        with _checked(path, config) as files, adapted(files, model, config, role, numbers) as weights:
            total = bytes_on_disk(path)
            with watch(f"{role} {model.name}", total) as report:
                layers = decoder(config, WatchedSource(weights, total, report), ranks, form, drafts)
    return_memory()

    line = f"{role} {model.name}: {dtype.value} on {device}"
    level = logging.DEBUG
    if model.adapter is not None:
        line += f", with adapter {model.adapter}"
    if ranks.world > 1:
        line += f", over {ranks.world} ranks"
    if path is None and not drafts:
        line += ", synthetic weights: a token without a text is shown as <id>"
    elif path is not None and (codes := quantised_config(read_config(path), path)):
        line += f", from {codes.name}"
        if codes.activations:
            level = logging.INFO
            line += f"; activations are not quantised: inputs stay in {str(numbers).removeprefix('torch.')}"
    log.log(level, line)

    return _run_by_decoder(layers, config, model, form, ranks)


def load_given(given: GivenModel, model: ModelConf, dtype: Dtype, role: str, fast: bool = False) -> Model:
    """Returns a model that a script has loaded, ready to run; nothing of it is changed.

    On the decoder it shares tensors. A module is first tried: it may do anything.
    """
    module = given.module
    if given.against:
        if dtype is not given.conf.dtype:
            raise ModelError(
                "a module of the script runs as it is",
                where=f"{role} {model.name}",
                found=f"{role}.dtype={dtype.value}",
                allowed=given.conf.dtype.value,
                fix=f"leave {role}.dtype out, or load the module in that format",
            )
        causal = CausalModel(module, model.name)
        require_faithful(causal)
        return causal

    form = _form(model, dtype, given.device, fast)
    source = ModuleSource(module, wanted(module.config))
    layers = decoder(module.config, source, form=form, drafts=role == DRAFT)
    return _run_by_decoder(layers, module.config, model, form, ALONE)


def _run_by_decoder(
    layers: Decoder, config: Any, model: ModelConf, form: LayerFormat, ranks: Ranks
) -> DecoderModel:
    """Returns the model of these layers, with compiled steps if its products are by our kernels."""
    device = form.device
    kind = stepped(device) if form.kernels is Kernels.all else DecoderModel
    decoder_model = kind(layers, config, model.name, ranks)
    all_attend = all(attends_on_cpu(size) for _, size in kinds_of_heads(model))
    if form.kernels is Kernels.codes and device.type == "cpu" and all_attend:
        # A token's logits are then the same in a pass of one token and of several.
        decoder_model.attend = attention_kernel.attend
    return decoder_model


def _form(model: ModelConf, dtype: Dtype, device: torch.device, fast: bool) -> LayerFormat:
    """Returns how layers are held.

    Codes need their kernel in eager steps, too: to decode them for each product takes many times as long.
    """
    heads = (model.n_heads, model.n_kv_heads, model.head_dim)
    kernels = Kernels.none
    if (fast or dtype in OWN_CODES) and has_kernels(model.name, dtype, device, heads, model):
        kernels = Kernels.all if fast else Kernels.codes
    return LayerFormat(dtype=dtype, device=device, kernels=kernels, keeps_codes=dtype is Dtype.packed)


def stepped(device: torch.device) -> type[SteppedModel]:
    """Returns the class of models with compiled steps: CUDA graphs on a GPU."""
    return GraphedModel if device.type == "cuda" else SteppedModel


def opened(path: Path, config: Any, names: Mapping[str, Any]) -> Files:
    """The weights of a folder or file, by the names of the model's tensors."""
    if is_gguf(path):
        from llama_ssp.models.formats.gguf_header import read_header  # imports gguf
        from llama_ssp.models.formats.gguf_source import GgufSource

        return GgufSource(read_header(path), config, names)
    prefix = family_of(config.model_type).names.embedding.partition(".")[0]
    content = read_config(path)
    return source_of(path, names, prefix, quantised_config(content, path), naming(content))


@contextmanager
def _checked(path: Path, config: Any) -> Iterator[Files]:
    """Opens the weights; raises ModelError unless their names and shapes are those of the model."""
    with refusing(path), closing(opened(path, config, names := wanted(config))) as files:
        require_complete(path, differences(names, files.shapes, config))
        yield files


def load_module(model: ModelConf, path: Path | None, dtype: Dtype, device: torch.device, role: str) -> Any:
    """Returns transformers' module with its weights, and what an adapter adds to them."""
    if path is None:
        return made(shaped(model, None, dtype, role), model, dtype, device, role)
    require_for_module(model, dtype, role)
    module = read(path, dtype, {"": device})
    merge(module, model, role)
    return module


def tried(causal: CausalModel) -> CausalModel:
    """Returns the model, after the trial of one that the decoder does not have."""
    config = causal.module.config
    lacking = family_of(config.model_type).lacking(partial(getattr, config))
    if config.model_type not in TESTED_FAMILIES or lacking:
        require_faithful(causal)
    return causal


def shaped(model: ModelConf, path: Path | None, dtype: Dtype, role: str) -> Any:
    """Returns the module, of config.json or without a path of the model's sizes, without weights.

    Its buffers are real.
    """
    if path is None:
        with possible(model, role):
            return empty(config_for(model), TORCH_DTYPES[dtype])
    config = _for_modules(path)
    with refusing(path):
        return empty(config, TORCH_DTYPES[dtype])


def _for_modules(path: Path) -> Any:
    """Returns the config of a model for transformers' module; raises ModelError for a GGUF file."""
    config = hub_config(path)
    if is_gguf(path):
        raise ModelError(
            "a GGUF file runs by the decoder alone",
            where=path,
            found="another splitting",
            allowed="placement.splitting=tensor, or one process",
            fix="use the model's folder with safetensors",
        )
    is_plain = quantised_config(read_config(path), path) is None
    if is_plain and hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers refuses some such claims and warns of others
    return config


def read(path: Path, dtype: Dtype, spread: Mapping[str, Any], offload: Path | None = None) -> Any:
    """Returns the checkpoint's module, as transformers loads it; `spread` has the device of each module."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hub_logging

    config = _for_modules(path)
    hub_logging.disable_progress_bar()
    codes = quantised_config(read_config(path), path)
    if codes is not None and reason_against(config) is None:  # transformers reads tensors that do not fit
        with _checked(path, config):
            pass
    with refusing(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=TORCH_DTYPES[dtype],
            device_map=dict(spread),
            offload_folder=offload,
            **kernels_of(config, TORCH_DTYPES[dtype]),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **_renaming(config),
            **settings(dtype),
        )

    other = _not_run(config)
    unexpected = [name for name in report["unexpected_keys"] if not name.startswith(other)]
    if hasattr(config, WHOLE):
        unexpected = [name for name in unexpected if not kind_left_out(name)]
    require_complete(path, {**report, "unexpected_keys": unexpected})

    if dtype in QUANTISED or getattr(module, "is_quantized", False):
        choose_kernels(module)
    weights = [weight for weight in module.parameters() if not weight.is_meta]
    if codes is not None and codes.method == "fp8" and all(weight.itemsize > 1 for weight in weights):
        for weight in weights:  # on a CPU FP8 becomes bf16, and other weights have the type of their file
            weight.data = weight.data.to(TORCH_DTYPES[dtype])
    return module


def _renaming(config: Any) -> dict[str, Any]:
    """Returns the argument that gives transformers the names of a text part's tensors."""
    if not hasattr(config, WHOLE):
        return {}
    return {"key_mapping": {f"^{re.escape(begin)}": name for begin, name in BEGINNINGS}}


def _not_run(config: Any) -> tuple[str, ...]:
    """Returns what the names of layers after the last one begin with: of multi-token prediction."""
    layers = int(config.num_hidden_layers)
    blocks = family_of(config.model_type).names.blocks
    count = int(getattr(config, MTP_LAYERS, None) or 0)
    return tuple(f"{blocks}.{number}." for number in range(layers, layers + count))


def differences(
    names: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], config: Any
) -> dict[str, list[str]]:
    """Returns how the tensors on disk differ from the model's, in the words of transformers' report."""
    other = [name for name in names.keys() & found.keys() if found[name] != names[name]]
    head = f"{family_of(config.model_type).names.head}.weight"
    tied = {head} if getattr(config, "tie_word_embeddings", False) else set()
    return {
        "missing_keys": sorted(names.keys() - found.keys() - tied),
        "mismatched_keys": sorted(f"{name}: {found[name]} not {names[name]}" for name in other),
        "unexpected_keys": sorted(
            name for name in found.keys() - names.keys() if not name.startswith(_not_run(config))
        ),
    }


def require_complete(path: Path, report: dict[str, Any]) -> None:
    """Refuses a tensor that is missing or misshapen: transformers would fill it at random."""
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        names = sorted(str(name) for name in report.get(kind) or ())
        if names:
            raise ModelError(
                f"the checkpoint has {kind.replace('_', ' ')}",
                where=path,
                found=f"{len(names)}: {'; '.join(names[:5])}",
                fix=f"{REFETCH}; config.json and weights do not belong together",
            )


def made(module: Any, model: ModelConf, dtype: Dtype, device: torch.device, role: str) -> Any:
    """Returns the module with weights from its seed."""
    source = SyntheticSource.of_module(module, model, _made_on(device, dtype), drafts=role == DRAFT)
    fill_module(module, source, dtype, device)
    require_filled(module)
    return module


def _made_on(device: torch.device, dtype: Dtype) -> torch.device:
    """Returns where weights are made from a seed: quantising begins on the CPU."""
    return torch.device("cpu") if dtype in QUANTISED else device
