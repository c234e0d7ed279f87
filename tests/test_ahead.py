"""A draft that runs ahead on a GPU, where a forward is only launched, is interrupted within a forward.

Emulated: what the models compute is computed at once, but it counts as done when a thread, which takes one
forward after the other, has done with it. To read a token is to wait for that.
"""

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.config import Overlap, SamplingConfig
from llama_ssp.distributed.comm import ALONE
from llama_ssp.speculative.drafters.ahead import TRY_EVERY, AheadDrafter
from llama_ssp.speculative.drafters.local import Sampler
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt, State
from tests.proofs.toy import toy

VOCAB, K = 5, 6
FORWARD_S = 0.002  # the host launches all forwards of a round in less


class Gpu:
    """Does one launched forward after the other. `due` is the one with whose end the next request comes."""

    def __init__(self) -> None:
        self.launched = 0
        self.done = 0
        self.late = 0  # forwards that began after the request
        self.due = 0
        self._forwards: queue.Queue[threading.Event] = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def launch(self) -> threading.Event:
        end = threading.Event()
        self.launched += 1
        self._forwards.put(end)
        return end

    def _work(self) -> None:
        while True:
            end = self._forwards.get()
            self.late += self.done >= self.due
            time.sleep(FORWARD_S)
            self.done += 1
            end.set()


class Later(Tensor):
    """A tensor of the GPU: it, and what is computed with it, can be read when its forward has ended."""

    end: threading.Event

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ends = [each.end for each in torch.utils._pytree.tree_leaves(args) if hasattr(each, "end")]
        if function in (Tensor.tolist, Tensor.cpu, Tensor.item, Tensor.__int__):
            for end in ends:
                assert end.wait(10.0)
        result = super().__torch_function__(function, types, args, kwargs or {})
        if ends and isinstance(result, Later):
            result.end = ends[-1]
        return result


class LaunchingRunner(ModelRunner):
    """Its logits are of a forward that was launched."""

    gpu: Gpu

    def logits(self, token_BS: Tensor, ends: list[int], wanted: list[int]) -> Tensor:
        logit_BWV: Any = super().logits(token_BS.as_subclass(Tensor), ends, wanted).as_subclass(Later)
        logit_BWV.end = self.gpu.launch()
        return logit_BWV


class Line:
    """In place of the link to the leader: the request comes with the end of a forward."""

    waited_s = 0.0

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def has_request(self) -> bool:
        return self._gpu.done >= self._gpu.due

    def has_replied(self, tags: list[int]) -> bool:
        return False

    def send_reply(self, values: list[int], payload: Tensor) -> None:
        pass


def drafter_of(overlap: Overlap) -> tuple[AheadDrafter, State, Gpu]:
    runner, gpu = LaunchingRunner(toy(VOCAB, 1, context=2000)), Gpu()
    runner.gpu = gpu
    sampler = Sampler(SamplingTransform(SamplingConfig(), (), VOCAB), CounterDraws(0))
    drafter = AheadDrafter(runner, sampler, ALONE, Line(gpu), overlap)  # type: ignore[arg-type]
    state = State([Prompt("0", (1, 0))], 1000, torch.device("cpu"))
    drafter.start(1, state.capacity)
    drafter.prefill(state)
    return drafter, state, gpu


def play(drafter: AheadDrafter, state: State, gpu: Gpu, forwards: int) -> SimpleNamespace:
    """One round, in which the request comes after so many forwards ahead, and every guess is wrong."""
    gpu.due = gpu.launched + 10 * K  # none comes while this one is answered
    proposal = drafter.propose(state, (K,))
    before = SimpleNamespace(launched=gpu.launched, late=gpu.late)
    gpu.due = gpu.launched + forwards
    drafter.meanwhile(state, proposal)
    wrong = (int(proposal.drafted_BK[0, 0]) + 1) % VOCAB
    state.append({0: [wrong]})
    drafter.roll_back(state.lengths)
    while gpu.done < gpu.launched:
        time.sleep(FORWARD_S / 4)
    return SimpleNamespace(launched=gpu.launched - before.launched, late=gpu.late - before.late)


@pytest.mark.parametrize("forwards", [1, 2, 4])
def test_a_request_waits_for_one_forward_and_no_more(forwards: int):
    """The guess, then K drafts behind it: what the request does not wait for is never launched."""
    drafter, state, gpu = drafter_of(Overlap.ahead)
    for _ in range(3):
        round_ = play(drafter, state, gpu, forwards)
        assert (round_.launched, round_.late) == (forwards, 0)


def test_drafting_ahead_that_requests_wait_for_is_given_up():
    """Each guess is wrong, and each request waits for a forward: `auto` learns that this does not pay."""
    drafter, state, gpu = drafter_of(Overlap.auto)
    launched = [play(drafter, state, gpu, 2).launched for _ in range(40)]
    assert launched[0] == 2
    assert sorted(launched[-TRY_EVERY - 1 :]) == [0] * TRY_EVERY + [2], "it is tried now and then"
