"""Loads one model onto one device: from a checkpoint, or from a seed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.distributed.comm import Ranks
from llama_ssp.errors import ModelError, RunError, lacks_memory, shortened
from llama_ssp.models.causal_lm import CausalModel, kernels_of, windows_of
from llama_ssp.models.devices import TORCH_DTYPES
from llama_ssp.models.families import TESTED_FAMILIES
from llama_ssp.models.folder import read_json
from llama_ssp.models.quantization import QUANTISED, choose_kernels, settings
from llama_ssp.models.safetensors_io import FileSource
from llama_ssp.models.self_check import require_faithful
from llama_ssp.models.sharding import require_quantised
from llama_ssp.models.synthetic import SyntheticSource, build
from llama_ssp.models.tensor_parallel import cut_module, differences, fill_module, require_filled

log = logging.getLogger(__name__)

DRAFT = "draft"


def load(model: ModelConf, path: Path | None, dtype: Dtype, device: torch.device, role: str) -> CausalModel:
    """The model, ready to run. A family that is not among the tested ones is tried before it is used."""
    require_quantised(model)
    if path is None:
        module = made(shaped(model, None, dtype, role), model, dtype, device, role)
    else:
        module = read(path, dtype, {"": device})
    causal = CausalModel(module, model.name)
    ready(causal, model)
    log.info("%s %s: %s on %s", role, model.name, dtype.value, device)
    return causal


def load_part(
    model: ModelConf, path: Path | None, dtype: Dtype, device: torch.device, role: str, ranks: Ranks
) -> CausalModel:
    """This rank's part of the model; the ranks together give its logits, each of them all.

    What a draft is fed, its first rank alone knows: that one looks tokens up for all.

    Whether from a checkpoint or from a seed, a rank makes its slices alone.
    """
    module = shaped(model, path, dtype, role)
    if path is None:
        source = SyntheticSource(module, model, _made_on(device, dtype), role == DRAFT)
        vocab = cut_module(module, source, ranks, dtype, device, role == DRAFT)
    else:
        with _refusing(path), FileSource(path, module) as files:
            _require_complete(path, differences(module, files))
            vocab = cut_module(module, files, ranks, dtype, device, role == DRAFT)
    require_filled(module)
    causal = CausalModel(module, model.name, vocab)
    if model.scan:
        require_finite(causal)
    log.info("%s %s: %s on %s, over %d ranks", role, model.name, dtype.value, device, ranks.world)
    return causal


def ready(causal: CausalModel, model: ModelConf) -> None:
    """Tries a family that is not tested, and scans the weights if that is asked for."""
    config = causal.module.config
    if config.model_type not in TESTED_FAMILIES or getattr(config, "alibi", False):  # as some falcons have
        require_faithful(causal)
    if model.scan:
        require_finite(causal)


def shaped(model: ModelConf, path: Path | None, dtype: Dtype, role: str) -> Any:
    """The module with real buffers and without weights: of the checkpoint, or of the shape alone."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    if path is None:
        try:
            return build(model, TORCH_DTYPES[dtype])
        except (ValueError, RuntimeError, ZeroDivisionError, StrictDataclassError) as error:
            raise ModelError(
                "the sizes do not make a model", where=f"{role} {model.name}", found=str(error)[:200],
                fix="take them from a model's config.json",
            ) from None  # fmt: skip
    config = require_supported(path)
    with _refusing(path), init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(
            config, dtype=TORCH_DTYPES[dtype], **kernels_of(config, TORCH_DTYPES[dtype])
        )


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """What libraries say of a checkpoint that they do not take, in one line."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:  # a config makes constructors fail in any way
        if lacks_memory(error):
            raise
        content = read_json(path / "config.json")
        if not _makes_model(content):
            raise _wrong_config(path, content, "makes no model", error) from error
        plain = "use a copy of the model with plain weights, and dtype=int8 or nf4"
        raise ModelError(
            "the checkpoint cannot be loaded", where=str(path), found=str(error)[:200],
            fix=plain if content.get("quantization_config") else "fetch the model again, or another dtype",
        ) from error  # fmt: skip


def require_supported(path: Path) -> Any:
    """The config, as transformers reads it; refuses what cannot be run, before weights are read."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    content = read_json(path / "config.json")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except MemoryError:
        raise
    except Exception as error:  # values of wrong types fail in any way
        if content.get("model_type") in CONFIG_MAPPING_NAMES:
            raise _wrong_config(path, content, "cannot be read", error) from None
        raise ModelError(
            "config.json is not one that transformers knows", where=str(path), found=str(error)[:160],
            allowed=", ".join(TESTED_FAMILIES) + " and other causal models", fix="choose another model",
        ) from None  # fmt: skip
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            "the architecture is not a causal language model", where=str(path), found=config.model_type,
            allowed=", ".join(TESTED_FAMILIES) + " and other causal models", fix="choose another model",
        )  # fmt: skip
    windows_of(config)
    config.return_dict, config.output_hidden_states, config.output_attentions = True, False, False
    return config


def _makes_model(content: dict[str, Any]) -> bool:
    """Whether transformers makes a module, without weights, of what config.json says."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[content["model_type"]].from_dict(deepcopy(content))  # which changes it
        with init_empty_weights(include_buffers=False):
            AutoModelForCausalLM.from_config(config, **kernels_of(config, torch.float32))
    except MemoryError:
        raise
    except Exception:  # as above
        return False
    return True


def _wrong_config(path: Path, content: dict[str, Any], how: str, error: Exception) -> ModelError:
    """Names the keys of config.json of which one alone, if left out, would let a model be made."""
    own = [key for key in content if key != "model_type"]
    wrong = [key for key in own if _makes_model({k: v for k, v in content.items() if k != key})]
    found = f"{shortened(repr(content[wrong[0]]), 80)}: " if len(wrong) == 1 else ""
    named = f": {', '.join(wrong)}" if wrong else ""
    return ModelError(
        f"config.json {how}", where=f"{path / 'config.json'}{named}", found=f"{found}{str(error)[:160]}",
        fix="correct it, or fetch the model again",
    )  # fmt: skip


def read(path: Path, dtype: Dtype, spread: Mapping[str, Any], offload: Path | None = None) -> Any:
    """The checkpoint's module, as transformers loads it, on the device of each module."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hub_logging

    config = require_supported(path)
    hub_logging.disable_progress_bar()
    with _refusing(path), warnings.catch_warnings():
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
            **settings(dtype),
        )
    _require_complete(path, report)
    if dtype in QUANTISED or getattr(module, "is_quantized", False):
        choose_kernels(module)
    return module


def _require_complete(path: Path, report: dict[str, Any]) -> None:
    """A tensor that is missing or misshapen must fail: transformers would fill it at random."""
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        names = sorted(str(name) for name in report.get(kind) or ())
        if names:
            raise ModelError(
                f"the checkpoint has {kind.replace('_', ' ')}", where=str(path),
                found=f"{len(names)}: {'; '.join(names[:5])}",
                fix="fetch the model again; config.json and weights do not belong together",
            )  # fmt: skip


def made(module: Any, model: ModelConf, dtype: Dtype, device: torch.device, role: str) -> Any:
    """The module with weights from its seed."""
    source = SyntheticSource(module, model, _made_on(device, dtype), drafts=role == DRAFT)
    fill_module(module, source, dtype, device)
    module.tie_weights()
    require_filled(module)
    return module


def _made_on(device: torch.device, dtype: Dtype) -> torch.device:
    """Where weights are made that come from a seed: quantising begins on the CPU."""
    return torch.device("cpu") if dtype in QUANTISED else device


def require_finite(causal: CausalModel) -> None:
    """Every weight, also those that are brought when their layer runs."""
    from accelerate.utils import align_module_device

    for name, layer in causal.module.named_modules():
        with align_module_device(layer):
            for leaf, tensor in layer.state_dict().items():
                if "." in leaf.removeprefix("weight."):
                    continue  # a layer below this one's
                if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                    raise ModelError(
                        "a weight is not a finite number", where=f"{causal.name}: {name}.{leaf}",
                        fix="fetch the model again",
                    )  # fmt: skip
