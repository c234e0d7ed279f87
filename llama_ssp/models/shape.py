"""What decoder.py needs to know of one model: numbers, from its config and its family's row. No torch."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from llama_ssp.models.families import EXPERTS, FAMILIES, SLIDING, Family, expert_layers
from llama_ssp.models.layout_sizes import BLOCK_NORMS, BlockHeads, DeltaSizes, Sizes
from llama_ssp.models.sizes import GLOBAL_HEAD_DIM, LINEAR, SCALED_FROM, full_places

ALL = "all"  # the kind of rotary positions where there is one
LOCAL = (SLIDING, "local")  # kinds of layers with a window
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
ACTIVATIONS = ("hidden_activation", "activation_function", "activation", "hidden_act")
SCALED_AT_RUN_TIME = ("dynamic",)  # kinds of rotary positions that follow the longest text of a pass
FIXED_ALPHA = "fixed alpha"  # with d numbers a head, the base is theta * alpha^(d / (d - 2))
PROPORTIONAL = "proportional"  # turns number i of a head with number D/2 + i, most of them by an angle of 0


@dataclass(frozen=True)
class Growth:
    """How queries grow with their position p: by the factor 1 + beta log(1 + floor(p / length))."""

    beta: float
    length: int


@dataclass(frozen=True)
class Groups:
    """How experts are chosen in groups, and weighed: see `Routing`."""

    count: int
    chosen: int  # groups for each token
    scale: float  # of the weights


@dataclass(frozen=True)
class BlockShape:
    """What may differ from block to block."""

    window: int | None  # how many positions a query sees, its own included; None: all before it
    rotary: str | None  # a key of the decoder's rotary tables; None: no rotary positions
    experts: bool
    linear: bool = False  # attention is linear, and keeps a state
    full: bool = False  # its heads are those of `Sizes.full`


@dataclass(frozen=True, kw_only=True)
class Shape(Sizes):
    """One model's sizes and constants."""

    epsilon: float
    activation: str
    blocks: tuple[BlockShape, ...]
    scale: float  # of attention scores
    growth: Growth | None  # of queries
    softcap: float | None  # of attention scores
    logit_softcap: float | None
    embedding_scale: float
    residual_scale: float
    logit_divisor: float
    parallel: bool
    top_k: int
    normed_top: bool
    groups: Groups | None  # of experts
    gate_alpha: float  # of clamped experts
    gate_limit: float


def reason_against(config: Any) -> str | None:
    """Returns why decoder.py cannot run the model, as `key: found`; None if it can."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        return f"model_type: {config.model_type}"
    if lacking := family.lacking(partial(getattr, config)):
        return lacking
    if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        return f"word_embed_proj_dim: {config.word_embed_proj_dim}"
    kinds = {rotary_kind(parameters, family) for parameters in rotary_parameters(config).values()}
    at_run_time = kinds.intersection(SCALED_AT_RUN_TIME)
    if at_run_time:
        return f"rope_type: {at_run_time.pop()}"
    if family.names.delta is not None and config.linear_num_value_heads % config.linear_num_key_heads:
        return f"linear_num_value_heads: {config.linear_num_value_heads}"
    return None


def shape_of(config: Any) -> Shape:
    """Returns the shape of a model for which `reason_against` finds nothing."""
    family = FAMILIES[config.model_type]
    n_heads = int(config.num_attention_heads)
    usual = layer_config(config, family, full=False)
    head_dim = int(getattr(usual, "head_dim", None) or config.hidden_size // n_heads)
    experts = 0
    if family.has_experts(_said(config, family.experts_key)):
        experts = int(_first(config, EXPERTS) or 0)
    ffn = int(getattr(config, family.mlp_key) or 4 * config.hidden_size)
    linear = _linear_blocks(config, family)

    embedding_scale = 1.0
    residual_scale = 1.0
    logit_divisor = 1.0
    if family.multipliers:
        embedding_scale = float(config.embedding_multiplier)
        residual_scale = float(config.residual_multiplier)
        logit_divisor = float(config.logits_scaling)
    elif family.scaled_embedding:
        embedding_scale = config.hidden_size**0.5
    if family.logit_key:
        logit_divisor = 1 / float(getattr(config, family.logit_key))

    softcap = None
    if family.softcap:
        softcap = getattr(config, "attn_logit_softcapping", None)

    gate_alpha = 0.0
    gate_limit = 0.0
    if family.clamped:  # gpt-oss; transformers 5.17 has these numbers in its code, and not in the config
        gate_alpha = float(getattr(config, "swiglu_alpha", 1.702))
        gate_limit = float(getattr(config, "swiglu_limit", 7.0))

    groups = None
    if family.sigmoids:
        groups = Groups(
            count=int(config.n_group),
            chosen=int(config.topk_group),
            scale=float(config.routed_scaling_factor),
        )

    expert_ffn = int(getattr(config, "moe_intermediate_size", None) or ffn)
    shared_ffn = 0
    if family.shared_key:
        shared_ffn = int(getattr(config, family.shared_key))
    elif family.names.shared_down:
        shared_ffn = expert_ffn * int(config.n_shared_experts)
    n_kv = _kv_heads(usual, family, n_heads)
    full = _full_heads(config, family, (n_kv, head_dim))
    in_full = () if full is None else full.blocks
    blocks = _blocks(config, family, has_experts=bool(experts), linear=linear, full=in_full)
    position_rows = 0
    if family.position_rows is not None:
        position_rows = int(config.max_position_embeddings) + family.position_rows

    return Shape(
        family=family,
        dim=int(config.hidden_size),
        vocab=int(config.vocab_size),
        n_layers=len(blocks),
        n_heads=n_heads,
        n_kv=n_kv,
        head_dim=head_dim,
        ffn=ffn,
        expert_ffn=expert_ffn,
        shared_ffn=shared_ffn,
        epsilon=float(_first(config, EPSILONS) or 1e-5),
        activation=str(_first(config, ACTIVATIONS)),
        sparse=tuple(number for number, block in enumerate(blocks) if block.experts),
        position_rows=position_rows,
        norms=_norms(config, family),
        qk_norm=family.qk_norm(_said(config, family.qk_norm_key)),
        attention_bias=_said(config, family.bias_keys[0]),
        mlp_bias=_said(config, family.bias_keys[1]),
        full=full,
        blocks=blocks,
        scale=_score_scale(config, family, head_dim),
        growth=_growth(config, family),
        softcap=softcap,
        logit_softcap=_first(config, ("final_logit_softcapping",)),
        embedding_scale=embedding_scale,
        residual_scale=residual_scale,
        logit_divisor=logit_divisor,
        parallel=family.in_parallel or any(getattr(config, key) for key in family.parallel),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        experts=experts,
        top_k=int(getattr(config, family.expert_keys[1], 0) or 0),
        normed_top=family.normed_top is None or bool(getattr(config, family.normed_top)),
        groups=groups,
        gate_alpha=gate_alpha,
        gate_limit=gate_limit,
        delta=_delta_sizes(config) if linear else None,
        linear=linear,
    )


def rotary_parameters(config: Any) -> dict[str, dict[str, Any]]:
    """Returns the parameters of rotary positions by kind of layer; one kind, ALL, where all have the same."""
    content = getattr(config, "rope_parameters", None) or {}
    by_kind = {kind: parameters for kind, parameters in content.items() if isinstance(parameters, dict)}
    if by_kind or not content:
        return by_kind
    return {ALL: content}


def rotary_kind(parameters: dict[str, Any], family: Family) -> str:
    """Returns the type of rotary positions; FIXED_ALPHA where a base that does not change is meant."""
    kind = str(parameters.get("rope_type", "default"))
    return FIXED_ALPHA if family.fixed_alpha and kind == "dynamic" and parameters.get("alpha") else kind


def longrope_limit(config: Any) -> int | None:
    """Returns the length beyond which positions have a second scale (longrope); None where there is one."""
    scaled = [p for p in rotary_parameters(config).values() if p.get("rope_type") == "longrope"]
    return min((int(p[SCALED_FROM]) for p in scaled), default=None)


def _norms(config: Any, family: Family) -> tuple[str, ...]:
    """Returns the names of a block's norms by their place; an empty name where there is none."""
    names = {place: getattr(family.names, place) for place in BLOCK_NORMS}
    if family.norm_names is not None:
        before_attention, before_mlp = family.norm_names(config)
        names["before_attention"] = before_attention
        names["before_mlp"] = before_mlp
    return tuple(names.values())


def _said(config: Any, key: str) -> bool | None:
    """Returns what the config says at the key; None without a key or a value."""
    return bool(getattr(config, key)) if key and hasattr(config, key) else None


def _linear_blocks(config: Any, family: Family) -> tuple[int, ...]:
    """Returns the blocks whose attention is linear."""
    if family.names.delta is None:
        return ()
    return tuple(block for block, kind in enumerate(config.layer_types) if kind == LINEAR)


def _delta_sizes(config: Any) -> DeltaSizes:
    return DeltaSizes(
        key_heads=int(config.linear_num_key_heads),
        value_heads=int(config.linear_num_value_heads),
        key_dim=int(config.linear_key_head_dim),
        value_dim=int(config.linear_value_head_dim),
        kernel=int(config.linear_conv_kernel_dim),
    )


def _blocks(
    config: Any, family: Family, *, has_experts: bool, linear: tuple[int, ...], full: Collection[int]
) -> tuple[BlockShape, ...]:
    """Returns what each block has: a window, a table of rotary positions, experts."""
    count = int(config.num_hidden_layers)
    kinds = getattr(config, "attention_layers", None) or getattr(config, "layer_types", None)
    window: int | None = None
    by_kind = False  # some layers see the whole text
    if family.window is not None:
        window = getattr(config, family.window.key, None)
        by_kind = family.window.partial

    rotated = [True] * count
    if family.rotary_layers:
        rotated = getattr(config, family.rotary_layers)
    elif family.rotary_in_windows and window is not None:
        rotated = [kind in LOCAL for kind in kinds or ()]
    tables = rotary_parameters(config) if family.position_rows is None else {}

    dense = getattr(config, "mlp_only_layers", None)
    step = getattr(config, "decoder_sparse_step", None)
    if family.first_dense:
        dense = range(getattr(config, family.first_dense))
        step = 1
    sparse = expert_layers(count, dense or (), step or 1)

    blocks = []
    for layer in range(count):
        kind = kinds[layer] if kinds else ""
        table = None
        if tables and rotated[layer]:
            table = kind if kind in tables else next(iter(tables))
        blocks.append(
            BlockShape(
                window=window if not by_kind or kind in LOCAL else None,
                rotary=None if layer in linear else table,
                experts=has_experts and sparse[layer],
                linear=layer in linear,
                full=layer in full,
            )
        )
    return tuple(blocks)


def layer_config(config: Any, family: Family, full: bool) -> Any:
    """Returns the config of layers that see the whole text, or of others, where their heads may differ."""
    if not family.full_heads:
        return config
    places = full_places(config.layer_types, len(config.layer_types))
    if not full:
        others = [n for n in range(len(config.layer_types)) if n not in places]
        places = tuple(others) or places
    if hasattr(config, "per_layer_config"):
        return config.per_layer_config[places[0]]

    # transformers before 5.23
    kvs = config.num_key_value_heads
    head_dim = config.head_dim
    if full:
        head_dim = getattr(config, "global_head_dim", None) or GLOBAL_HEAD_DIM
        if getattr(config, family.values_key):
            kvs = getattr(config, "num_global_key_value_heads", None) or kvs
    return SimpleNamespace(num_key_value_heads=kvs, head_dim=head_dim)


def _full_heads(config: Any, family: Family, usual: tuple[int, int]) -> BlockHeads | None:
    """Returns the heads of layers that see the whole text; None where they are as others are."""
    if not family.full_heads:
        return None
    own = layer_config(config, family, full=True)
    heads = int(own.num_key_value_heads), int(own.head_dim)
    has_values = not getattr(config, family.values_key)
    if has_values and heads == usual:
        return None
    return BlockHeads(
        blocks=full_places(config.layer_types, len(config.layer_types)),
        n_kv=heads[0],
        head_dim=heads[1],
        has_values=has_values,
    )


def _kv_heads(config: Any, family: Family, n_heads: int) -> int:
    if not family.multi_query:
        return int(getattr(config, "num_key_value_heads", None) or n_heads)
    grouped = config.new_decoder_architecture or not config.multi_query
    return int(config.num_kv_heads) if grouped else 1


def _score_scale(config: Any, family: Family, head_dim: int) -> float:
    if family.multipliers:
        return float(config.attention_multiplier)
    if family.plain_scores:
        return 1.0
    divisor = float(head_dim)
    if family.scale_key:
        divisor = float(getattr(config, family.scale_key))
    return float(divisor**-0.5)


def _growth(config: Any, family: Family) -> Growth | None:
    """Returns how queries grow; None where they do not."""
    if not family.growing_queries:
        return None
    (parameters,) = rotary_parameters(config).values()
    beta = parameters.get("llama_4_scaling_beta")
    return Growth(beta=float(beta), length=int(parameters[SCALED_FROM])) if beta else None


def _first(config: Any, keys: tuple[str, ...]) -> Any:
    """The value of the first key that is not null, of those that the architecture has.

    A config.json may hold others; the config then has them too, but transformers' module ignores them.
    """
    known = (getattr(config, key) for key in keys if hasattr(type(config), key))
    return next((value for value in known if value is not None), None)
