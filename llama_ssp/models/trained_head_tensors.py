"""The tensors of trained heads: rows of EAGLE-3, DFlash and Gemma 4's assistants. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llama_ssp.models.block_tensors import attention_rows, block_norm_rows, mlp_rows, norm_row
from llama_ssp.models.layout_sizes import HeadSizes, Sizes
from llama_ssp.models.tensor_row import EMBEDDING, HEAD, LAYERS, Part, Split, TensorRow


def trained_head_rows(sizes: Sizes) -> Iterator[TensorRow]:
    """Yields the rows of a trained head: EAGLE-3, DFlash, or an assistant of Gemma 4.

    EAGLE-3 has one block, which reads a token's embedding and the target's states.
    DFlash has usual blocks.
    """
    head = sizes.trained_head
    assert head is not None
    if head.shares_cache:
        yield from _assistant(sizes, head)
        return

    if head.embeds:
        yield TensorRow(
            part=Part.embedding,
            group=EMBEDDING,
            weight="embed_tokens.weight",
            outputs=sizes.vocab,
            inputs=sizes.dim,
            split=Split.tokens,
        )
    if head.heads:
        yield TensorRow(
            part=Part.head,
            group=HEAD,
            weight="lm_head.weight",
            outputs=head.vocab,
            inputs=sizes.dim,
            split=Split.vocabulary,
        )
    yield TensorRow(
        part=Part.states,
        group=LAYERS,
        weight="fc.weight",
        outputs=sizes.dim,
        inputs=head.inputs,
    )

    every = tuple(range(sizes.n_layers))
    if head.has_block:
        yield norm_row(sizes, Part.state_norm, "hidden_norm")
        yield from block_norm_rows(sizes)
        yield from attention_rows(sizes)
    else:
        for name, size in head.state_norms:
            yield norm_row(sizes, Part.state_norm, name, size=size)
        yield norm_row(sizes, Part.before_attention, "input_layernorm", blocks=every)
        yield norm_row(sizes, Part.before_attention, "hidden_norm", blocks=every)
        yield norm_row(sizes, Part.before_mlp, "post_attention_layernorm", blocks=every)
        yield from attention_rows(sizes, inputs=2 * sizes.dim)
    yield from mlp_rows(sizes)
    yield norm_row(sizes, Part.norm, "norm")


def _assistant(sizes: Sizes, head: HeadSizes) -> Iterator[TensorRow]:
    """Yields the rows of an assistant: usual blocks without keys and values, which ranks divide.

    The first rank alone has what comes before and after the blocks.
    """
    yield TensorRow(
        part=Part.head,
        group=HEAD,
        weight=f"{sizes.family.names.embedding}.weight",
        outputs=head.vocab,
        inputs=sizes.dim,
        split=Split.first,
    )
    before = TensorRow(
        part=Part.states,
        group=LAYERS,
        weight="pre_projection.weight",
        outputs=sizes.dim,
        inputs=2 * head.inputs,
        split=Split.first,
    )
    yield before
    yield replace(
        before,
        part=Part.back,
        weight="post_projection.weight",
        outputs=head.inputs,
        inputs=sizes.dim,
    )
    if head.centroids:
        yield replace(
            before,
            part=Part.centroids,
            weight="masked_embedding.centroids.weight",
            outputs=head.centroids,
            inputs=sizes.dim,
        )
    yield from block_norm_rows(sizes)
    for row in attention_rows(sizes):  # keys and values are the target's
        if row.part in (Part.query_norm, Part.output) or row.split is Split.queries:
            yield row
    yield from mlp_rows(sizes)
    yield replace(norm_row(sizes, Part.norm, sizes.family.names.norm), split=Split.first)
