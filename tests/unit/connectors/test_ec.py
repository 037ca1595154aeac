"""Encodings between engines: announced, claimed, read, released; and every way in which that comes to nothing."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.fake import Fault
from connectors.lease import Claim, ClaimRefused
from connectors.wire.transfer import ECTransferParams
from engine.request import Request
from tests.fake_runner import expected_output
from tests.media_engines import (
    LEASE_SECONDS,
    ROWS_PER_BLOCK,
    WAIT_SECONDS,
    EncodeEngine,
    MediaEngine,
    changed,
    key,
    merged,
    pair,
)


def check_answered(engine: MediaEngine, *requests: Request) -> None:
    for request in requests:
        assert engine.final(request).error is None
        assert engine.answer(request) == expected_output(request.prompt_token_ids)


def check_failed(engine: MediaEngine, request: Request, status: int, says: str) -> None:
    final = engine.final(request)
    assert (final.finish_reason, final.error_status, engine.answer(request)) == ("error", status, [])
    assert says in (final.error or "")


def settle(*engines: EncodeEngine | MediaEngine) -> None:
    """Let messages arrive, and leases and stalled reads end."""
    for _ in range(int(LEASE_SECONDS) + 2):
        for engine in engines:
            engine.step()
        engines[0].network.advance(1.0)
    for engine in engines:
        engine.step()
        engine.check_idle()


@pytest.mark.parametrize("described", [True, False])
def test_announced_encodings_are_read_instead_of_made(described: bool) -> None:
    e, p, _ = pair()
    announced = e.announce("a", ("b", 5))
    request = p.ask(3, ("b", 5), 2, "a", 4, described=described, ec_params=announced)
    neighbour = p.ask(7, seed=4)
    p.step()
    assert list(p.media.fetching.values()) == [request]
    assert p.scheduler.num_running == 1, "who needs no picture does not wait"
    p.run()
    check_answered(p, request, neighbour)
    assert p.runner.encoded == {}
    assert p.encoder.connector.num_pulls_done == 2
    assert p.encoder.connector.num_bytes_pulled == (2 + 3) * ROWS_PER_BLOCK, "a row counts as one, here"
    settle(e, p)
    assert e.encoder.leases.num_ended == {"released": 2}


def test_what_nobody_announced_is_made_here() -> None:
    _, p, _ = pair()
    request = p.ask(3, "a", 2)
    assert p.step(), "without waiting"
    p.run()
    check_answered(p, request)
    assert p.media.num_fallbacks == {}


def test_one_read_serves_all_who_want_it_and_other_announcements_are_given_back() -> None:
    e, p, network = pair()
    network.faults = lambda pull: Fault(before_read=1.0)
    requests = [p.ask(number, "a", 2, described=True, ec_params=e.announce("a")) for number in (2, 3)]
    p.step()
    requests.append(p.ask(4, "a", 2, described=True, ec_params=e.announce("a")))
    p.run()
    requests.append(p.ask(5, "a", 2, described=True, ec_params=e.announce("a")))
    p.run()
    check_answered(p, *requests)
    assert len(p.encoder.transport.pulls) == 1
    assert p.encoder.connector.num_not_pulled == 3
    settle(e, p)
    assert e.encoder.leases.num_ended == {"released": 4}
    assert e.encoded == {"a": 1}


def test_what_is_in_the_prefix_cache_is_not_fetched() -> None:
    e, p, _ = pair(consumer={"encoder_blocks": 2})
    p.ask(3, "a", 6)
    p.run()
    p.ask("b", 1)
    p.run()
    request = p.ask(3, "a", 6, described=True, ec_params=e.announce("a"))
    p.run()
    check_answered(p, request)
    assert p.encoder.transport.pulls == []
    settle(e, p)


FAULTS: dict[str, Any] = {
    "evicted": "claim",
    "killed": "handshake",
    "dies while it is read": "disconnected",
    "restarted": "engine_id",
    "breaks off": "transfer",
    "hangs": "timeout",
}


def break_it(how: str, e: EncodeEngine, p: MediaEngine) -> None:
    network = e.network
    if how == "evicted":
        e.evict()
    elif how == "killed":
        network.unreachable.add("e-ec")
    elif how == "dies while it is read":
        network.faults = lambda pull: Fault(before_read=2.0)
        network.after(1.0, lambda: network.unreachable.add("e-ec"))
    elif how == "restarted":
        network.endpoints["e.test", 8200].engine_id = "another"
    elif how == "breaks off":
        network.faults = lambda pull: Fault(fails="transfer")
    elif how == "hangs":
        network.faults = lambda pull: Fault(stalls=5.0)


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("how", FAULTS)
def test_what_cannot_be_read_is_made_here_or_fails_its_request_alone(how: str, described: bool) -> None:
    e, p, _ = pair()
    announced = e.announce("a")
    break_it(how, e, p)
    neighbours = [p.ask(9, seed=seed) for seed in range(5)]
    request = p.ask(3, "a", 4, described=described, ec_params=announced)
    p.run()
    check_answered(p, *neighbours)
    if described:
        check_failed(p, request, 500, f"({FAULTS[how]}); try again")
        assert p.media.num_unavailable == {FAULTS[how]: 1}
    else:
        check_answered(p, request)
        assert p.runner.encoded == {"a": 1}
        assert p.media.num_fallbacks == {FAULTS[how]: 1}
    assert p.encoder.connector.num_pulls_failed == {FAULTS[how]: 1}
    settle(p, e)


def test_blocks_of_a_read_that_hangs_are_used_again_only_when_it_is_over() -> None:
    e, p, network = pair(consumer={"encoder_blocks": 4})
    network.faults = lambda pull: Fault(stalls=5.0)
    request = p.ask(3, "a", 4, ec_params=e.announce("a"))
    for _ in range(3):
        p.step()
        network.advance(0.1)
    assert request.status.finished or p.runner.encoded == {"a": 1}
    assert sum(map(len, p.encoder.connector.stalled.values())) == 2
    large = p.ask(("b", 8), 1)
    p.step()
    assert list(p.scheduler.waiting) == [large], "the room is in use"
    network.advance(6.0)
    p.run()
    check_answered(p, request, large)
    settle(p, e)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"shape": [5, 8]}, "shape"),
    "width": ({"shape": [4, 16]}, "shape"),
    "size": ({"size_bytes": 64}, "shape"),
    "blocks": ({"block_ids": [0]}, "shape"),
    "layout": ({"ec_layout": "encodings-2"}, "layout"),
    "no layout": ({"ec_layout": None}, "layout"),
    "no lease": ({"lease_id": None}, "incomplete"),
    "no address": ({"peer_host": None, "peer_port": None}, "incomplete"),
    "no blocks": ({"block_ids": None}, "incomplete"),
    "itself": ({"engine_id": "p-ec"}, "self"),
}


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("what", WRONG)
def test_an_announcement_that_makes_no_sense_is_not_followed(what: str, described: bool) -> None:
    changes, reason = WRONG[what]
    e, p, _ = pair()
    announced = e.announce("a", "b")
    neighbour = p.ask(3, "b", 2, described=True, ec_params=announced)
    request = p.ask(3, "a", 4, described=described, ec_params=changed(announced, "a", **changes))
    p.run()
    check_answered(p, neighbour)
    if described:
        check_failed(p, request, 500, f"({reason})")
    else:
        check_answered(p, request)
        assert p.media.num_fallbacks == {reason: 1}
    assert [pull.remote_request_id for pull in p.encoder.transport.pulls] == [announced.items["b"].lease_id]
    settle(p, e)


@pytest.mark.parametrize(
    "forgery", [{"block_ids": [2, 3]}, {"block_ids": [1, 0]}, {"lease_id": "b's"}, {"block_ids": [900, 901]}]
)
def test_rows_of_another_picture_are_never_taken_for_it(forgery: dict[str, Any]) -> None:
    """The owner tells what its blocks hold, and the reader knows what it wants."""
    e, p, _ = pair()
    announced = e.announce("a", "b")
    if "lease_id" in forgery:
        forgery = {"lease_id": announced.items["b"].lease_id, "block_ids": announced.items["b"].block_ids}
    request = p.ask(3, "a", 4, ec_params=changed(announced, "a", **forgery))
    p.run()
    check_answered(p, request)
    assert p.media.num_fallbacks == {"hashes": 1}
    assert p.runner.encoded == {"a": 1}
    settle(p, e)


def test_a_request_without_picture_and_announcement_is_the_callers_fault() -> None:
    _, p, _ = pair()
    request = p.ask(3, "a", 4, described=True)
    other = p.ask(3, "b", 4, described=True, ec_params=ECTransferParams())
    p.collect()
    for each in (request, other):
        check_failed(p, each, 400, "picture 1 is only described")
    p.check_idle()


def test_a_second_announcement_is_tried_when_the_first_fails() -> None:
    e, p, network = pair()
    network.faults = lambda pull: Fault(before_read=1.0)
    first = p.ask(3, "a", 1, described=True, ec_params=e.announce("a"))
    second = p.ask(4, "a", 1, described=True, ec_params=e.announce("a"))
    p.step()
    network.advance(0.5)
    network.faults = lambda pull: Fault(fails="transfer") if len(p.encoder.transport.pulls) == 1 else Fault()
    e.encoder.leases.cancel(p.encoder.transport.pulls[0].remote_request_id)
    network.endpoints["e.test", 8200].engine_id = "gone"
    network.advance(1.0)
    network.endpoints["e.test", 8200].engine_id = "e-ec"
    p.run()
    check_failed(p, first, 500, "(disconnected)")
    check_answered(p, second)
    assert len(p.encoder.transport.pulls) == 2
    settle(p, e)


@pytest.mark.parametrize("described", [True, False])
def test_all_waiting_together_has_its_time(described: bool) -> None:
    """Whatever the transport makes of it, and however often it is tried."""
    e, p, network = pair()
    network.faults = lambda pull: Fault(before_claim=WAIT_SECONDS - 20)
    announced = [e.announce("a") for _ in range(2)]
    first = p.ask(3, "a", 1, described=True, ec_params=announced[0])
    request = p.ask(4, "a", 1, described=described, ec_params=announced[1])
    p.step()
    assert p.media.next_wakeup() == WAIT_SECONDS
    network.advance(WAIT_SECONDS - 19)  # the leases are over: the first read fails, the second is tried
    p.step()
    check_failed(p, first, 500, "(claim)")
    assert list(p.media.fetching.values()) == [request]
    network.advance(18.9)
    p.step()
    assert not request.status.finished
    network.advance(0.1)
    p.step()
    if described:
        check_failed(p, request, 500, "(overdue)")
    else:
        p.run()
        check_answered(p, request)
        assert p.media.num_fallbacks == {"overdue": 1}
    assert p.encoder.connector.stalled, "the second read is still under way"
    network.advance(WAIT_SECONDS)
    settle(p, e)


@pytest.mark.parametrize("after", [0.0, 0.5, 1.5])
def test_a_request_that_is_aborted_leaves_its_read_to_end(after: float) -> None:
    e, p, network = pair()
    network.faults = lambda pull: Fault(before_claim=1.0, before_read=1.0)
    request = p.ask(3, "a", 1, described=True, ec_params=e.announce("a"))
    if after:
        p.step()
        network.advance(after)
    p.abort(request)
    p.check()
    settle(p, e)
    assert p.final(request).finish_reason == "abort"
    assert p.encoder.cache.state(key("a")) is not None, "what was read is kept"
    assert e.encoder.leases.num_ended == {"released": 1}


def test_an_announcement_that_was_not_followed_is_given_back_when_the_request_ends() -> None:
    e, p, _ = pair(consumer={"encoder_blocks": 2})
    blocker = p.ask("b", 1, max_tokens=1)
    request = p.ask(2, "a", 1, ec_params=e.announce("a"))
    p.abort(request)
    p.run()
    check = p.final(blocker)
    assert check.error is None
    settle(p, e)
    assert e.encoder.leases.num_ended == {"released": 1}


def test_room_for_what_is_read_is_taken_at_once_or_not_at_all() -> None:
    e, p, _ = pair(consumer={"encoder_blocks": 4, "max_num_batched_tokens": 4})
    running = p.ask(("c", 6), 9, max_tokens=1)
    p.step()
    request = p.ask(3, "a", "b", 1, described=True, ec_params=e.announce("a", "b"))
    p.step()
    assert p.encoder.transport.pulls == []
    p.run()
    check_answered(p, request)
    assert p.final(running).error is None
    settle(p, e)


def test_the_first_in_the_queue_takes_the_room_of_those_behind_it() -> None:
    """Whose pictures have come, and who could not run before it: neither would ever have gone on."""
    e, p, network = pair(consumer={"encoder_blocks": 4, "num_blocks": 10})
    long = p.ask(30, seed=8, max_tokens=9)
    p.step()
    behind = p.ask(6, "a", "b", 1, ec_params=e.announce("a", "b"))
    p.step()
    network.advance(0.1)
    p.step()
    assert list(p.scheduler.waiting) == [behind]
    assert p.encoder.cache.pool.num_free == 0
    ahead = p.ask(6, "c", "d", 1, seed=3)
    p.scheduler.waiting.rotate()
    p.run()
    check_answered(p, behind, ahead)
    assert p.final(long).error is None
    settle(p, e)


# What the owner has to say.


def test_a_claimed_encoding_is_not_evicted() -> None:
    e, _, network = pair(encoder={"encoder_blocks": 4})
    announced = e.announce("a", "b")
    claim = e.encoder.leases.claim(str(announced.items["a"].lease_id))
    assert isinstance(claim, Claim)
    assert list(claim.block_ids) == announced.items["a"].block_ids
    waiting = e.ask("c", "d")
    e.step()
    assert not waiting.status.finished
    assert e.encoder.leases.num_ended == {}, "nor is another in vain"
    network.advance(100.0)  # the reader is gone, and its claim over
    e.run()
    assert e.final(waiting).finish_reason == "stop"
    settle(e)


@pytest.mark.parametrize("fate", ["expired", "released", "revoked", "claimed", "cancelled"])
def test_an_announcement_has_one_reader_in_its_time(fate: str) -> None:
    e, _, network = pair()
    lease_id = str(e.announce("a").items["a"].lease_id)
    leases = e.encoder.leases
    if fate == "expired":
        network.advance(LEASE_SECONDS)
    elif fate == "released":
        leases.release(lease_id)
    elif fate == "revoked":
        e.evict()
    elif fate == "claimed":
        leases.claim(lease_id)
    else:
        leases.cancel(lease_id)
    assert leases.claim(lease_id) == ClaimRefused(fate)


def test_what_was_evicted_before_the_end_is_not_announced() -> None:
    p = MediaEngine(produces=True, encoder_blocks=2, max_num_batched_tokens=4)
    first = p.ask("a", 9, max_tokens=1)
    second = p.ask("b", 1, max_tokens=1)
    p.run()
    assert p.final(first).ec_transfer_params is None
    params = p.final(second).ec_transfer_params
    assert params is not None
    assert list(params.items) == ["b"]


@pytest.mark.parametrize("consumes", [True, False])
def test_an_engine_may_announce_and_serve(consumes: bool) -> None:
    """To be a producer is not to be nothing else."""
    e, p, network = pair(consumer={"produces": True, "consumes": consumes})
    announced = e.announce("a")
    request = p.ask(3, "a", 4, ec_params=announced)
    p.run()
    check_answered(p, request)
    assert p.runner.encoded == ({} if consumes else {"a": 1})
    again = p.final(request).ec_transfer_params
    assert again is not None
    reader = MediaEngine(network=network, name="q")
    last = reader.ask(5, "a", 1, described=True, ec_params=ECTransferParams.parse(again.to_json()))
    reader.run()
    check_answered(reader, last)
    settle(e, p, reader)


def test_an_engine_that_fetches_only_announces_nothing() -> None:
    _, p, _ = pair()
    request = p.ask("a", 3)
    p.run()
    assert p.final(request).ec_transfer_params is None


def test_announcements_of_two_encoders_are_followed_to_each() -> None:
    e, p, network = pair()
    other = EncodeEngine(network, name="f")
    announced = merged(e.announce("a"), other.announce("b"))
    request = p.ask("b", 2, "a", 2, "b", 1, described=True, ec_params=announced)
    p.run()
    check_answered(p, request)
    assert {pull.peer.engine_id for pull in p.encoder.transport.pulls} == {"e-ec", "f-ec"}
    settle(e, other, p)
