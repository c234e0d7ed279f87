"""transformers' config of a model, whose values are kept, and what fails where no model can be made of it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from llama_ssp.config import ModelConf
from llama_ssp.errors import ModelError, RunError, is_gpu_error, lacks_memory
from llama_ssp.models.causal_lm import kernels_of, require_attention
from llama_ssp.models.checkpoint import read_config
from llama_ssp.models.families import TESTED
from llama_ssp.models.folder import REFETCH, is_gguf
from llama_ssp.models.formats.quantised_config import PLAIN_COPY
from llama_ssp.models.kept_files import kept
from llama_ssp.models.library_log import quiet_library
from llama_ssp.models.shape import rotary_parameters
from llama_ssp.models.sizes import config_file
from llama_ssp.models.synthetic import config_for
from llama_ssp.models.wrapped import WHOLE

ALLOWED = f"{TESTED} and other causal models"
ANOTHER = "choose another model"


def config_of(model: ModelConf, path: Path | None, role: str) -> Any:
    """Returns the model's config: of config.json, or without a path of the model's sizes."""
    if path is not None:
        return require_supported(path)
    with possible(model, role):
        return config_for(model)


def require_supported(path: Path) -> Any:
    """Returns the values of the config, without transformers in later starts; raises ModelError."""
    known, values = kept("config", json.dumps([path.suffix, read_config(path)]), partial(_values, path))
    config = type("KeptConfig", (SimpleNamespace,), dict.fromkeys(known))(**values)
    kinds = {parameters.get("rope_type", "default") for parameters in rotary_parameters(config).values()}
    if kinds <= {"default"} and not hasattr(config, "per_layer_config"):
        return config
    return hub_config(path)  # scaled positions, and sizes of single layers, need its class


def _values(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Returns the names that the config's class has, and all values, by the names of other classes, too."""
    config = hub_config(path)
    values = json.loads(config.to_json_string(use_diff=False))
    values |= {other: values[name] for other, name in config.attribute_map.items() if name in values}
    return [name for name in values if hasattr(type(config), name)], values


def hub_config(path: Path) -> Any:
    """Returns transformers' config of a folder or file; raises ModelError if the model cannot be run."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    content = read_config(path)
    try:
        if is_gguf(path) or WHOLE in content:
            config: Any = CONFIG_MAPPING[content["model_type"]].from_dict(deepcopy(content))
        else:
            with quiet_library():
                config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # values of wrong types fail in any way
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno):
            raise  # of this machine: torch makes its folder for compiled code when it is imported
        if content.get("model_type") not in CONFIG_MAPPING_NAMES:
            raise ModelError(
                "config.json is not one that transformers knows",
                where=path,
                found=str(error)[:160],
                allowed=ALLOWED,
                fix=ANOTHER,
            ) from None
        raise ModelError(
            f"{config_file(path).name} cannot be read",
            where=path,
            found=f"{type(error).__name__}: {error}",
            fix="correct it, or fetch the model again",
        ) from None
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            "the architecture is not a causal language model",
            where=path,
            found=config.model_type,
            allowed=ALLOWED,
            fix=ANOTHER,
        )
    require_attention(config)
    config.return_dict = True
    config.output_hidden_states = False
    config.output_attentions = False
    return config


def empty(config: Any, dtype: torch.dtype) -> Any:
    """Returns transformers' module with real buffers and no weights."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **kernels_of(config, dtype))


@contextmanager
def possible(model: ModelConf, role: str) -> Iterator[None]:
    """Turns what transformers raises for sizes that contradict each other into a ModelError."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (ValueError, RuntimeError, ZeroDivisionError, StrictDataclassError) as error:
        raise ModelError(
            "the sizes do not make a model",
            where=f"{role} {model.name}",
            found=str(error)[:200],
            fix="take them from a model's config.json",
        ) from None


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turns what libraries raise for a checkpoint into a ModelError of one line."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:  # a config makes constructors fail in any way
        if lacks_memory(error) or is_gpu_error(error):
            raise
        fix = f"correct {config_file(path).name}, or {REFETCH}, or another dtype"
        if read_config(path).get("quantization_config"):
            fix = PLAIN_COPY
        raise ModelError(
            "the checkpoint cannot be loaded",
            where=path,
            found=f"{type(error).__name__}: {error}",
            fix=fix,
        ) from error
