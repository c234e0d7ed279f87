"""A split draft: the first rank alone looks tokens up, and the others need not know which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.models.feed import Feed
from llama_ssp.models.interface import Model
from llama_ssp.models.loader import DRAFT, load
from tests.distributed.threads import ThreadRank, ranks_of, together
from tests.families import VOCAB, build

CPU = torch.device("cpu")
MODEL = ModelConf(name="small")
TOKENS = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(2))


def logits(model: Model, token_BW: Tensor) -> Tensor:
    feed = Feed((0,) * 2, (7, 4), 10, CPU)
    return model.logits(token_BW, feed, model.new_cache(2, 10), last_only=False)


@pytest.mark.parametrize(
    "family", ["llama-mha", "llama-tied", "gemma2", "opt", "gpt_neo", "gpt_neox", "qwen3"]
)
def test_others_compute_their_share_of_what_they_do_not_see(family: str, tmp_path: Path):
    build(family).save_pretrained(tmp_path)
    whole = logits(load(MODEL, tmp_path, Dtype.fp32, CPU, DRAFT), TOKENS)
    ranks = ranks_of(2)
    parts = [load(MODEL, tmp_path, Dtype.fp32, CPU, DRAFT, rank) for rank in ranks]
    rows = [part.decoder.embedding.weight.shape[0] for part in parts]
    assert rows == [VOCAB, 1]

    def one(rank: ThreadRank) -> Any:
        return logits(parts[rank.rank], TOKENS if rank.is_leader else torch.zeros_like(TOKENS))

    for found in together([lambda rank=rank: one(rank) for rank in ranks], ranks):
        assert (found - whole)[0].abs().max() <= 1e-5 * whole.abs().max()
        assert (found - whole)[1, :4].abs().max() <= 1e-5 * whole.abs().max()
