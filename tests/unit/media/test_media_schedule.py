"""Pictures in the schedule: encoded once, in time, within the budget, in the room there is."""

from __future__ import annotations

import pytest

from connectors.wire.transfer import KVTransferParams
from engine.media.cache import EncodingState
from engine.messages import Stop
from engine.request import Request, RequestStatus
from tests.fake_engines import FakeEngine
from tests.fake_runner import expected_output
from tests.media_engines import MediaEngine, key, pair
from tests.media_runner import picture_request


def check_answers(engine: FakeEngine, *requests: Request) -> None:
    for request in requests:
        assert engine.final(request).error is None
        wanted = expected_output(request.prompt_token_ids, max_tokens=request.sampling.max_tokens)
        assert engine.answer(request) == wanted


def test_a_picture_is_encoded_in_the_step_that_computes_its_placeholders() -> None:
    engine = MediaEngine(max_num_batched_tokens=8)
    request = engine.ask(10, "a", 4)
    engine.run()
    assert engine.runner.encodes[:3] == [[], ["a"], []]
    check_answers(engine, request)
    engine.check_idle()


def test_a_picture_that_appears_several_times_is_encoded_once() -> None:
    engine = MediaEngine()
    requests = [engine.ask(3, "a", 2, "b", 2, "a", 1), engine.ask(5, "a", 2)]
    engine.run()
    requests.append(engine.ask(7, "b", 2, "a", 3))
    engine.run()
    assert engine.runner.encoded == {"a": 1, "b": 1}
    assert (engine.encoder.cache.num_queries, engine.encoder.cache.num_hits) == (5, 3)
    check_answers(engine, *requests)
    engine.check_idle()


def test_equal_names_of_other_sizes_are_two_encodings() -> None:
    engine = MediaEngine()
    engine.ask(3, ("a", 4))
    engine.run()
    engine.ask(3, ("a", 6))
    engine.run()
    assert engine.media.num_encoded == 2
    engine.check_idle()


def test_a_chunk_ends_before_a_picture_that_the_step_cannot_encode() -> None:
    engine = MediaEngine(max_rows_per_step=8)
    request = engine.ask(2, ("a", 6), 2, ("b", 2), 2, ("c", 6), 3, max_tokens=1)
    engine.run()
    assert engine.runner.encodes == [["a", "b"], ["c"]]
    assert [[n for _, n in batch] for batch in engine.runner.batches] == [[14], [9]]
    check_answers(engine, request)


def test_a_picture_larger_than_a_step_may_encode_has_one_for_itself() -> None:
    engine = MediaEngine(max_rows_per_step=4)
    request = engine.ask(2, ("a", 9), ("b", 2), 1, max_tokens=1)
    engine.run()
    assert engine.runner.encodes == [["a"], ["b"]]
    check_answers(engine, request)


def test_what_others_encode_in_a_step_leaves_less_for_the_next_request() -> None:
    engine = MediaEngine(max_rows_per_step=4)
    first = engine.ask(2, "a", 1, max_tokens=1)
    second = engine.ask("b", 3, max_tokens=1)
    text = engine.ask(5, max_tokens=1)
    engine.step()
    assert (first.status.finished, second.status) == (True, RequestStatus.WAITING)
    engine.run()
    assert engine.runner.encodes == [["a"], ["b"]]
    check_answers(engine, first, second, text)


def test_of_a_running_request_no_token_is_computed_before_its_picture_is_encoded() -> None:
    engine = MediaEngine(max_rows_per_step=4, max_num_batched_tokens=8)
    first = engine.ask(6, "a", "b", 1, max_tokens=1)
    second = engine.ask(2, seed=9, max_tokens=9)
    engine.run()
    assert engine.runner.encoded == {"a": 1, "b": 1}
    check_answers(engine, first, second)


def test_an_encoding_stays_until_the_last_of_its_placeholders_is_computed() -> None:
    engine = MediaEngine(max_num_batched_tokens=4, encoder_blocks=8)
    request = engine.ask(2, ("a", 10), 5, max_tokens=1)
    seen = []
    while not request.status.finished:
        engine.step()
        seen.append(key("a", 10) in engine.encoder.cache.in_use)
    assert seen == [True, True, False, False, False]
    assert engine.encoder.cache.state(key("a", 10)) is not None, "it is kept for others"


def test_an_encoding_stays_for_the_second_appearance_of_its_picture() -> None:
    engine = MediaEngine(max_num_batched_tokens=4)
    request = engine.ask("a", 8, "a", 4, max_tokens=1)
    seen = []
    while not request.status.finished:
        engine.step()
        seen.append(key("a") in engine.encoder.cache.in_use)
    assert seen == [True, True, True, False, False]
    assert engine.runner.encoded == {"a": 1}


@pytest.mark.parametrize(("tail", "encodes"), [(6, 0), (1, 1)])
def test_a_picture_within_the_prefix_hit_needs_no_encoding(tail: int, encodes: int) -> None:
    """With the shorter tail the last whole block of the hit ends within the picture."""
    engine = MediaEngine(encoder_blocks=4)
    engine.ask(3, "a", tail, max_tokens=1)
    engine.run()
    engine.ask(("b", 8), max_tokens=1)  # evicts the first
    engine.run()
    assert engine.encoder.cache.state(key("a")) is None
    request = engine.ask(3, "a", tail, max_tokens=1)
    engine.run()
    assert engine.runner.encoded["a"] == 1 + encodes
    assert engine.final(request).num_cached_tokens == (4 if encodes else 12)
    engine.check_idle()


def test_the_last_token_is_computed_though_it_is_a_placeholder() -> None:
    engine = MediaEngine(encoder_blocks=2)
    for _ in range(2):
        request = engine.ask(4, "a", max_tokens=1)
        engine.run()
        engine.ask("b", max_tokens=1)
        engine.run()
    assert engine.runner.encoded["a"] == 2
    check_answers(engine, request)


def test_a_needed_encoding_is_not_evicted_and_who_has_no_room_waits() -> None:
    engine = MediaEngine(encoder_blocks=3, max_num_batched_tokens=4)
    first = engine.ask(2, ("a", 6), 1, max_tokens=3)
    second = engine.ask(("b", 4), 1, max_tokens=3)
    third = engine.ask(4, seed=5, max_tokens=1)
    engine.step()
    assert list(engine.scheduler.waiting) == [second, third], "nobody overtakes"
    engine.run()
    assert engine.runner.encoded == {"a": 1, "b": 1}
    check_answers(engine, first, second, third)
    engine.check_idle()


def test_the_one_longest_unused_goes_first() -> None:
    engine = MediaEngine(encoder_blocks=6, enable_prefix_caching=False)
    for name in ("a", "b", "c", "a", "d"):
        engine.ask(name, 1, max_tokens=1)
        engine.run()
    states = {name: engine.encoder.cache.state(key(name)) is not None for name in "abcd"}
    assert states == {"a": True, "b": False, "c": True, "d": True}


def test_pictures_larger_than_the_whole_cache_are_the_callers_fault() -> None:
    engine = MediaEngine(encoder_blocks=3)
    large, many = engine.ask(("a", 7), 1), engine.ask("a", "b", 1)
    twice = engine.ask(("a", 6), ("a", 6), 1)
    engine.collect()
    for request in (large, many):
        assert engine.final(request).error_status == 400
        assert "take 4 blocks of the encoder cache, which has 3" in (engine.final(request).error or "")
    engine.run()
    check_answers(engine, twice)
    engine.check_idle()


def test_a_preempted_request_finds_its_encoding_or_makes_it_again() -> None:
    engine = MediaEngine(num_blocks=6, encoder_blocks=2)
    old = engine.ask(6, seed=1, max_tokens=14)
    young = engine.ask(2, "a", 2, max_tokens=12)
    engine.run()
    assert young.num_preemptions > 0
    assert engine.runner.encoded == {"a": 1}
    check_answers(engine, old, young)
    engine.check_idle()


def test_a_failed_step_is_encoded_again() -> None:
    engine = MediaEngine()
    request = engine.ask(2, "a", 2, max_tokens=1)
    assert engine.scheduler.schedule() is not None  # and nothing comes of it
    engine.check()
    engine.run()
    assert engine.media.num_encoded == 1
    check_answers(engine, request)
    engine.check_idle()


@pytest.mark.parametrize("when", ["waiting", "during its step", "within a picture", "decoding"])
def test_an_abort_leaves_no_encoding_needed(when: str) -> None:
    engine = MediaEngine(encoder_blocks=4, max_num_batched_tokens=4)
    other = engine.ask(1, "b", 1, max_tokens=2)
    request = engine.ask(2, ("a", 6), 2, max_tokens=5)
    if when == "during its step":
        engine.step()
        engine.step(during=lambda: engine.abort(request))
    else:
        for _ in range({"waiting": 0, "within a picture": 3, "decoding": 6}[when]):
            engine.step()
        engine.abort(request)
    engine.check()
    engine.run()
    engine.collect()
    assert engine.final(request).finish_reason == "abort"
    check_answers(engine, other)
    engine.check_idle()


@pytest.mark.parametrize("is_announced", [False, True], ids=["to be encoded", "to be loaded"])
def test_what_is_encoded_for_one_that_left_is_not_taken_for_what_was_wanted_since(is_announced: bool) -> None:
    """The step has written to blocks that were given up while it ran; who came meanwhile has others."""
    encoder, engine, _ = pair()
    announced = encoder.announce("b", "a") if is_announced else encoder.announce("b")
    left = engine.ask(2, "a", 3)
    came: list[Request] = []

    def meanwhile() -> None:
        engine.abort(left)
        came.append(engine.ask(1, "b", 2, "a", 3, ec_params=announced))
        assert engine.encoder.cache.state(key("a")) is not None, "it has room already, for its encodings are fetched"

    engine.step(during=meanwhile)
    state = EncodingState.LOADING if is_announced else EncodingState.WANTED
    assert engine.encoder.cache.state(key("a")) is state
    engine.run()
    check_answers(engine, *came)
    engine.check_idle()


def test_a_stop_string_ends_a_request_with_pictures() -> None:
    engine = MediaEngine()
    request = engine.ask(2, "a", 2, max_tokens=50)
    for _ in range(4):
        engine.step()
    engine.scheduler.stop(Stop(request.request_id, aborted=False, num_output_tokens=2))
    engine.collect()
    assert engine.final(request).finish_reason == "stop"
    engine.check_idle()


def test_an_engine_without_pictures_refuses_them() -> None:
    engine = FakeEngine()
    request = engine.add(picture_request(3, "a", 2))
    engine.collect()
    assert engine.final(request).error_status == 400
    engine.check_idle()


def test_with_prompt_logprobs_all_pictures_are_needed() -> None:
    engine = MediaEngine(encoder_blocks=2)
    for name in ("a", "b"):
        engine.ask(3, name, 6, max_tokens=1)
        engine.run()
    engine.ask(3, "a", 6, max_tokens=1, prompt_logprobs=0)
    engine.run()
    assert engine.runner.encoded["a"] == 2
    engine.check_idle()


def test_pictures_within_remote_kv_need_no_encoding() -> None:
    network = (p := MediaEngine(kv=True, role="prefill", name="p")).network
    d = MediaEngine(network=network, kv=True, role="decode", name="d")
    first = p.ask(3, "a", 6, max_tokens=1, params=KVTransferParams.for_prefill())
    p.run()
    request = d.ask(3, "a", 6, described=True, params=p.said(first).for_decode())
    d.run()
    assert d.runner.encoded == {}
    assert d.final(request).num_external_tokens == 13
    check_answers(d, request)
    d.check_idle()


@pytest.mark.parametrize("described", [False, True])
def test_without_the_remote_kv_they_are_encoded_after_all(described: bool) -> None:
    network = (p := MediaEngine(kv=True, role="prefill", name="p")).network
    d = MediaEngine(network=network, kv=True, role="decode", name="d")
    first = p.ask(3, "a", 6, max_tokens=1, params=KVTransferParams.for_prefill())
    p.run()
    neighbour = d.ask(9, seed=3)
    request = d.ask(3, "a", 6, described=described, params=p.said(first).for_decode())
    network.unreachable.add("p")
    d.run()
    check_answers(d, neighbour)
    if described:
        assert d.final(request).error_status == 400
        assert "only described" in (d.final(request).error or "")
    else:
        assert d.runner.encoded == {"a": 1}
        check_answers(d, request)
    d.check_idle()
