"""n-gram drafts: the index says what a search of the whole text says, at every length of the text."""

import random
from collections import Counter
from unittest.mock import patch

import pytest
import torch

from llama_ssp.config import SamplingConfig
from llama_ssp.speculative.drafters.local import Sampler
from llama_ssp.speculative.drafters.ngram import Followers, NgramDrafter, NgramIndex
from llama_ssp.speculative.rng import CounterDraws
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt, State


def searched(text: list[int], count: int, shortest: int, longest: int) -> list[int]:
    """By definition: the most frequent follower of the longest earlier context, the latest of equals."""
    tail, drafts = list(text), list[int]()
    while len(drafts) < count:
        for size in range(min(longest, len(tail)), shortest - 1, -1):
            after = [text[i] for i in range(size, len(text)) if text[i - size : i] == tail[-size:]]
            if after:
                counts = Counter(after)
                most = [token for token in after if counts[token] == max(counts.values())]
                drafts.append(most[-1])
                break
        else:
            return drafts
        tail.append(drafts[-1])
    return drafts


def differing(draw: random.Random, shortest: int, longest: int) -> int:
    """How many of a growing text's look-ups differ from the search."""
    text = [draw.randrange(3) for _ in range(draw.randrange(4))]
    index, found = NgramIndex(text, shortest, longest), 0
    for _ in range(40):
        text += [draw.randrange(1 + draw.randrange(4)) for _ in range(draw.randrange(1, 4))]
        index.update()
        found += index.drafts(5) != searched(text, 5, shortest, longest)
    return found


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 4), (2, 3), (3, 8)])
def test_the_index_finds_what_a_search_finds(shortest: int, longest: int):
    for seed in range(10):
        assert differing(random.Random(seed), shortest, longest) == 0


def test_a_wrong_index_is_noticed():
    with patch.object(Followers, "add", lambda self, token: setattr(self, "best", token)):
        assert sum(differing(random.Random(seed), 1, 4) for seed in range(10))


def test_a_text_that_repeats_is_drafted_past_its_end():
    index = NgramIndex([5, 6, 7, 5, 6], 1, 4)
    index.update()
    assert index.drafts(6) == [7, 5, 6, 7, 5, 6]


def sampler(vocab: int) -> Sampler:
    return Sampler(SamplingTransform(SamplingConfig(), (), vocab), CounterDraws(0))


def test_rows_have_an_index_each():
    """A row that is refilled has a new one."""
    drafter, cpu = NgramDrafter(1, 4, sampler(9)), torch.device("cpu")
    state = State([Prompt("a", (1, 2, 1)), Prompt("b", (3, 4, 5, 3))], 20, cpu)
    proposal = drafter.propose(state, (2, 0))
    assert proposal.count == (2, 0) and proposal.drafted_BK[0].tolist() == [2, 1]
    state.append({0: [3]})
    proposal = drafter.propose(state, (1, 2))
    assert proposal.count == (0, 2) and proposal.drafted_BK[1].tolist() == [4, 5]
    state.replace(0, Prompt("c", (7, 8, 7)))
    proposal = drafter.propose(state, (2, 2))
    assert proposal.drafted_BK.tolist() == [[8, 7], [4, 5]]
    assert proposal.draft_BKV is not None and proposal.draft_BKV.max(-1).values.eq(1).all()


def test_a_token_beyond_the_vocabulary_is_not_drafted():
    """A model may have more rows than its tokenizer has tokens, and a prompt may name them."""
    state = State([Prompt("0", (1, 2, 7, 1, 2))], 10, torch.device("cpu"))
    proposal = NgramDrafter(1, 4, sampler(5)).propose(state, (3,))
    assert proposal.count == (0,)
