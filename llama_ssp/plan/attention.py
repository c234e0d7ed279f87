"""Attention in sizes: what transformers' modules, our cache and torch's kernels allocate, line by line."""

from __future__ import annotations

from llama_ssp.plan.tape import Block
from llama_ssp.plan.walk import FP32, Walk
from llama_ssp.plan.weights import LAYER_NORM

EAGER = ("gemma2", "gpt_neo")  # attention by plain products (load.causal.attention_of)
FUSED = ("gpt_neox", "phi3")  # queries, keys and values of one product
# torch's FlashAttentionKernel.cpp: from this many queries on, so many queries and keys are taken at a time.
CPU_TILES = ((768, 256, 512), (192, 64, 512), (0, 32, 512))

GPU_ALIGNMENT = 16  # of a mask's rows in torch's memory-efficient attention


def attend(walk: Walk, x: Block, last: bool) -> tuple[Block, Block | None]:
    """LlamaAttention.forward and its like: the output, and the weights where they are at hand"""
    query, key, value = _projected(walk, x)
    _stored(walk, last)
    _fused_product = value if walk.p.family in FUSED else None  # a local of theirs
    del key, value
    attended, weights = _eager(walk, query) if walk.p.family in EAGER else (_fused(walk, query), None)
    return walk.summed(attended, walk.p.query_width, biased=walk.p.family in LAYER_NORM), weights


def _projected(walk: Walk, x: Block) -> tuple[Block, Block | None, Block | None]:
    """Queries, keys and values, rotated where positions are."""
    t, w, part = walk.t, walk.w, walk.p
    queries, keys = walk.tokens * part.query_width, walk.tokens * part.key_width
    if part.family in FUSED:
        fused = walk.linear(x, part.dim, part.query_width + 2 * part.key_width)
        query, key = _rotated(walk, fused, queries, part.queries), _rotated(walk, fused, keys, part.kvs)
        return query, key, fused
    query = walk.linear(x, part.dim, part.query_width)
    if part.family == "opt":
        query = t(queries, w, query)
    if part.family == "qwen3":
        query = walk.rms_norm(query, walk.tokens * part.queries, part.head_dim)
    key = walk.linear(x, part.dim, part.key_width)
    if part.family == "qwen3":
        key = walk.rms_norm(key, walk.tokens * part.kvs, part.head_dim)
    value = walk.linear(x, part.dim, part.key_width)
    if part.family not in ("opt", "gpt_neo"):
        rotated = _rotated(walk, query, queries, part.queries), _rotated(walk, key, keys, part.kvs)
        query, key = rotated
        del rotated
    return query, key, value


def _rotated(walk: Walk, x: Block, size: int, heads: int) -> Block:
    """apply_rotary_pos_emb, for queries or for keys"""
    t, w, part = walk.t, walk.w, walk.p
    turned = walk.tokens * heads * part.rotary_width
    straight = t(turned, w, x)
    result = t(turned, w, straight, t(turned, w, t(turned, w, t(turned // 2, w, x))))
    del straight
    return t(size, w, result) if part.family in FUSED else result


def _stored(walk: Walk, last: bool) -> None:
    """cache.RaggedCache.update; a CPU scatters 16 bit through a copy of the layer's cache in fp32."""
    walk.passes.store(last)
    if walk.kernels.threads and walk.w < FP32:
        for _ in "kv":
            walk.t(walk.passes.cells, FP32)


def _fused(walk: Walk, query: Block) -> Block:
    """sdpa_attention_forward; a mask keeps torch from grouping the queries of a key"""
    t, w, part = walk.t, walk.w, walk.p
    repeated = walk.rows * part.query_width * walk.span
    grouped, one = part.queries > part.kvs, walk.columns == 1
    packed = grouped and one and walk.kernels.packs
    # One key head for all queries is only looked at repeatedly.
    copies = (t(repeated, w), t(repeated, w)) if grouped and part.kvs > 1 and not packed else ()
    out = _kernel(walk, query, packed)
    if part.family in FUSED and not one:  # their queries, and so the output, lie head by head
        out = t(walk.tokens * part.query_width, w, out)
    del copies
    return out


def _kernel(walk: Walk, query: Block, packed: bool) -> Block:
    t, w, part = walk.t, walk.w, walk.p
    bias = t(walk.tokens * walk.span, w)
    padded = None
    if not walk.kernels.cpu and walk.span % GPU_ALIGNMENT:  # so does torch's pad_bias
        padded = t(walk.tokens * (walk.span // GPU_ALIGNMENT + 1) * GPU_ALIGNMENT, w)
    out = t(walk.tokens * part.query_width, w, query)
    accumulated = max(w, FP32)
    log_sums = t(walk.tokens * part.queries, accumulated)
    if walk.kernels.threads:
        queries = part.queries // part.kvs if packed else walk.columns
        some, others = next((q, k) for least, q, k in CPU_TILES if queries >= least)
        some, others = min(some, queries), min(others, walk.span)
        scores = t(walk.kernels.threads * some * (others + 2 + part.head_dim), accumulated)
        if w < FP32:
            reduced = t(walk.kernels.threads * some * others, w)
            del reduced
        del scores
    del bias, padded, log_sums
    return out


def _eager(walk: Walk, query: Block) -> tuple[Block, Block]:
    """gemma2's eager_attention_forward; GPTNeoSelfAttention._attn"""
    t, w, part = walk.t, walk.w, walk.p
    n = walk.rows * part.queries * walk.columns * walk.span
    repeated = walk.rows * part.query_width * walk.span
    copies: list[Block] = []
    if part.family == "gpt_neo":
        converted = w != FP32
        copies.append(t(1, FP32))  # what stands for "hidden"
        query = t.same(query, walk.tokens * part.query_width, FP32, converted)
        copies += [t(repeated, FP32)] if converted else []
        weights = t(n, FP32, _batched(walk, query, FP32))
        for _ in range(3):  # the table of slots, the mask, the softmax
            weights = t(n, FP32, weights)
        weights = t.same(weights, n, w, converted)
    else:
        if part.queries > part.kvs > 1:
            copies += [t(repeated, w), t(repeated, w)]
        weights = t(n, w, t(n, w, _batched(walk, query, w), _single(walk, repeated)))
        for _ in range(4):  # the cap's three steps, the mask
            weights = t(n, w, weights)
        wide = t(n, FP32, t.same(weights, n, FP32, w != FP32 and walk.kernels.cpu))
        weights = t.same(wide, n, w, w != FP32)
        del wide
    out = t(walk.tokens * part.query_width, w, weights, _single(walk, repeated))
    if walk.columns > 1:
        out = t(walk.tokens * part.query_width, w, out)
    return out, weights


def _batched(walk: Walk, query: Block, width: int) -> Block:
    """A batched product wants heads of several rows in one row of matrices."""
    copied = walk.rows > 1 and walk.columns > 1
    return walk.t.same(query, walk.tokens * walk.p.query_width, width, copied)


def _single(walk: Walk, repeated: int) -> Block | None:
    """So it does of the one key head that all queries look at, for as long as the product takes."""
    alone = walk.p.queries > walk.p.kvs == 1 and walk.rows > 1
    return walk.t(repeated, walk.w) if alone else None
