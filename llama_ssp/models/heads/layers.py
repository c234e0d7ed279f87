"""The layers of trained heads.

EAGLE-3 is one block that reads the target's hidden states and the next token's embedding. At position t it is
given g, which is made of the target's hidden states at t (`fused`), and token t+1; what it gives is the
logits of token t+2, and z. To draft further it takes z for the next position's g.

DFlash is some blocks that read the last token and masks behind it, and give all drafts in one pass. Keys and
values of the positions before the last token are made of the target's hidden states alone. The masks see
these, the last token, and each other, also those behind them.

A Gemma 4's assistant has usual blocks without keys and values: they read those that the target's last layer
with a window, and its last one without, have in the cache. At a text's last token it is given this token's
embedding and the target's state of the token before it; what it gives is the logits of the next token, and a
state that stands for the target's. For further drafts it takes these, and stays at the same place. Over ranks
each has those of its heads that read the keys which the rank has of the target, and columns of its MLPs.

Suffixes of shapes as in decoder.py; X numbers of the target's hidden states, E the head's own vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from llama_ssp.models.attention import Places, Rotary, rotate
from llama_ssp.models.decoder import Attention, Block, Mlp, Norm, Turns
from llama_ssp.models.heads.settings import Eagle3Settings
from llama_ssp.models.kv_cache import Caches, LayerCache
from llama_ssp.models.linear import Reduce, in_fp32


class Eagle3(nn.Module):
    """The layers of an EAGLE-3 head."""

    def __init__(
        self,
        *,
        settings: Eagle3Settings,
        embedding_VH: Tensor,
        fc: nn.Module,
        state_norms: list[Norm],
        norms: dict[str, Norm],
        attention: Attention,
        mlp: Mlp,
        rotary: Rotary,
        head: nn.Module,
    ) -> None:
        """`state_norms`: of all hidden states at once, or of each layer's, or none."""
        super().__init__()
        self.embedding = nn.Parameter(embedding_VH, requires_grad=False)
        self.fc = fc
        self.state_norms = nn.ModuleList(state_norms)
        self.norms = nn.ModuleDict(norms)  # of the token, of the states, before the MLP, before the head
        self.attention = attention
        self.mlp = mlp
        self.rotary = rotary
        self.head = head
        self.attentions = [attention]
        self.normed_residual = settings.norm_before_residual
        self.normed_output = settings.norm_output

    def fused(self, state_TX: Tensor) -> Tensor:
        """Returns g, (T, H), of the target's hidden states."""
        if self.state_norms:
            parts = state_TX.chunk(len(self.state_norms), -1)  # of one layer of the target each
            normed = [norm(part) for norm, part in zip(self.state_norms, parts, strict=True)]
            state_TX = torch.cat(normed, -1)
        g_TH: Tensor = self.fc(state_TX)
        return g_TH

    def forward(self, token_T: Tensor, g_TH: Tensor, places: Places, cache: LayerCache) -> Tensor:
        """Returns z, (T, H); keys and values are written into the cache."""
        norms = self.norms
        normed_TH = norms["states"](g_TH)
        token_TH = self.embedding[token_T.clamp(max=len(self.embedding) - 1)]
        both_T2H = torch.cat([norms["token"](token_TH), normed_TH], -1)  # what attention reads, (T, 2H)

        turns = {self.attention.rotary or "": self.rotary(places)}
        x_TH = normed_TH if self.normed_residual else g_TH
        x_TH = x_TH + self.attention(both_T2H, turns, cache, places)
        x_TH = x_TH + self.mlp(norms["before_mlp"](x_TH))
        z_TH: Tensor = norms["output"](x_TH) if self.normed_output else x_TH
        return z_TH

    def step(
        self, token_T: Tensor, g_TH: Tensor, last_R: Tensor, places: Places, cache: LayerCache
    ) -> tuple[Tensor, Tensor]:
        """Returns logits (R, E) and z (R, H) of the tokens at places `last_R`; writes the cache, too."""
        z_RH = self(token_T, g_TH, places, cache)[last_R]
        return self.logits(z_RH), z_RH

    def logits(self, z_RH: Tensor) -> Tensor:
        """Returns logits of the head's own tokens, (R, E)."""
        if not self.normed_output:
            z_RH = self.norms["output"](z_RH)
        return in_fp32(self.head, z_RH)


class DFlash(nn.Module):
    """The layers of a DFlash head."""

    def __init__(
        self,
        *,
        embedding_VH: Tensor,
        fc: nn.Module,
        norms: tuple[Norm, Norm],
        blocks: list[Block],
        rotary: Rotary,
        head: nn.Module,
    ) -> None:
        """`norms`: of the states, and before the head."""
        super().__init__()
        self.embedding = nn.Parameter(embedding_VH, requires_grad=False)
        self.fc = fc
        self.state_norm, self.norm = norms
        self.rotary = rotary
        self.head = head
        self.blocks = nn.ModuleList(blocks)
        self.attentions = [block.attention for block in blocks]

    def remember(self, state_TX: Tensor, places: Places, caches: Caches) -> None:
        """Writes keys and values of these positions, of the target's hidden states."""
        g_TH = self.state_norm(self.fc(state_TX))
        turns = self._turns(places)
        for attention, cache in zip(self.attentions, caches, strict=True):
            attention.remember(g_TH, turns, cache, places)

    def forward(self, token_T: Tensor, places: Places, caches: Caches) -> Tensor:
        """Returns logits of the head's own tokens, (T, E).

        What the pass writes into the caches never counts.
        """
        x_TH = self.embedding[token_T]
        turns = self._turns(places)
        for block, cache in zip(self.blocks, caches, strict=True):
            x_TH = block(x_TH, turns, cache, places)
        return in_fp32(self.head, self.norm(x_TH))

    def _turns(self, places: Places) -> Turns:
        return {self.attentions[0].rotary or "": self.rotary(places)}


class ReadingAttention(Attention):
    """Attention to keys and values that another model keeps: it makes queries alone."""

    def remember(
        self, x_TH: Tensor, turns: Turns, cache: LayerCache, places: Places
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the tokens' queries, (T, H, D), and no gates; writes nothing."""
        assert self.norms is not None and self.rotary is not None
        query_THD = self.norms(self.qkv(x_TH).unflatten(-1, (-1, self.head_dim)))
        return rotate(query_THD, turns[self.rotary]), None


class AssistantBlocks(nn.Module):
    """The blocks of a Gemma 4's assistant, with a rank's heads and columns.

    The first rank alone has tokens, and what the blocks are given: the others add zeros, and are given both.
    """

    def __init__(
        self,
        *,
        look_up: Callable[[Tensor], Tensor],
        blocks: list[Block],
        sources: list[int],
        rotaries: dict[str, Rotary],
        reduce: Reduce | None,
    ) -> None:
        """`look_up` embeds as the target does; `sources` says which of its blocks each one reads."""
        super().__init__()
        self.look_up = look_up
        self.blocks = nn.ModuleList(blocks)
        self.sources = sources
        self.rotaries = nn.ModuleDict(rotaries)
        self.reduce = reduce

    def embedded(self, token_R: Tensor) -> Tensor:
        """Returns the target's embeddings, (R, X)."""
        if self.reduce is not None:
            token_R = self.reduce(token_R)
        return self.look_up(token_R)

    def forward(self, x_RQ: Tensor, turned: Places, seen: Places, caches: Caches) -> Tensor:
        """Returns what the last block gives, (R, Q); see `Assistant.step`."""
        if self.reduce is not None:
            x_RQ = self.reduce(x_RQ)
        turns = {kind: rotary(turned) for kind, rotary in self.rotaries.items()}
        for block, source in zip(self.blocks, self.sources, strict=True):
            x_RQ = block(x_RQ, turns, caches[source], seen)
        return x_RQ


class Assistant(nn.Module):
    """The layers of a Gemma 4's assistant: Q numbers wide, for a target of X numbers."""

    group_V: Tensor | None

    def __init__(
        self,
        *,
        before: nn.Module,
        blocks: AssistantBlocks,
        norm: Norm,
        head: nn.Module,
        after: nn.Module,
        centroids: nn.Module | None,
        group_V: Tensor | None,
        chosen: int,
    ) -> None:
        """`group_V`: the group of each token; `chosen`: how many groups have tokens with logits."""
        super().__init__()
        self.before = before
        self.blocks = blocks
        self.norm = norm
        self.head = head
        self.after = after
        self.centroids = centroids
        self.chosen = chosen
        self.register_buffer("group_V", group_V, persistent=False)

    def step(
        self, token_R: Tensor, state_RX: Tensor, turned: Places, seen: Places, caches: Caches
    ) -> tuple[Tensor, Tensor]:
        """Returns logits (R, V) and the next state (R, X), of a token and the state before it.

        Queries are turned to the places `turned`, and see the target's keys up to those of `seen`.
        """
        both = torch.cat([self.blocks.embedded(token_R).to(state_RX.dtype), state_RX], -1)
        x_RQ = self.before(both).to(torch.promote_types(state_RX.dtype, torch.float32))
        z_RQ = self.norm(self.blocks(x_RQ, turned, seen, caches))
        return self.logits(z_RQ), self.after(z_RQ)

    def logits(self, z_RQ: Tensor) -> Tensor:
        """Returns logits, (R, V); of tokens whose groups are not chosen 1 below the least of the others."""
        logit_RV = in_fp32(self.head, z_RQ)
        if self.centroids is None or self.group_V is None:
            return logit_RV
        fit_RC = self.centroids(z_RQ)
        is_chosen_RC = torch.zeros_like(fit_RC, dtype=torch.bool)
        is_chosen_RC.scatter_(1, fit_RC.topk(self.chosen, -1).indices, True)
        is_chosen_RV = is_chosen_RC[:, self.group_V]
        least_R1 = logit_RV.masked_fill(~is_chosen_RV, torch.inf).amin(-1, keepdim=True)
        return torch.where(is_chosen_RV, logit_RV, least_R1 - 1)
