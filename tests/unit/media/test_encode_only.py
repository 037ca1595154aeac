"""An engine that only encodes: a request ends when its pictures are encoded, and says where they lie."""

from __future__ import annotations

import pytest

from connectors.fake import FakeNetwork
from tests.media_engines import LEASE_SECONDS, ROW_BYTES, WIDTH, EncodeEngine, key


@pytest.fixture
def encoder() -> EncodeEngine:
    return EncodeEngine(FakeNetwork())


def test_a_request_ends_without_a_token_once_its_pictures_are_encoded(encoder: EncodeEngine) -> None:
    request = encoder.ask(3, "a", 2, ("b", 5), 4)
    encoder.run()
    final = encoder.final(request)
    assert (final.finish_reason, final.token_ids, final.error) == ("stop", [], None)
    assert encoder.batches == [["a", "b"]]
    assert final.ec_transfer_params is not None
    told = final.ec_transfer_params.to_json()
    assert told["b"] == {
        "modality": "image",
        "metadata": {"grid": [1, 5]},
        "item_indices": [1],
        "peer_host": "e.test",
        "peer_port": 8200,
        "size_bytes": 5 * ROW_BYTES,
        "shape": [5, WIDTH],
        "engine_id": "e-ec",
        "lease_id": f"{request.request_id}/1",
        "block_ids": [2, 3, 4],
        "ec_layout": "encodings-1",
    }


def test_a_repeated_picture_is_one_entry_with_all_its_places(encoder: EncodeEngine) -> None:
    params = encoder.announce("b", 1, "a", 2, "b", "a", "c")
    assert {name: item.item_indices for name, item in params.items.items()} == {"b": [0, 2], "a": [1, 3], "c": [4]}
    assert encoder.encoded == {"a": 1, "b": 1, "c": 1}


def test_what_is_there_already_is_announced_without_a_step(encoder: EncodeEngine) -> None:
    first, second = encoder.announce("a", 3), encoder.announce(5, "a")
    assert encoder.batches == [["a"]]
    assert first.items["a"].block_ids == second.items["a"].block_ids
    assert first.items["a"].lease_id != second.items["a"].lease_id


def test_requests_that_come_together_share_what_they_have_in_common(encoder: EncodeEngine) -> None:
    requests = [encoder.ask("a", "b"), encoder.ask("b", "c"), encoder.ask("a")]
    encoder.run()
    assert encoder.batches == [["a", "b", "c"]]
    assert all(encoder.final(request).ec_transfer_params for request in requests)


def test_a_step_encodes_no_more_than_its_budget() -> None:
    encoder = EncodeEngine(FakeNetwork(), max_rows_per_step=8)
    first, second = encoder.ask("a", "b", "c"), encoder.ask("d")
    encoder.step()
    assert encoder.batches == [["a", "b"]]
    assert not first.status.finished
    encoder.run()
    assert encoder.batches == [["a", "b"], ["c", "d"]]
    assert second.status.finished


def test_a_request_without_pictures_is_refused(encoder: EncodeEngine) -> None:
    request = encoder.ask(9)
    encoder.step()
    final = encoder.final(request)
    assert (final.finish_reason, final.error_status) == ("error", 400)
    assert "only encodes pictures" in (final.error or "")
    encoder.check_idle()


def test_a_picture_that_is_only_described_cannot_be_encoded(encoder: EncodeEngine) -> None:
    described, whole = encoder.ask(3, "a", described=True), encoder.ask(3, "b")
    encoder.run()
    assert encoder.final(described).error_status == 400
    assert encoder.final(whole).finish_reason == "stop"


def test_pictures_that_the_cache_cannot_hold_together_are_left_out() -> None:
    """They are not announced, and whoever would have fetched them encodes them."""
    encoder = EncodeEngine(FakeNetwork(), encoder_blocks=3)
    requests = [encoder.ask("a", "b", "a"), encoder.ask("c")]
    encoder.run()
    encoder.step()
    for request, announced in zip(requests, ("a", "c"), strict=True):
        final = encoder.final(request)
        assert final.finish_reason == "stop"
        assert final.ec_transfer_params is not None
        assert list(final.ec_transfer_params.items) == [announced]


def test_picture_larger_than_the_cache_is_not_announced() -> None:
    encoder = EncodeEngine(FakeNetwork(), encoder_blocks=1)
    request = encoder.ask("a")
    encoder.run()
    encoder.step()
    final = encoder.final(request)
    assert (final.finish_reason, final.ec_transfer_params) == ("stop", None)
    assert not encoder.scheduler.requests


def test_who_has_no_room_waits_for_those_that_are_encoded(encoder: EncodeEngine) -> None:
    encoder = EncodeEngine(FakeNetwork(), encoder_blocks=5, max_rows_per_step=4)
    requests = [encoder.ask("a", "b"), encoder.ask("c", "d"), encoder.ask("e")]
    encoder.step()
    assert (encoder.scheduler.num_running, encoder.scheduler.num_waiting) == (1, 2)
    encoder.run()
    assert all(encoder.final(request).finish_reason == "stop" for request in requests)
    assert encoder.encoder.leases.num_ended["revoked"] == 3, "of those that nobody reads, the oldest"


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_an_abort_leaves_nothing(when: str) -> None:
    encoder = EncodeEngine(FakeNetwork(), encoder_blocks=4, max_rows_per_step=4)
    running, waiting = encoder.ask("a", "b"), encoder.ask("c", "d")
    encoder.step()
    encoder.abort(running if when == "running" else waiting)
    encoder.abort(running if when == "running" else waiting)
    encoder.run()
    ends = [encoder.final(request).finish_reason for request in (running, waiting)]
    assert ends == (["abort", "stop"] if when == "running" else ["stop", "abort"])
    encoder.check_idle()


def test_a_step_that_failed_ends_those_it_was_for(encoder: EncodeEngine) -> None:
    failed = encoder.ask("a")
    batch = encoder.scheduler.schedule()
    assert batch is not None
    encoder.scheduler.fail([item.request for item in batch.scheduled], "no memory")
    later = encoder.ask("a")
    encoder.run()
    assert encoder.final(failed).error == "no memory"
    assert encoder.final(later).ec_transfer_params is not None
    encoder.check_idle()


def test_an_announcement_nobody_reads_ends_with_its_time_and_stays_in_the_cache(encoder: EncodeEngine) -> None:
    encoder.announce("a")
    encoder.network.advance(LEASE_SECONDS - 0.1)
    encoder.step()
    assert len(encoder.encoder.leases) == 1
    encoder.network.advance(0.1)
    encoder.step()
    assert encoder.encoder.leases.num_ended == {"expired": 1}
    assert encoder.encoder.cache.state(key("a")) is not None
    encoder.check_idle()


def test_when_all_are_aborted_nothing_is_announced(encoder: EncodeEngine) -> None:
    request = encoder.ask("a")
    encoder.scheduler.abort_all()
    encoder.step()
    assert encoder.final(request).finish_reason == "abort"
    assert encoder.final(request).ec_transfer_params is None
    encoder.check_idle()
