"""A model that a script has loaded with transformers: what it is, and who runs it here.

Its tensors stay where they are, and the module is not changed. A family with a row runs on our decoder, which
shares the tensors that it uses as they are, and copies matrices that it fuses. Whatever the decoder cannot
see in the tensors alone (hooks, adapters, classes of the script's own) runs by the module itself.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama_ssp.config import Dtype, ModelConf, Weights
from llama_ssp.errors import ModelError, UsageError
from llama_ssp.models.assemble import wanted
from llama_ssp.models.causal_lm import attention_of, require_attention
from llama_ssp.models.checkpoint import with_shape
from llama_ssp.models.formats.coded import Coded, taken
from llama_ssp.models.layout import rows_of
from llama_ssp.models.model_config import ALLOWED, ANOTHER
from llama_ssp.models.own_sampling import GGUF_KEYS
from llama_ssp.models.safetensors_io import COMPUTED
from llama_ssp.models.shape import Shape, reason_against, shape_of
from llama_ssp.models.sharding import Cut
from llama_ssp.models.sizes import HEADS, Checkpoint
from llama_ssp.models.tensor_row import Part

log = logging.getLogger(__name__)
FORMATS = {
    torch.float64: Dtype.fp64,
    torch.float32: Dtype.fp32,
    torch.bfloat16: Dtype.bf16,
    torch.float16: Dtype.fp16,
}
OF_LIBRARIES = ("torch", "transformers")  # whose classes the decoder knows
FUSED = (Part.qkv, Part.up, Part.shared_up)


@dataclass(frozen=True, eq=False, kw_only=True)
class GivenModel:
    """A loaded model. `against` says why the module runs it; it is empty where the decoder does.

    `ends` are the ids that end a text, and `shared` the bytes of weights that are not taken anew: all where
    the module runs, else those that the decoder does not copy.
    """

    module: Any
    conf: ModelConf
    device: torch.device
    against: str
    ends: frozenset[int]
    shared: int


class ModuleSource:
    """The tensors of a module by name. What is not cut is the module's own memory."""

    def __init__(self, module: Any, known: Mapping[str, tuple[int, ...]]) -> None:
        tensors = module.state_dict()
        self._tensors: dict[str, Tensor] = {name: tensors[name] for name in known if name in tensors}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, cut: Cut | None) -> Tensor | Coded:
        tensor = self._tensors[name].detach()
        return tensor if cut is None else taken(tensor, cut)


def is_module(model: object) -> bool:
    """Returns whether this is a module of torch."""
    return isinstance(model, torch.nn.Module)


def given_model(model: Any, role: str) -> GivenModel:
    """Returns what is known of a model that a script has loaded. Raises RunError for one that cannot run."""
    module = _without_wrapper(model, role)
    where = f"{role} {type(module).__name__}"
    device = _device_of(module, where)
    config = module.config
    _require_causal(config, where)
    require_attention(config)
    held = _format_of(module, where)

    against = _reason_against(module, config)
    if against:
        _require_masks(module, config, where)
    content = _content(config)
    tensors = {
        name: (str(tensor.dtype), tuple(tensor.shape))
        for name, tensor in module.state_dict().items()
        if not (content.get("tie_word_embeddings") and name.startswith(HEADS))
    }
    name = Path(str(getattr(config, "name_or_path", "") or type(module).__name__)).name
    conf = ModelConf(name=name, weights=Weights.loaded, dtype=held, sampling=_sampling(module))
    conf = with_shape(conf, Checkpoint(path=Path(name), config=content, tensors=tensors), role)
    conf = replace(conf, tied=bool(content.get("tie_word_embeddings")))

    by = f"by transformers' module ({against})" if against else "on the decoder, from its tensors"
    log.info("%s: loaded by the script, %s on %s, runs %s", where, held.value, device, by)
    return GivenModel(
        module=module,
        conf=conf,
        device=device,
        against=against,
        ends=_ends(module),
        shared=_shared_bytes(module, None if against else config),
    )


def _without_wrapper(model: Any, role: str) -> Any:
    """Returns transformers' module, of a model of peft the one inside, with the adapter's layers in it.

    Raises UsageError or ModelError for another kind of module.
    """
    from transformers import PreTrainedModel

    kind = type(model)
    where = f"{role} {kind.__name__}"
    if kind.__module__.partition(".")[0] == "peft":
        if any(getattr(one, "is_prompt_learning", False) for one in model.peft_config.values()):
            raise ModelError(
                "an adapter that puts tokens before the prompt cannot run here",
                where=where,
                allowed="LoRA, and others that change layers",
                fix="use another adapter",
            )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"{role} is a module that is no model of transformers",
            found=f"{kind.__module__}.{kind.__name__}",
            allowed="what AutoModelForCausalLM.from_pretrained returns, also with an adapter of peft",
            fix="give that one; of a module of torch.compile the one inside",
        )
    if any(part.training for part in model.modules()):
        raise ModelError(
            "the model is in training mode: dropout would change its probabilities",
            where=where,
            fix="call model.eval() first",
        )
    return model


def _device_of(module: Any, where: str) -> torch.device:
    """Returns the device of all its weights. Raises ModelError where they are on several, or nowhere."""
    devices: set[torch.device] = {tensor.device for tensor in module.parameters()}
    if len(devices) == 1 and {device.type for device in devices} <= {"cpu", "cuda"}:
        return devices.pop()
    raise ModelError(
        "the model's weights are not on one device",
        where=where,
        found=", ".join(sorted(map(str, devices))) or "no weights",
        allowed="a CPU or a GPU; what accelerate spreads or offloads is loaded by name",
        fix="load it with device_map=None and move it, or give its folder with placement=layers",
    )


def _require_causal(config: Any, where: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            "the architecture is not a causal language model",
            where=where,
            found=config.model_type,
            allowed=ALLOWED,
            fix=ANOTHER,
        )


def _format_of(module: Any, where: str) -> Dtype:
    """Returns the number format of the embedding, which activations have."""
    dtype = module.get_input_embeddings().weight.dtype
    if dtype not in FORMATS:
        raise ModelError(
            "the model's numbers are of another format",
            where=where,
            found=str(dtype),
            allowed=", ".join(map(str, FORMATS)),
            fix="load it with dtype=torch.bfloat16",
        )
    return FORMATS[dtype]


def _reason_against(module: Any, config: Any) -> str:
    """Returns why the decoder cannot run the module from its tensors; empty if it can."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    against = reason_against(config)
    if against is not None:
        return against
    if type(module) is not MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None):
        return f"class {type(module).__name__}"
    for name, part in module.named_modules():
        kind = type(part)
        if kind.__module__.partition(".")[0] not in OF_LIBRARIES:
            return f"{name} is a {kind.__module__}.{kind.__name__}"
        hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
        own_hooks = [hook for hook in hooks if not _is_of_transformers(hook)]
        if own_hooks or "forward" in vars(part):
            return f"a hook of {name or 'the model'}"

    formats = {parameter.dtype for parameter in module.parameters()}
    if len(formats) > 1:
        return "weights of several formats"
    known = wanted(config)
    found = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    tied = bool(getattr(config, "tie_word_embeddings", False))
    for name in sorted(known.keys() | found.keys()):
        is_spare = name.endswith(COMPUTED) or (tied and name.startswith(HEADS))
        if known.get(name) != found.get(name) and not is_spare:
            return f"tensor {name}: {found.get(name, 'none')}, not {known.get(name, 'one')}"
    return ""


def _is_of_transformers(hook: Any) -> bool:
    """Returns whether transformers has set the hook, as it does to give hidden states."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "transformers"


def _require_masks(module: Any, config: Any, where: str) -> None:
    """Refuses a module whose attention does not take our masks (models/causal_lm.py)."""
    allowed = ("eager",) if attention_of(config) == "eager" else ("sdpa", "eager")
    found = getattr(module.config, "_attn_implementation", None)
    if found not in allowed:
        raise ModelError(
            "the model's attention takes no masks of a ragged batch",
            where=where,
            found=f"attn_implementation={found}",
            allowed=", ".join(allowed),
            fix=f"load it with attn_implementation={allowed[0]!r}",
        )


def _content(config: Any) -> dict[str, Any]:
    """Returns the config as config.json has it, by the names of other classes, too."""
    content: dict[str, Any] = config.to_dict()
    content |= {other: content[name] for other, name in config.attribute_map.items() if name in content}
    content.pop("quantization_config", None)  # the module has its layers already
    return content


def _sampling(module: Any) -> dict[str, float]:
    """Returns what its generation_config recommends."""
    said = getattr(module, "generation_config", None)
    values = said.to_diff_dict() if said is not None else {}
    return {name: values[name] for name in GGUF_KEYS if values.get(name) is not None}


def _ends(module: Any) -> frozenset[int]:
    for said in (getattr(module, "generation_config", None), module.config):
        named = getattr(said, "eos_token_id", None)
        if named is not None:
            return frozenset(named if isinstance(named, list) else [named])
    return frozenset()


def _shared_bytes(module: Any, config: Any | None) -> int:
    """Returns the bytes of tensors that are not copied: the decoder of this config copies what it fuses."""
    tensors = module.state_dict()
    fused = set[str]() if config is None else _fused(shape_of(config))
    kept = {tensor.data_ptr(): tensor.nbytes for name, tensor in tensors.items() if name not in fused}
    return sum(kept.values())


def _fused(shape: Shape) -> set[str]:
    """Returns the names of weights that the decoder joins to one."""
    names = set[str]()
    for part in FUSED:
        rows = rows_of(shape, part)
        if len(rows) > 1:
            names |= {shape.prefix(n) + row.weight for row in rows for n in row.blocks or ()}
    return names
