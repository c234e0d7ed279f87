"""Every reply is the one to its ask; a line over TCP carries them."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from llama_ssp.distributed.comm import ALONE
from llama_ssp.distributed.draft_link import LinkLost, Listener, connect
from llama_ssp.distributed.draft_messages import Dismissed, DraftClient, DraftServer, Message, MessageKind
from llama_ssp.errors import DistributedError
from llama_ssp.speculative.drafters.remote import RemoteDrafter
from llama_ssp.speculative.state import Prompt, State


def test_each_reply_is_its_own_and_every_ask_is_heard_in_order():
    """Though the leader does not wait for some of them, nor the draft take up each ask at once."""
    near, far = line()
    asker, answerer, chance = DraftClient(near, 60.0), DraftServer(far, ALONE), random.Random(1)
    asked, heard, stale = [], [], 0
    for number in range(300):
        asked.append([number, chance.randrange(4)])
        asker.broadcast_ints(asked[-1])
        is_waited_for = chance.random() < 0.7
        while len(heard) < len(asked) and (is_waited_for or chance.random() < 0.5):
            heard.append(answerer.broadcast_ints([]))
            answerer.send_reply([heard[-1][0]], bytes(heard[-1][1]))
            stale += not is_waited_for or len(heard) < len(asked)
        if is_waited_for:
            reply = asker.reply()
            assert reply is not None and (reply.values, reply.payload) == ([number], bytes(asked[-1][1]))
    asker.broadcast_ints([])
    while len(heard) <= len(asked):
        heard.append(answerer.broadcast_ints([]))
    asker.flush()
    assert heard == [*asked, []] and asker.lost is None and not answerer.has_request()
    assert asker.discarded == stale > 20


def test_messages_survive_their_frames():
    for message in (
        Message(MessageKind.REQUEST, 0, []),
        Message(MessageKind.REPLY, 2**40, [-1, 2**62], b"\0laws"),
    ):
        assert Message.unpack(message.pack()) == message


def line():
    """Two ends of a line over TCP."""
    listener, ends = Listener(), []
    thread = threading.Thread(target=lambda: ends.append(listener.accept(10.0)))
    thread.start()
    stranger = connect(listener.host, listener.port, "another run's...", 5.0)
    near = connect(listener.host, listener.port, listener.secret, 5.0)
    thread.join()
    stranger.close()
    return near, ends[0]


def test_frames_go_over_tcp_in_order_and_whole():
    near, far = line()
    frames = [b"", b"one", bytes(range(256)) * 40_000]
    sender = threading.Thread(target=lambda: [near.send(frame) for frame in frames])
    sender.start()
    assert [far.receive(5.0) for _ in frames] == frames
    sender.join()
    assert far.receive(0) is None
    near.close()
    with pytest.raises(LinkLost):
        far.receive(5.0)


def test_a_draft_that_is_given_up_hears_so():
    near, far = line()
    asker, answerer = DraftClient(near, 0.1), DraftServer(far, ALONE)
    asker.broadcast_ints([4])
    assert asker.reply() is None and asker.lost == "it has not answered for 0.1 s"
    asker.patience_s = 3600.0
    asker.broadcast_ints([4])
    asker.flush()
    assert asker.reply() is None, "what is lost is not waited for again"
    assert answerer.broadcast_ints([]) == [4]
    with pytest.raises(Dismissed):
        answerer.broadcast_ints([])


def test_a_proposal_about_another_text_is_never_used():
    near, far = line()
    asker, answerer = DraftClient(near, 60.0), DraftServer(far, ALONE)
    asker.broadcast_ints([2])
    answerer.broadcast_ints([])
    answerer.send_reply([1, 17, 2, *range(20)], b"")
    state = State([Prompt("0", [1])], 8, torch.device("cpu"))
    proposal = RemoteDrafter(asker, 8, 3, torch.float32).propose(state, (2,))
    assert proposal.count == (0,) and asker.lost == "what it drafted is about other texts"


def test_a_draft_that_went_is_noticed_at_once():
    near, far = line()
    asker = DraftClient(near, 60.0)
    far.close()
    asker.broadcast_ints([4])
    assert asker.reply() is None and asker.lost


def test_where_nobody_listens_nobody_waits_long():
    with pytest.raises(DistributedError, match="cannot connect"):
        connect("127.0.0.1", 1, "", 5.0)
