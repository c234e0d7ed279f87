"""The bound for what passes through a rank in a forward pass, beyond weights and caches. No torch.

A pass feeds T = rows x columns tokens, which attend to `span` slots of a cache, and gives logits of some of
them. With w bytes of an activation and f = max(w, 4), as sums and norms are in fp32, it needs at most

    T (states + the widest of norm, attention, MLP ...) + scratch              "activations"
    columns x span (masks of all rows, and the scores or the mask of one)      "masks"
    logits x vocabulary x f, two or three times                                "logits"

Where two orders of making and freeing tensors are possible, the larger sum is taken. Weights decide: of 65B
these three are less than a hundredth. What a rank makes of logits is in memory.py.
"""

from dataclasses import dataclass
from functools import lru_cache

from llama_ssp.config import OWN_CODES, Dtype
from llama_ssp.models.graph_sizes import ring_of
from llama_ssp.models.kernels.kernel_sizes import (
    DECODED,
    FEW_ROWS,
    MANY_ROWS,
    SLICE,
    attended_parts,
    parts_of,
)
from llama_ssp.models.tensor_row import EXPERTS
from llama_ssp.planner.storage import by_bitsandbytes, width
from llama_ssp.planner.weights import RolePart, weights
from llama_ssp.planner.workload import MIB

# Names of what passes through.
MASKS = "masks"
HIDDEN = "activations"
LOGITS = "logits"

INT = 8
FP32 = 4
MASK_ALIGNMENT = 16  # slots to which torch's memory-efficient attention pads a mask's rows
INTEGERS = 24  # int64 numbers a token: ids, positions, slots, and what they are made of
DELTA_CHUNK = 64  # tokens of a prompt that linear attention computes at once (models/delta.py)
DELTA_COPIES = 8
STATE_COPIES = 4
KERNEL_SCRATCH = 5 * MIB // 4  # a thread: tiles of a CPU's attention and matrix products

Parts = dict[str, int]  # bytes by name


@dataclass(frozen=True)
class Kernels:
    """A GPU's kernels, or a CPU's with this number of threads."""

    cpu: bool
    threads: int = 0


GPU = Kernels(cpu=False)


def activation(dtype: Dtype) -> int:
    """Returns f, the bytes of a number that is summed or normed in fp32."""
    return max(width(dtype), FP32)


def pass_bytes(
    role: RolePart, kernels: Kernels, *, rows: int, columns: int, span: int, logits: int, graph: bool = False
) -> Parts:
    """Bounds the bytes of one forward pass. A pass of a `graph` reads codes by kernels alone."""
    part = role.part
    tokens = rows * columns
    scratch = MIB + KERNEL_SCRATCH * kernels.threads + _attended_sums(role, kernels, tokens)
    scratch += _states_at_once(role, rows, columns)
    products = code_bytes(role, kernels, tokens)
    if not graph or decodes_experts(role, kernels):
        products = max(products, decoded_bytes(role, kernels, tokens))
    scratch += products

    # Masks of all rows for each kind of layer, and two that these are made of. Attention makes its own for
    # the queries of a group, one row after the other: the mask to add, twice, or scores in fp32, thrice.
    copies = max(heads.queries // heads.kvs for heads in part.heads)
    if attends_without_masks(role, kernels):
        cell = 0
    elif part.has_scores:
        scores = 3 * FP32 * max(heads.queries for heads in part.heads)
        cell = role.masks * rows + 2 + copies + scores
    else:
        cell = role.masks * rows + 2 + copies * (1 + 2 * width(role.dtype))
    positions = INT * (INTEGERS * tokens + 2 * span) + 2 * FP32 * tokens * max(part.rotary_widths)

    return {
        MASKS: columns * (span + MASK_ALIGNMENT) * cell + positions,
        HIDDEN: tokens * _token_bytes(role) + scratch,
        LOGITS: _logits(role, kernels, logits),
    }


@lru_cache(maxsize=4096)
def _token_bytes(role: RolePart) -> int:
    """Returns a token's states and the widest of norm, attention, linear attention and feed-forward."""
    return _states(role) + max(_norm(role), _attention(role), _feed_forward(role), _delta(role))


def _states(role: RolePart) -> int:
    """A token's states while a layer computes: its input and the sum, in fp32, and the outputs of norms."""
    part = role.part
    w = width(role.dtype)
    norms = max(part.norms, 2) + 1
    states = part.dim * (2 * activation(role.dtype) + norms * w)
    if part.head_inputs:  # a head has five of its own, and reads the target's, normed
        states += (5 * part.dim + 2 * part.head_inputs) * w
    return states


def _norm(role: RolePart) -> int:
    """A token's norm: the input in fp32, its square or product, and the output."""
    return role.part.dim * (2 * FP32 + width(role.dtype))


def _attention(role: RolePart) -> int:
    """A token's queries, keys and values, before and after they are turned; one row's again; the outputs."""
    part = role.part
    copies = 2 if part.sizes.qk_norm else 1
    normed = part.key_width if part.family.normed_values else 0
    turned = copies * (2 * part.query_width + 3 * part.key_width)
    if part.family.gated_attention:
        turned += 3 * part.query_width
    return width(role.dtype) * (turned + normed + 4 * part.query_width + part.dim)


def _delta(role: RolePart) -> int:
    """A token's inputs of the convolution and gates, and in fp32 what is made of them, a few times each."""
    part = role.part
    if not part.linear_layers:
        return 0
    wide = width(role.dtype, wide=True)
    inputs = 2 * part.channels + 2 * part.linear_heads
    return width(role.dtype) * (2 * inputs + 2 * part.dim) + wide * DELTA_COPIES * inputs


def _states_at_once(role: RolePart, rows: int, columns: int) -> int:
    """Bounds the states that exist at once, with what they are made of: of all tokens of a step.

    Of a prompt these are those of one row and of a chunk, and the last of them alone are made.
    """
    part = role.part
    delta = part.sizes.delta
    if delta is None:
        return 0
    tokens = min(columns, DELTA_CHUNK)
    states = min(columns, ring_of(role.rewinds), DELTA_CHUNK)
    if role.compiled and columns <= ring_of(role.rewinds):
        tokens = states = rows * columns
    heads = part.linear_heads
    pairs = 6 * heads * tokens * tokens  # what tokens are to each other
    keys = 3 * heads * states * tokens * delta.key_dim
    width_of_number = width(role.dtype, wide=True)
    return width_of_number * (pairs + keys + (STATE_COPIES * states + 2) * part.state_numbers)


def _feed_forward(role: RolePart) -> int:
    """A token's states in an MLP or in the experts that it chooses, and its output."""
    part = role.part
    w = width(role.dtype)
    inside = w * part.family.mlp_states * part.ffn
    if role.dtype is Dtype.int8 and not _is_own_int8(role):
        # LLM.int8: inputs in 8 bit with outliers, gate and up in int32, then in 16 bit.
        inside = max(inside, 6 * part.dim + 2 * (FP32 + 2 * w) * part.ffn)
    routed = 0
    if part.expert_layers:
        chosen = w * (4 * part.dim + 6 * part.expert_ffn) + 2 * FP32 + 3 * INT
        routed = part.experts * (FP32 + w) + part.experts_per_token * chosen
        if part.family.sigmoids:  # scores, corrected and masked, and groups'
            routed += 4 * part.experts * FP32
        if part.shared_ffn:
            routed += w * ((part.family.mlp_states + 1) * part.shared_ffn + 2 * part.dim)
        if part.family.dense_too:  # what the dense MLP gives, and what router and experts are given
            routed += 3 * w * part.dim
    return max(inside + w * (part.ffn + 2 * part.dim), routed)


def _is_own_int8(role: RolePart) -> bool:
    """Returns whether our kernels multiply 8 bit, and not bitsandbytes."""
    return role.dtype is Dtype.int8 and not by_bitsandbytes(role.dtype, role.store(cpu=False))


def _attended_sums(role: RolePart, kernels: Kernels, tokens: int) -> int:
    """Sums of the parts of contexts, in fp32: what a GPU's kernel of compiled steps keeps."""
    if kernels.cpu or not role.compiled:
        return 0
    return FP32 * max(
        attended_parts(tokens, heads.kvs) * (heads.query_width + 2 * heads.queries)
        for heads in role.part.heads
    )


def attends_without_masks(role: RolePart, kernels: Kernels) -> bool:
    """Returns whether a GPU attends by our kernel in prompts, too: then there is no matrix of scores."""
    return role.part.has_scores and role.compiled and not kernels.cpu


def decoded_bytes(role: RolePart, kernels: Kernels, tokens: int) -> int:
    """Codes that a product decodes: a layer's largest matrix, in 16 bit; of experts a few."""
    part = role.part
    is_coded = role.dtype in (Dtype.nf4, *OWN_CODES) or _is_own_int8(role)
    numbers = part.largest_matrix if is_coded else 0
    if decodes_experts(role, kernels):
        expert = 2 * part.expert_ffn * part.dim
        numbers = max(numbers, min(max(expert, DECODED), expert * tokens * part.experts_per_token))
    return width(role.dtype) * numbers


def code_bytes(role: RolePart, kernels: Kernels, tokens: int) -> int:
    """What a GPU's kernel for codes makes: of many tokens a decoded matrix, of fewer sums of its parts."""
    made = (Dtype.int8, Dtype.nf4) if role.compiled else ()
    if kernels.cpu or role.dtype not in (*OWN_CODES, *made) or tokens <= FEW_ROWS:
        return 0
    if tokens > MANY_ROWS:
        return width(role.dtype) * min(role.part.largest_matrix, DECODED)
    numbers = 0
    for weight in weights(role.part):
        parts = parts_of(weight.outputs, weight.inputs) if weight.linear else 1
        if parts > 1:
            numbers = max(numbers, parts * weight.outputs)
    return FP32 * tokens * numbers


def decodes_experts(role: RolePart, kernels: Kernels) -> bool:
    """Returns whether steps on a GPU decode chosen experts: the kernel does not read all their codes."""
    if kernels.cpu or role.dtype is not Dtype.packed:
        return False
    store = role.store(cpu=False)
    experts = [each for each in weights(role.part, packed=True) if each.group == EXPERTS and each.linear]
    return not all(store.reads(each.kept(Dtype.packed), each.inputs) for each in experts)


def _logits(role: RolePart, kernels: Kernels, count: int) -> int:
    """Logits of `count` positions, and a copy; thrice if capped, gathered from ranks, or a head's.

    A CPU multiplies 16 bit in parts, with a slice of the matrix in fp32.
    """
    part = role.part
    is_capped = part.family.softcap or part.family.logit_cap is not None
    copies = 3 if is_capped or part.world > 1 or part.head_inputs else 2
    bytes_ = count * copies * part.whole_vocab * activation(role.dtype)
    if kernels.cpu and width(role.dtype) < FP32:
        bytes_ += FP32 * (count * part.vocab + max(SLICE, part.dim))
    return bytes_
