"""transformers' config of a model, and what fails where no model can be made of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from llama_ssp.config import ModelConf
from llama_ssp.errors import ModelError, RunError, is_gpu_error, lacks_memory, shortened
from llama_ssp.models.causal_lm import kernels_of, require_attention
from llama_ssp.models.checkpoint import read_config
from llama_ssp.models.families import FAMILIES, TESTED
from llama_ssp.models.folder import REFETCH, is_gguf
from llama_ssp.models.formats.quantised_config import PLAIN_COPY
from llama_ssp.models.shape import rotary_parameters
from llama_ssp.models.sizes import config_file
from llama_ssp.models.synthetic import config_for

ALLOWED, ANOTHER = f"{TESTED} and other causal models", "choose another model"


def config_of(model: ModelConf, path: Path | None, role: str) -> Any:
    """transformers' config, of config.json, or without a path of the model's sizes."""
    if path is not None:
        return require_supported(path)
    with possible(model, role):
        return config_for(model)


def require_supported(path: Path) -> Any:
    """The config as transformers reads it; raises ModelError if the model cannot be run."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    content = read_config(path)
    try:
        if is_gguf(path):
            config: Any = CONFIG_MAPPING[content["model_type"]].from_dict(deepcopy(content))
        else:
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # values of wrong types fail in any way
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno):
            raise  # of this machine: torch makes its folder for compiled code when it is imported
        if content.get("model_type") in CONFIG_MAPPING_NAMES:
            raise _wrong_config(path, content, "cannot be read", error) from None
        what = "config.json is not one that transformers knows"
        raise ModelError(what, path, str(error)[:160], ALLOWED, ANOTHER) from None
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        what = "the architecture is not a causal language model"
        raise ModelError(what, path, config.model_type, ALLOWED, ANOTHER)
    require_attention(config)
    _require_even_heads(path, config)
    config.return_dict, config.output_hidden_states, config.output_attentions = True, False, False
    return config


def _require_even_heads(path: Path, config: Any) -> None:
    """Of heads turned whole; transformers takes some odd sizes, and fails at the first step."""
    head_dim = getattr(config, "head_dim", None) or 0
    if not head_dim and config.model_type in FAMILIES:
        head_dim = config.hidden_size // max(1, config.num_attention_heads)
    shares = (of.get("partial_rotary_factor") or 1.0 for of in rotary_parameters(config).values())
    if head_dim % 2 and any(int(head_dim * share) == head_dim for share in shares):
        where, fix = f"{config_file(path)}: head_dim", "correct it, or fetch the model again"
        raise ModelError(f"{config_file(path).name} cannot be read", where, head_dim, "even sizes", fix)


def empty(config: Any, dtype: torch.dtype) -> Any:
    """transformers' module with real buffers and no weights."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **kernels_of(config, dtype))


@contextmanager
def possible(model: ModelConf, role: str) -> Iterator[None]:
    """Turns what transformers raises for sizes that contradict each other into a ModelError."""
    try:
        yield
    except (ValueError, RuntimeError, ZeroDivisionError, StrictDataclassError) as error:
        what, fix = "the sizes do not make a model", "take them from a model's config.json"
        raise ModelError(what, f"{role} {model.name}", str(error)[:200], fix=fix) from None


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
        content = read_config(path)
        if not _makes_model(content):
            raise _wrong_config(path, content, "makes no model", error) from error
        fix = PLAIN_COPY if content.get("quantization_config") else f"{REFETCH}, or another dtype"
        raise ModelError("the checkpoint cannot be loaded", path, str(error)[:200], fix=fix) from error


def _makes_model(content: dict[str, Any]) -> bool:
    """Whether transformers makes a module, without weights, from this content of config.json."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        empty(CONFIG_MAPPING[content["model_type"]].from_dict(deepcopy(content)), torch.float32)
    except MemoryError:
        raise
    except Exception:  # as above
        return False
    return True


def _wrong_config(path: Path, content: dict[str, Any], how: str, error: Exception) -> ModelError:
    """Names each key of config.json without which there would be a model."""
    own = [key for key in content if key != "model_type"]
    wrong = [key for key in own if _makes_model({k: v for k, v in content.items() if k != key})]
    found = f"{shortened(repr(content[wrong[0]]), 80)}: " if len(wrong) == 1 else ""
    where = f"{config_file(path)}{': ' if wrong else ''}{', '.join(wrong)}"
    fix = "correct it, or fetch the model again"
    return ModelError(f"{config_file(path).name} {how}", where, f"{found}{str(error)[:160]}", fix=fix)
