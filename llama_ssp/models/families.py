"""What this program knows of each tested architecture, beyond its config.json: one row each. No torch.

A row says how tensors are named, what decoder.py and the planner need, and what config.json leaves out. To
add a family, add a row here and a small configuration to tests/families.py. An architecture without a row
runs too, but in one process, without a plan, and after a trial (self_check.py).
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DeltaNames:
    """Names of the weights of a Gated DeltaNet layer in a block.

    `inputs` make queries, keys and values, gates of the output, and of each head beta and the decay. They are
    four matrices, or two, in which the parts stand head by head of the keys.
    """

    inputs: tuple[str, ...] = (
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
    )
    convolution: str = "linear_attn.conv1d"
    decay: str = "linear_attn.A_log"
    step: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm"
    output: str = "linear_attn.out_proj"

    @property
    def by_heads(self) -> tuple[str, ...]:
        """Returns the names of what has a part for each head of values."""
        return (*self.inputs, self.convolution, self.decay, self.step, self.output)


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of weights in a checkpoint, as decoder.py needs them; the defaults are Llama's.

    Those of a block follow `blocks` and its number. Experts have `{}` for their number, or one tensor.
    """

    embedding: str = "model.embed_tokens"
    positions: str = ""  # a learned table
    blocks: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    before_attention: str = "input_layernorm"  # norms; without a name there is none
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qk_norm: tuple[str, ...] = ()
    sinks: str = ""
    output: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # gate and up, both in one, or up alone
    down: str = "mlp.down_proj"
    activation: str = ""  # that has tensors of its own: xIELU
    router: str = ""
    correction: str = ""  # of the router's scores, where they decide which experts are chosen
    expert_up: tuple[str, ...] = ()
    expert_down: str = ""
    others: tuple[tuple[str, str], ...] = ()  # pairs: a name that another tool writes, and the one above
    shared_up: tuple[str, ...] = ()  # experts that all tokens go through, as one
    shared_down: str = ""
    shared_gate: str = ""  # of what these experts give, a number for each token
    delta: DeltaNames | None = None  # of layers with linear attention
    # Of blocks with a dense MLP and experts: norms of what the MLP gives, and of what experts take and give.
    after_dense: str = ""
    before_experts: str = ""
    after_experts: str = ""
    router_norm: str = ""  # the weight of the norm of what the router takes
    expert_scale: str = ""  # a factor for each expert, of its weight
    block_scale: str = ""  # a factor of what a block gives


QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
HUNYUAN_NORMS = ("self_attn.query_layernorm", "self_attn.key_layernorm")
LLAMA_NAMES = Names()
SANDWICHED = replace(
    LLAMA_NAMES,
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
APERTUS_NAMES = replace(
    LLAMA_NAMES,
    before_attention="attention_layernorm",
    before_mlp="feedforward_layernorm",
    qk_norm=QK_NORMS,
    up=("mlp.up_proj",),
    activation="mlp.act_fn",
)
GLM4_NAMES = replace(
    LLAMA_NAMES,
    after_attention="post_self_attn_layernorm",
    after_mlp="post_mlp_layernorm",
    up=("mlp.gate_up_proj",),
)
NEOX_NAMES = Names(
    embedding="gpt_neox.embed_in",
    blocks="gpt_neox.layers",
    norm="gpt_neox.final_layer_norm",
    qkv=("attention.query_key_value",),
    output="attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)
FALCON_NAMES = Names(
    embedding="transformer.word_embeddings",
    blocks="transformer.h",
    norm="transformer.ln_f",
    qkv=("self_attention.query_key_value",),
    output="self_attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)
GPT_NEO_NAMES = Names(
    embedding="transformer.wte",
    positions="transformer.wpe",
    blocks="transformer.h",
    norm="transformer.ln_f",
    before_attention="ln_1",
    before_mlp="ln_2",
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    output="attn.attention.out_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
)
OPT_NAMES = Names(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    blocks="model.decoder.layers",
    norm="model.decoder.final_layer_norm",
    before_attention="self_attn_layer_norm",
    before_mlp="final_layer_norm",
    output="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
)


def _falcon_norms(config: Any) -> tuple[str, str]:
    """Attention and MLP have one input, after one norm or a norm each; or the MLP follows attention."""
    if not config.parallel_attn:
        return "input_layernorm", "post_attention_layernorm"
    usual = 2 if config.new_decoder_architecture else 1
    both = (config.num_ln_in_parallel_attn or usual) == 2
    return ("ln_attn", "ln_mlp") if both else ("input_layernorm", "")


MIXTRAL_NAMES = Names(
    router="block_sparse_moe.gate",
    expert_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    expert_down="block_sparse_moe.experts.{}.w2",
    others=(
        ("mlp.gate", "block_sparse_moe.gate"),
        ("mlp.experts.{}.gate_proj", "block_sparse_moe.experts.{}.w1"),
        ("mlp.experts.{}.up_proj", "block_sparse_moe.experts.{}.w3"),
        ("mlp.experts.{}.down_proj", "block_sparse_moe.experts.{}.w2"),
    ),
)
QWEN_MOE_NAMES = Names(
    qk_norm=QK_NORMS,
    router="mlp.gate",
    expert_up=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    expert_down="mlp.experts.{}.down_proj",
)
GLM4_MOE_NAMES = replace(
    QWEN_MOE_NAMES,
    correction="mlp.gate.e_score_correction_bias",
    shared_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
)
QWEN_NEXT_NAMES = replace(
    QWEN_MOE_NAMES,
    shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
    delta=DeltaNames(inputs=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")),
)
# Text models that transformers saves with the names of the whole, whose text part they are.
IN_WHOLE = (
    ("language_model.embed_tokens", "embed_tokens"),
    ("language_model.layers", "layers"),
    ("language_model.norm", "norm"),
)
GEMMA4_NAMES = replace(
    SANDWICHED,
    qk_norm=QK_NORMS,
    router="router.proj",
    expert_up=("experts.{}.gate_proj", "experts.{}.up_proj"),
    expert_down="experts.{}.down_proj",
    after_dense="post_feedforward_layernorm_1",
    before_experts="pre_feedforward_layernorm_2",
    after_experts="post_feedforward_layernorm_2",
    router_norm="router.scale",
    expert_scale="router.per_expert_scale",
    block_scale="layer_scalar",
)
GPT_OSS_NAMES = Names(
    sinks="self_attn.sinks",
    router="mlp.router",
    expert_up=("mlp.experts.gate_up_proj",),
    expert_down="mlp.experts.down_proj",
)


@dataclass(frozen=True)
class Window:
    """A sliding window of attention, as config.json describes it."""

    key: str = "sliding_window"
    default: int | None = None  # where config.json does not say
    partial: bool = False  # some layers have it, the others see the whole text
    switched: bool = False  # only with use_sliding_window; a partial one from layer max_window_layers on


@dataclass(frozen=True, kw_only=True)
class Gguf:
    """What GGUF files of a family have, and lack."""

    architecture: str
    read_as: str = ""  # the family whose matrices the files have, where it is another one
    tiled: bool = False  # of linear attention first come the first values of all keys, then the second ones
    interleaved: bool = False  # rows of queries and keys have number i of a head next to number D/2 + i
    stripped: bool = False  # spaces behind special tokens are not text
    other_scale: int = 0  # Gemma: a model with this number of layers divides scores by sqrt(dim / heads)
    space_before: bool = True  # SentencePiece puts a space before a text, where the file does not say
    scored: bool = True  # SentencePiece's scores order its merges; else the tokens' places do


NOT_READ = Gguf(architecture="")


@dataclass(frozen=True, eq=False, kw_only=True)  # a row is one object, compared by identity
class Family:
    """One architecture; the defaults are Llama's."""

    biased: tuple[str, ...] = ()  # layers with a bias, where the config does not say
    bias_keys: tuple[str, str] = ("", "")  # of the config: whether attention's layers, the MLP's, have one
    unbiased_output: bool = False  # attention's output has none, whatever the config says of attention
    deepspeed: bool = False  # DeepSpeed is known to split it right; it cuts fused MLPs wrongly

    grouped: bool = True  # config.json has a number of KV heads and a head size
    multi_query: bool = False  # one KV head, and a norm less, where config.json does not say otherwise
    softcap: bool = False  # of scores and logits
    logit_cap: float | None = None  # of logits alone, in published models
    masks_inside: bool = False  # attention makes its own masks, from slot numbers, and fp32 scores
    window: Window | None = None

    layer_norm: bool = False  # norms have a weight and a bias; an RMS norm has a weight
    unbiased_norms: bool = False  # layer norms have no bias
    norm_offset: int = 0  # a norm multiplies by this plus its weight
    scaled_embedding: bool = False
    rotary: float = 1.0  # how much of a head is rotated
    rotary_pairs: bool = False  # number 2i of a head is turned with the next one, not with one half of all on
    position_rows: int | None = None  # of a learned table of positions, beyond the context; None: rotary
    rotary_kinds: int = 1  # tables of rotary positions, for kinds of layers
    mlp_key: str = "intermediate_size"  # of the MLP's width in config.json
    mlp_states: int = 3  # tensors of the MLP's width that exist at once: gate, activation, product
    tied: bool = False  # where config.json does not say
    context: int | None = None  # where config.json does not say
    rereads: bool = False  # a text that outgrows the first scale of positions is read anew (longrope)

    names: Names = LLAMA_NAMES
    fused_mlp: bool = False  # gate and up are one tensor on disk
    norm_names: Callable[[Any], tuple[str, str]] | None = None  # before attention and MLP, by the config
    qkv_by_group: bool = False  # fused: queries, key and value of the first KV head, then of the next
    parallel: tuple[str, ...] = ()  # keys of the config; if one is set, attention and MLP have one input
    in_parallel: bool = False  # attention and MLP have one input, whatever the config says
    full_heads: bool = False  # layers that see the whole text may have heads of other numbers and sizes
    values_key: str = ""  # of the config: in these layers keys, before their norm, are values
    normed_values: bool = False  # values have a norm without a weight
    whole_qk_norm: bool = False  # over all heads of a token at once
    norm_by_head: bool = False  # norms of queries and keys have weights of their own for each head
    norm_turned: bool = False  # norms of queries and keys come after the rotary positions
    qk_norm_key: str = ""  # of the config: whether queries and keys have norms, which names have; else none
    scale_key: str = ""  # of the config: scores are divided by its square root
    plain_scores: bool = False  # scores are not scaled
    multipliers: bool = False  # of the embedding, the scores, the residual stream and the logits
    logit_key: str = ""  # of the config: logits are multiplied by it
    growing_queries: bool = False  # queries are multiplied by a factor that grows with their position
    gated_attention: bool = False  # queries come with gates of what attention gives, head by head
    rotary_layers: str = ""  # key of the config that says which layers have rotary positions
    rotary_in_windows: bool = False  # of a model with a window, only layers with it have rotary positions
    fixed_alpha: bool = False  # rotary positions of type `dynamic` with an `alpha` have a fixed base
    normed_top: str | None = None  # of the config: experts' weights sum to one; None: always
    experts_key: str = ""  # of the config: whether there are experts, which names have; else there are
    expert_keys: tuple[str, str] = ("num_local_experts", "num_experts_per_tok")  # how many; how many a token
    dense_too: bool = False  # a block with experts has a dense MLP, too: both read its stream, and are added
    first_dense: str = ""  # key of the config: how many of the first layers have no experts; by default one
    shared_key: str = ""  # of the width of experts that all tokens go through, in place of their number
    unread: tuple[str, ...] = ()  # how names of tensors begin that are not read: multi-token prediction
    sigmoids: bool = False  # experts are chosen in groups, and weighed, by sigmoids of the router's logits
    clamped: bool = False  # experts interleave gate and up, clamp both, and weigh after the choice
    # Values of the config that decoder.py has; of a key with several it is a tuple, the usual one first.
    needs: Mapping[str, object] = field(default_factory=dict)
    gguf: Gguf = NOT_READ

    def biases(self, config: Mapping[str, Any]) -> tuple[bool | None, bool | None]:
        """What config.json says of attention's and the MLP's biases, where that is not as usual."""
        attention = self.names.qkv if self.unbiased_output else (*self.names.qkv, self.names.output)
        mlp = (*self.names.up, self.names.down)
        return self._said(config, 0, attention), self._said(config, 1, mlp)

    def _said(self, config: Mapping[str, Any], part: int, names: Iterable[str]) -> bool | None:
        key = self.bias_keys[part]
        said = config.get(key) if key else None
        usual = {name.rpartition(".")[2] in self.biased for name in names if name}
        return None if said is None or usual == {bool(said)} else bool(said)

    def lacking(self, value_of: Callable[[str, object], object]) -> str | None:
        """Returns what a config has that decoder.py lacks, as `key: found`; None if it lacks nothing.

        `value_of` gives the config's value of a key, or else the second argument.
        """
        for key, value in self.needs.items():
            known = value if isinstance(value, tuple) else (value,)
            found = value_of(key, known[0])
            if (found or None) not in [each or None for each in known]:  # null, false and 0 say the same
                return f"{key}: {found}"
        return None

    @property
    def needed(self) -> dict[str, object]:
        """Returns a value of each key of `needs` that decoder.py has."""
        return {key: value[0] if isinstance(value, tuple) else value for key, value in self.needs.items()}

    def has_experts(self, said: object) -> bool:
        """Returns whether layers have experts, by what the config says at the row's key."""
        return bool(self.names.router) and (not self.experts_key or bool(said))

    def qk_norm(self, said: bool | None) -> bool:
        """Returns whether queries and keys have norms, by what the config says at the row's key."""
        return bool(self.names.qk_norm) and (not self.qk_norm_key or bool(said))

    @property
    def gated(self) -> bool:
        """The MLP's first layer gives a gate, too."""
        return self.fused_mlp or len(self.names.up) == 2

    def masks(self, sliding_window: int | None) -> int:
        """How many masks a model with this window has: one for each kind of attention layer."""
        window = self.window
        has_both = window is not None and window.partial and (sliding_window or not window.switched)
        return 2 if has_both else 1


ATTENTION_BIAS = ("attention_bias", "")
BIASES = ("attention_bias", "mlp_bias")
QWEN_WINDOW = Window(default=4096, partial=True, switched=True)
QKV = ("q_proj", "k_proj", "v_proj")
PARALLEL_NAMES = replace(LLAMA_NAMES, before_mlp="")
MTP = ("mtp.",)
POST_NORMED = replace(SANDWICHED, before_attention="", before_mlp="", qk_norm=QK_NORMS)
FAMILIES = {
    "apertus": Family(
        bias_keys=ATTENTION_BIAS, mlp_states=9, names=APERTUS_NAMES,  # xIELU's steps are in fp32
        needs={"hidden_act": "xielu"},
    ),
    "cohere": Family(
        bias_keys=ATTENTION_BIAS, layer_norm=True, unbiased_norms=True, rotary_pairs=True, tied=True,
        names=replace(PARALLEL_NAMES, qk_norm=QK_NORMS), norm_by_head=True, qk_norm_key="use_qk_norm",
        in_parallel=True, logit_key="logit_scale",
    ),
    "cohere2": Family(
        bias_keys=ATTENTION_BIAS, window=Window(default=4096, partial=True), layer_norm=True,
        unbiased_norms=True, rotary_pairs=True, tied=True, names=PARALLEL_NAMES, in_parallel=True,
        logit_key="logit_scale", rotary_in_windows=True,
    ),
    "exaone4": Family(
        window=Window(default=4096, partial=True), names=POST_NORMED, rotary_in_windows=True,
    ),
    "falcon": Family(
        bias_keys=("bias", "bias"), grouped=False, multi_query=True, layer_norm=True,
        mlp_key="ffn_hidden_size", mlp_states=2, tied=True, context=2048, names=FALCON_NAMES,
        norm_names=_falcon_norms, qkv_by_group=True, parallel=("parallel_attn",), needs={"alibi": False},
    ),
    "gemma": Family(
        bias_keys=ATTENTION_BIAS, norm_offset=1, scaled_embedding=True, tied=True,
        needs={"use_bidirectional_attention": None},
    ),
    "gemma2": Family(
        bias_keys=ATTENTION_BIAS, deepspeed=True, softcap=True, window=Window(default=4096, partial=True),
        norm_offset=1, scaled_embedding=True, tied=True, names=SANDWICHED,
        scale_key="query_pre_attn_scalar",
        gguf=Gguf(architecture="gemma2", other_scale=46, space_before=False, scored=False),
    ),
    "gemma3_text": Family(
        bias_keys=ATTENTION_BIAS, window=Window(default=4096, partial=True),
        norm_offset=1, scaled_embedding=True, rotary_kinds=2, tied=True,
        names=replace(SANDWICHED, qk_norm=QK_NORMS), scale_key="query_pre_attn_scalar",
        gguf=Gguf(architecture="gemma3", other_scale=62, space_before=False, scored=False),
    ),
    # E models, with embeddings for each layer and layers that share keys, run by transformers' module.
    "gemma4_text": Family(
        bias_keys=ATTENTION_BIAS, logit_cap=30.0, window=Window(default=512, partial=True),
        scaled_embedding=True, rotary_kinds=2, tied=True, names=GEMMA4_NAMES, full_heads=True,
        values_key="attention_k_eq_v", normed_values=True, plain_scores=True,
        experts_key="enable_moe_block", expert_keys=("num_experts", "top_k_experts"), dense_too=True,
        needs={
            "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
            "use_bidirectional_attention": (None, "vision"),  # of a text each token sees those before it
        },
    ),
    "glm4": Family(
        biased=QKV, bias_keys=ATTENTION_BIAS, unbiased_output=True, rotary=0.5, rotary_pairs=True,
        mlp_states=4, fused_mlp=True, names=GLM4_NAMES,
    ),
    "glm4_moe": Family(
        bias_keys=ATTENTION_BIAS, unbiased_output=True, rotary=0.5, names=GLM4_MOE_NAMES,
        qk_norm_key="use_qk_norm", normed_top="norm_topk_prob", first_dense="first_k_dense_replace",
        sigmoids=True,
    ),
    "gpt_neo": Family(
        biased=("out_proj", "c_fc", "c_proj"), grouped=False, masks_inside=True,
        window=Window(key="window_size", default=256, partial=True), layer_norm=True, position_rows=0,
        mlp_states=5, tied=True,  # its GELU is made of several steps
        names=GPT_NEO_NAMES, plain_scores=True,
    ),
    "gpt_neox": Family(
        biased=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"), bias_keys=ATTENTION_BIAS,
        deepspeed=True, grouped=False, layer_norm=True, rotary=0.25, mlp_states=2, names=NEOX_NAMES,
        qkv_by_group=True, parallel=("use_parallel_residual",),
    ),
    "gpt_oss": Family(
        biased=(*QKV, "o_proj"), bias_keys=ATTENTION_BIAS, window=Window(default=128, partial=True),
        names=GPT_OSS_NAMES, clamped=True,
    ),
    "granite": Family(bias_keys=BIASES, multipliers=True),
    "hunyuan_v1_dense": Family(
        bias_keys=ATTENTION_BIAS, names=replace(LLAMA_NAMES, qk_norm=HUNYUAN_NORMS), norm_turned=True,
        fixed_alpha=True,
    ),
    # Mistral's GGUF files say llama, too.
    "llama": Family(bias_keys=BIASES, deepspeed=True, gguf=Gguf(architecture="llama", interleaved=True)),
    "ministral3": Family(window=Window(), growing_queries=True),
    "mistral": Family(deepspeed=True, window=Window(default=4096)),
    "mixtral": Family(window=Window(), names=MIXTRAL_NAMES),
    "olmo2": Family(bias_keys=ATTENTION_BIAS, whole_qk_norm=True, names=POST_NORMED),
    "olmo3": Family(
        bias_keys=ATTENTION_BIAS, window=Window(default=4096, partial=True), rotary_kinds=2,
        whole_qk_norm=True, names=POST_NORMED,
    ),
    "opt": Family(
        biased=(*QKV, "out_proj", "fc1", "fc2"), bias_keys=("enable_bias", "enable_bias"),
        deepspeed=True, grouped=False, layer_norm=True, position_rows=2, mlp_key="ffn_dim",
        mlp_states=2, tied=True, names=OPT_NAMES,
        needs=dict(
            do_layer_norm_before=True, _remove_final_layer_norm=False, layer_norm_elementwise_affine=True
        ),
    ),
    "phi3": Family(
        window=Window(), mlp_states=4, rereads=True, fused_mlp=True,
        names=replace(LLAMA_NAMES, qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
        gguf=Gguf(architecture="phi3", stripped=True),
    ),
    "qwen2": Family(biased=QKV, deepspeed=True, window=QWEN_WINDOW, gguf=Gguf(architecture="qwen2")),
    "qwen3": Family(
        bias_keys=ATTENTION_BIAS, deepspeed=True, window=QWEN_WINDOW,
        names=replace(LLAMA_NAMES, qk_norm=QK_NORMS), gguf=Gguf(architecture="qwen3"),
    ),
    "qwen3_5_moe_text": Family(
        bias_keys=ATTENTION_BIAS, norm_offset=1, rotary=0.25, mlp_key="moe_intermediate_size",
        names=replace(QWEN_NEXT_NAMES, delta=DeltaNames(), others=IN_WHOLE), gated_attention=True,
        shared_key="shared_expert_intermediate_size", unread=MTP,
        gguf=Gguf(architecture="qwen35moe", tiled=True),
    ),
    "qwen3_5_text": Family(
        bias_keys=ATTENTION_BIAS, norm_offset=1, rotary=0.25, gated_attention=True, unread=MTP,
        names=replace(LLAMA_NAMES, qk_norm=QK_NORMS, delta=DeltaNames(), others=IN_WHOLE),
        gguf=Gguf(architecture="qwen35", tiled=True),
    ),
    "qwen3_moe": Family(
        bias_keys=ATTENTION_BIAS, window=Window(default=4096, switched=True),
        names=QWEN_MOE_NAMES, normed_top="norm_topk_prob",
    ),
    "qwen3_next": Family(
        bias_keys=ATTENTION_BIAS, norm_offset=1, rotary=0.25, names=QWEN_NEXT_NAMES, gated_attention=True,
        normed_top="norm_topk_prob", shared_key="shared_expert_intermediate_size", unread=MTP,
        gguf=Gguf(architecture="qwen3next", read_as="qwen3_5_moe_text"),
    ),
    "seed_oss": Family(
        biased=QKV, bias_keys=BIASES, unbiased_output=True, needs={"attention_out_bias": False},
    ),
    "smollm3": Family(
        bias_keys=BIASES, window=Window(partial=True, switched=True), tied=True,
        rotary_layers="no_rope_layers",
    ),
}  # fmt: skip
UNKNOWN = Family()
# By the architecture of a GGUF file: what it has, and the family that it is read as.
GGUF_ROWS = {row.gguf.architecture: row.gguf for row in FAMILIES.values() if row.gguf.architecture}
GGUF_FAMILIES = {
    row.gguf.architecture: row.gguf.read_as or name for name, row in FAMILIES.items() if row.gguf.architecture
}

TESTED_FAMILIES = tuple(FAMILIES)
TESTED = ", ".join(FAMILIES)
DEEPSPEED_FAMILIES = tuple(name for name, family in FAMILIES.items() if family.deepspeed)

# A limit of architectures without a row: attention to some of the tokens alone, in a pass of more tokens than
# this key of the config says.
READ_TOGETHER_BEYOND = {"doge": "keep_window_size"}


# The key of how many layers for multi-token prediction come after the last one; they are not read.
MTP_LAYERS = "num_nextn_predict_layers"

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # keys of how many there are in a layer

# Kinds of layers: those that see the whole text, and those with a window.
FULL = "full_attention"
SLIDING = "sliding_attention"


def full_layers(layers: int, count: int) -> tuple[int, ...]:
    """Returns which of the layers see the whole text if `count` of them do: evenly, and the last one."""
    return tuple(n for n in range(layers) if (n + 1) * count // layers > n * count // layers)


def expert_layers(layers: int, dense: Collection[int], step: int) -> list[bool]:
    """Which layers have experts: every `step`-th, but not those of the list of dense ones."""
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]


def family_of(name: str) -> Family:
    """The row of transformers' `model_type`; Llama's defaults where there is none."""
    return FAMILIES.get(name, UNKNOWN)
