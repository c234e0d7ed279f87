"""Every reply is the one to its request; a TCP connection carries them."""

import os
import random
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.config import ModelConf, OnDraftLoss, PlacementConf, RunConf
from llama_ssp.distributed import interfaces
from llama_ssp.distributed.comm import ALONE
from llama_ssp.distributed.draft_link import Listener, connect, own_address
from llama_ssp.distributed.draft_messages import NO_BYTES, DraftClient, DraftServer, Message, MessageKind
from llama_ssp.distributed.interfaces import INTERFACE
from llama_ssp.distributed.roles import Roles
from llama_ssp.errors import DistributedError, LostPeer
from llama_ssp.pair.assembly import RankModels, engine_for
from llama_ssp.speculative.drafters.remote import RemoteDrafter
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.follower import Follower
from llama_ssp.speculative.state import Prompt, State
from tests.proofs.toy import toy


@dataclass
class Exchange:
    """Requests to a draft and what came of them, and the two ends."""

    client: DraftClient
    server: DraftServer
    asked: list[list[int]] = field(default_factory=list)
    received: list[list[int]] = field(default_factory=list)
    replies: dict[int, Any] = field(default_factory=dict)  # of the requests that were waited for
    stale: int = 0  # replies that nobody waited for


@pytest.fixture(scope="module")
def exchange() -> Exchange:
    """300 requests; the leader waits for some of them, and the draft does not take up each at once."""
    near, far = line()
    chance = random.Random(1)
    done = Exchange(client=DraftClient(link=near, patience_s=60.0), server=DraftServer(far, ALONE))
    for number in range(300):
        done.asked.append([number, chance.randrange(4)])
        done.client.broadcast_ints(done.asked[-1])
        is_waited_for = chance.random() < 0.7
        while len(done.received) < len(done.asked) and (is_waited_for or chance.random() < 0.5):
            done.received.append(done.server.broadcast_ints([]))
            done.server.send_reply([done.received[-1][0]], bytes_of(bytes(done.received[-1][1])))
            done.stale += not is_waited_for or len(done.received) < len(done.asked)
        if is_waited_for:
            done.replies[number] = done.client.reply()

    done.client.broadcast_ints([])
    while len(done.received) <= len(done.asked):
        done.received.append(done.server.broadcast_ints([]))
    done.client.flush()
    return done


def test_each_reply_is_its_own(exchange: Exchange):
    assert len(exchange.replies) > 100
    for number, reply in exchange.replies.items():
        assert reply is not None, number
        assert (reply.values, raw(reply.payload)) == ([number], bytes(exchange.asked[number][1]))


def test_every_request_arrives_in_order(exchange: Exchange):
    assert exchange.received == [*exchange.asked, []] and exchange.client.lost is None
    assert not exchange.server.has_request()


def test_replies_that_nobody_waited_for_are_discarded(exchange: Exchange):
    assert exchange.client.discarded == exchange.stale > 20


def test_messages_survive_their_frames():
    for kind, number, values, load in (
        (MessageKind.REQUEST, 0, [], b""),
        (MessageKind.REPLY, 2**40, [-1, 2**62], b"\0laws"),
    ):
        message = Message(kind, number, values, bytes_of(load))
        back = Message.unpack(bytes_of(message.head() + load))
        assert (back.kind, back.number, back.values, raw(back.payload)) == (kind, number, values, load)


def bytes_of(load: bytes) -> Tensor:
    return torch.frombuffer(bytearray(load), dtype=torch.uint8) if load else NO_BYTES


def raw(payload: Tensor) -> bytes:
    return payload.numpy().tobytes()


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


def test_frames_go_over_tcp_as_they_are():
    """In order and whole."""
    near, far = line()
    frames = [b"", b"one", bytes(range(256)) * 40_000]
    sender = threading.Thread(target=lambda: [near.send(frame) for frame in frames])
    sender.start()
    assert [raw(far.receive(5.0)) for _ in frames] == frames
    sender.join()
    assert far.receive(0) is None


def test_a_payload_is_sent_from_where_it_lies_and_stays_where_it_comes():
    """It begins at a multiple of 8 bytes of its frame, whatever comes before: numbers are read in place."""
    near, far = line()
    client, server = DraftClient(link=near, patience_s=60.0), DraftServer(far, ALONE)
    numbers = torch.rand(3, 50_000, dtype=torch.float64)
    for values in ([], [1], [1, 2, 3]):
        client.broadcast_ints([4])
        server.broadcast_ints([])
        load = numbers.flatten().view(torch.uint8)
        sender = threading.Thread(target=server.send_reply, args=(values, load))
        sender.start()
        payload = client.reply().payload
        sender.join()
        frame_bytes = payload.untyped_storage().nbytes()
        assert frame_bytes - len(payload) == payload.storage_offset() and payload.storage_offset() % 8 == 0
        assert payload.view(torch.float64).view(3, -1).equal(numbers)


def test_a_line_that_the_other_closed_is_lost():
    near, far = line()
    near.close()
    with pytest.raises(LostPeer):
        far.receive(5.0)


def test_only_a_frame_within_its_bound_is_received():
    """The first frame of a stranger has a bound; a reply of gigabytes has none."""
    near, far = line()
    for most in (11, None):
        near.send(11 * b"x")
        assert raw(far.receive(5.0, most)) == 11 * b"x", most
    near.send(11 * b"x")
    with pytest.raises(LostPeer):
        far.receive(5.0, 10)


def test_a_draft_that_is_given_up_is_dismissed():
    near, far = line()
    client, server = DraftClient(link=near, patience_s=0.1), DraftServer(far, ALONE)
    client.broadcast_ints([4])
    assert client.reply() is None and client.lost == "it has not answered for 0.1 s"
    client.patience_s = 3600.0
    client.broadcast_ints([4])
    client.flush()
    assert client.reply() is None, "what is lost is not waited for again"
    assert server.broadcast_ints([]) == [4]
    with pytest.raises(LostPeer, match="goes on alone"):
        server.broadcast_ints([])


def test_a_reply_from_before_a_loss_answers_nothing_after_it():
    near, far = line()
    client, server = DraftClient(link=near, patience_s=60.0), DraftServer(far, ALONE)
    client.broadcast_ints([4])
    server.broadcast_ints([])
    server.send_reply([7])
    assert client.reply().values == [7]
    client.give_up("its drafts are for other texts")
    client.broadcast_ints([5])
    assert client.reply() is None


def test_a_draft_that_reads_nothing_is_given_up_at_once():
    """The link is full: there is no room for a last word, and nobody waits for it."""
    near, _far = line()
    client, number = DraftClient(link=near, patience_s=60.0), near._connection.fileno()
    os.set_blocking(number, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(number, bytes(1 << 16))
    os.set_blocking(number, True)
    began = time.monotonic()
    client.give_up("it reads nothing")
    assert time.monotonic() - began < 2.5, "half of how long a frame may stand still"


def test_a_proposal_about_another_text_is_never_used():
    near, far = line()
    client, server = DraftClient(link=near, patience_s=60.0), DraftServer(far, ALONE)
    client.broadcast_ints([2])
    server.broadcast_ints([])
    server.send_reply([1, 17, 2, *range(20)])
    state = State([Prompt("0", [1])], 8, torch.device("cpu"))
    proposal = RemoteDrafter(client, 8, 3, torch.float32).propose(state, (2,))
    assert proposal.count == (0,) and client.lost == "its drafts are for other texts"


def test_a_reply_before_its_request_is_used_if_both_sides_find_that_it_is_the_one():
    """By its number and its tags; else the draft replies, and what came before is forgotten."""
    near, far = line()
    client, server = DraftClient(link=near, patience_s=60.0), DraftServer(far, ALONE)

    def asked(tags: list[int], is_replied: bool, more: int = 0) -> list[int]:
        for number in range(more):  # requests that no reply follows
            client.broadcast_ints([number])
            server.broadcast_ints([])
        client.broadcast_ints([9])
        server.broadcast_ints([])
        assert server.has_replied(tags) == is_replied
        if not is_replied:
            server.send_reply([*tags, 0])
        reply = client.reply(tags)
        assert reply is not None
        return reply.values

    assert asked([4], is_replied=False) == [4, 0] and client.early == 0
    server.send_early([5], [1], NO_BYTES)
    assert asked([5], is_replied=True) == [5, 1] and client.early == 1
    assert asked([5], is_replied=False) == [5, 0], "it is the reply to one request alone"
    server.send_early([6], [1], NO_BYTES)
    assert asked([7], is_replied=False) == [7, 0]
    server.send_early([8], [1], NO_BYTES)
    assert asked([8], is_replied=False, more=1) == [8, 0], "another request came first"
    assert client.early == 1 and client.discarded == 0

    # It may also arrive after the request was sent, and is no acknowledgement of that.
    client.broadcast_ints([9])
    server.send_early([3], [2], bytes_of(b"laws"))
    reply = client.reply([3])
    assert reply is not None and (reply.values, raw(reply.payload)) == ([3, 2], b"laws")
    assert client._acknowledged < client._number
    server.broadcast_ints([])
    assert server.has_replied([3])
    client.flush()
    assert client.lost is None


def test_a_link_is_over_the_interface_that_is_chosen(monkeypatch: pytest.MonkeyPatch):
    """As gloo: both ends have the address of the interface that GLOO_SOCKET_IFNAME names."""
    for chosen in ("lo", "lo,eth9"):
        monkeypatch.setenv(INTERFACE, chosen)
        assert own_address() == "127.0.0.1"
    near, far = line()
    for end in (near, far):
        held = socket.socket(fileno=os.dup(end._connection.fileno()))
        assert held.getsockname()[0] == held.getpeername()[0] == "127.0.0.1"
        held.close()

    monkeypatch.setenv(INTERFACE, "no-such-one")
    with pytest.raises(DistributedError, match=f"{INTERFACE}.*no-such-one.*allowed .*lo"):
        own_address()
    monkeypatch.delenv(INTERFACE)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address() == "127.0.0.1"


def test_an_interface_with_an_ipv6_address_alone_has_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe800000000000000000000000000001 07 40 20 80     ib7\n"
        "fd000000000000000000000000000002 07 40 00 80     ib7\n",
        encoding="ascii",
    )
    monkeypatch.setattr(interfaces, "IPV6_TABLE", table)
    assert interfaces.address_of("ib7") == "fd00::2"
    assert interfaces.address_of("ib8") == ""


def test_a_draft_that_went_is_noticed_at_once():
    near, far = line()
    client = DraftClient(link=near, patience_s=60.0)
    far.close()
    client.broadcast_ints([4])
    assert client.reply() is None and client.lost
    with pytest.raises(DistributedError, match="cannot connect"):
        connect("127.0.0.1", 1, "", 5.0)


def test_engines_of_one_pair_leave_its_connection_as_it_was_made():
    """Its settings are those of the placement that it was opened with, whatever an engine's run says."""
    near, far = line()
    client, server = DraftClient(link=near, patience_s=7.0, essential=True), DraftServer(far, ALONE)
    made, known = (dict(vars(client)), dict(vars(server))), SimpleNamespace(size=5, paired=None)
    leads = Roles(everyone=ALONE, target=ALONE, draft=None, client=client, apart=(1,))
    helps = Roles(everyone=ALONE, target=None, draft=ALONE, server=server, apart=(1,))
    for lost, seconds in ((OnDraftLoss.stop, 1.0), (OnDraftLoss["continue"], 2.0)):
        placement = PlacementConf(on_draft_loss=lost, draft_timeout_s=seconds)
        run = RunConf(draft=ModelConf(), placement=placement)
        for roles, kind in ((leads, Engine), (helps, Follower)):
            target, draft = (toy(5, 0), None) if roles is leads else (None, toy(5, 1))
            pair = RankModels(
                target=target,
                draft=draft,
                head=None,
                devices={},
                roles=roles,
                vocab=5,
                context=64,
                draft_context=64,
                draft_dtype=torch.float32,
                trials={},
            )
            assert isinstance(engine_for(pair, run, known, frozenset(), 0), kind)
    assert (vars(client), vars(server)) == made
