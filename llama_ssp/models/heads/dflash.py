"""A DFlash head: some blocks that read the last token and masks behind it, and give all drafts in one pass.

Keys and values of the positions before the last token are made of the target's hidden states alone. The
masks see these, the last token, and each other, also those behind them.

Suffixes of shapes as in decoder.py; X numbers of the target's hidden states, E the head's own vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from llama_ssp.models.attention import Pass, Rotary
from llama_ssp.models.decoder import Block, KeysValues, Norm, Turns


class DFlash(nn.Module):
    """The head's layers."""

    def __init__(
        self, embedding_VH: Tensor, fc: nn.Module, state_norm: Norm, norm: Norm, blocks: list[Block],
        rotary: Rotary, head: nn.Module,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = nn.Parameter(embedding_VH, requires_grad=False)
        self.fc, self.state_norm, self.norm, self.rotary, self.head = fc, state_norm, norm, rotary, head
        self.blocks, self.attentions = nn.ModuleList(blocks), [block.attention for block in blocks]

    def remember(self, state_TX: Tensor, feed: Pass, caches: list[KeysValues]) -> None:
        """Writes keys and values of these positions, of the target's hidden states."""
        g_TH, turns = self.state_norm(self.fc(state_TX)), self._turns(feed)
        for attention, cache in zip(self.attentions, caches, strict=True):
            attention.remember(g_TH, turns, cache, feed)

    def forward(self, token_T: Tensor, feed: Pass, caches: list[KeysValues]) -> Tensor:
        """Logits of the head's own tokens, (T, E). What the pass writes into the caches never counts."""
        x_TH, turns = self.embedding[token_T], self._turns(feed)
        for block, cache in zip(self.blocks, caches, strict=True):
            x_TH = block(x_TH, turns, cache, feed)
        found: Tensor = self.head(self.norm(x_TH))
        return found

    def _turns(self, feed: Pass) -> Turns:
        return {self.attentions[0].rotary or "": self.rotary(feed)}
