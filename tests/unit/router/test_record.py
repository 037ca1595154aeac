"""What is packed comes back; anything else is refused, quickly and with ValueError only."""

from __future__ import annotations

import struct
import time
from array import array
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.wire.transfer import KVTransferParams
from router.record import Record, pack_offer, unpack_offer

RECORD = Record(
    turn=3,
    prefill="http://p",
    decode="http://d",
    deadline=12.5,
    token_ids=array("I", [1, 2, 70_000, 5]),
    media=("aa", "bb"),
)
OFFER = KVTransferParams(
    do_remote_decode=True,
    do_remote_prefill=False,
    remote_block_ids=[[0, 300, 70_000]],
    remote_block_hashes=["00ff" * 8, "0123" * 8, "abcd" * 8],
    remote_num_tokens=40,
    remote_engine_id="d",
    remote_blocks_expiry_time=12.25,
    remote_port=1,
    kv_layout="x",
    unknown={"a": [1, None, "ü"]},
)


def with_ids(*ids: int) -> Record:
    return Record(1, None, "d", 0.0, array("I", ids))


def test_record_survives_packing() -> None:
    assert Record.unpack(RECORD.pack()) == RECORD
    assert Record.unpack(with_ids().pack()) == with_ids()


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_survive_packing(ids: list[int]) -> None:
    assert Record.unpack(with_ids(*ids).pack()).token_ids == array("I", ids)


@pytest.mark.parametrize(
    ("largest", "width"),
    [(0, 1), (255, 1), (256, 2), (65_535, 2), (65_536, 3), (2**24 - 1, 3), (2**24, 4), (2**32 - 1, 4)],
)
def test_ids_take_the_bytes_they_need(largest: int, width: int) -> None:
    ids = with_ids(*[0] * 999, largest)
    assert len(ids.pack()) - len(with_ids().pack()) == 1000 * width
    assert Record.unpack(ids.pack()) == ids


def test_long_conversation_does_not_stop_the_event_loop() -> None:
    """A few milliseconds; a loop over the ids in Python would take several times the limit."""
    ids = array("I", (7919 * position % 151_936 for position in range(100_000)))
    long = Record(1, None, "d", 0.0, ids)
    offer = OFFER.with_(remote_block_ids=[[*range(6_250)]], remote_block_hashes=[f"{i:032x}" for i in range(6_250)])
    packed, offered = long.pack(), pack_offer(offer)
    assert fastest(long.pack) < 0.01
    assert fastest(lambda: Record.unpack(packed)) < 0.01
    assert fastest(lambda: pack_offer(offer)) < 0.01
    assert fastest(lambda: unpack_offer(offered)) < 0.02
    assert len(packed) < 300_300


def fastest(work: Any) -> float:
    """Seconds, on a machine that may be busy."""
    times = []
    for _ in range(20):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


@given(st.binary(max_size=300))
def test_garbage_is_neither_record_nor_offer(data: bytes) -> None:
    for start in (b"", b"\x02", b"\x02\x00", b"\x02\x04"):
        with pytest.raises(ValueError):
            Record.unpack(start + data)
        with pytest.raises(ValueError):
            unpack_offer(start + data)


@pytest.mark.parametrize("length", range(len(RECORD.pack())))
def test_record_cut_short_is_no_record(length: int) -> None:
    with pytest.raises(ValueError):
        Record.unpack(RECORD.pack()[:length])


@pytest.mark.parametrize("length", range(len(pack_offer(OFFER))))
def test_offer_cut_short_is_no_offer(length: int) -> None:
    with pytest.raises(ValueError):
        unpack_offer(pack_offer(OFFER)[:length])


def test_more_than_was_packed_is_refused() -> None:
    with pytest.raises(ValueError):
        Record.unpack(RECORD.pack() + b"\0")
    with pytest.raises(ValueError):
        unpack_offer(pack_offer(OFFER) + b"\0")


@pytest.mark.parametrize("version", [0, 1, 3, 255])
def test_what_another_version_wrote_is_refused(version: int) -> None:
    with pytest.raises(ValueError):
        Record.unpack(bytes([version]) + RECORD.pack()[1:])
    with pytest.raises(ValueError):
        unpack_offer(bytes([version]) + pack_offer(OFFER)[1:])


FACTS: dict[str, Any] = {
    "turn": 3,
    "prefill": "http://p",
    "decode": "http://d",
    "deadline": 12.5,
    "media": ["aa", "bb"],
}


def record_bytes(facts: object, *, width: int = 1, num_ids: int = 0, ids: bytes = b"") -> bytes:
    text = orjson.dumps(facts)
    return struct.pack("<BBII", 2, width, num_ids, len(text)) + text + ids


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        *[("deadline", value) for value in ("z", None, "1", True, [])],
        *[("turn", value) for value in (None, "x", 2**64 - 1, 2**31, 0, -1, 1.5, True)],
        *[("prefill", value) for value in (5, [], {})],
        *[("decode", value) for value in (None, 5)],
        *[("media", value) for value in (None, "aa", [1], [None])],
        ("more", 1),
    ],
)
def test_record_with_a_wrong_fact_is_no_record(fact: str, value: object) -> None:
    ids: dict[str, Any] = {"width": 1, "num_ids": 4, "ids": b"1234"}
    assert Record.unpack(record_bytes(FACTS, **ids)).turn == 3
    with pytest.raises(ValueError):
        Record.unpack(record_bytes({**FACTS, fact: value}, **ids))


@pytest.mark.parametrize("facts", [[], None, "x", {}])
def test_record_without_facts_is_no_record(facts: object) -> None:
    with pytest.raises(ValueError):
        Record.unpack(record_bytes(facts))


@pytest.mark.parametrize(("width", "num_ids", "ids"), [(0, 2**32 - 1, b""), (5, 1, b"12345"), (255, 0, b"")])
def test_record_with_numbers_of_no_size_is_no_record(width: int, num_ids: int, ids: bytes) -> None:
    with pytest.raises(ValueError):
        Record.unpack(record_bytes(FACTS, width=width, num_ids=num_ids, ids=ids))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"remote_block_ids": None, "remote_block_hashes": None},
        {"remote_block_ids": [], "remote_block_hashes": []},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": [[], [1, 2], [], [3]]},
        {"remote_block_ids": [[0, 0, 0]]},
        {"remote_block_ids": [[2**40]]},
        {"remote_block_ids": [[2**32 - 1]]},
        {"remote_block_hashes": ["00FF"]},
        {"remote_block_hashes": ["00 ff", "00 ff"]},
        {"remote_block_hashes": ["0f0", "0f0"]},
        {"remote_block_hashes": ["00ff", "00"]},
        {"remote_block_hashes": ["", ""]},
        {"remote_block_hashes": ["not hex!", "not hex!"]},
        {"remote_block_hashes": ["ü", "ü"]},
        {"unknown": "\ud83d"},
        {"unknown": [[[{"a": 1.5}]]]},
    ],
)
def test_offer_survives_packing(change: dict[str, Any]) -> None:
    offer = OFFER.with_(**change)
    again = unpack_offer(pack_offer(offer))
    assert again == offer
    assert again.to_json() == offer.to_json(), "absent keys stay absent"


def test_offer_without_blocks_survives_packing() -> None:
    for offer in (KVTransferParams(), KVTransferParams(do_remote_decode=True)):
        assert unpack_offer(pack_offer(offer)).to_json() == offer.to_json()


def test_offer_is_packed_without_ids_of_the_prompt() -> None:
    assert unpack_offer(pack_offer(OFFER.with_(prompt_token_ids=[1, 2, 3]))).to_json() == OFFER.to_json()


def test_offer_that_is_no_json_cannot_be_packed() -> None:
    odd: Any = []
    for _ in range(3000):
        odd = [odd]
    with pytest.raises(ValueError):
        pack_offer(OFFER.model_copy(update={"unknown": odd}))
    with pytest.raises(ValueError):
        pack_offer(OFFER.with_(unknown={1, 2}))


def offer_bytes(facts: object, tail: bytes = b"") -> bytes:
    text = orjson.dumps(facts)
    return struct.pack("<BI", 2, len(text)) + text + tail


OFFER_FACTS: dict[str, Any] = {"params": {}, "groups": [1], "id_bytes": 1, "hashes": 1, "hash_bytes": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"params": None},
        {"params": {"remote_port": "8"}},
        {"params": {"do_remote_prefill": True, "do_remote_decode": True}},
        {"groups": [-1, 2]},
        {"groups": [2**62]},
        {"groups": 1},
        {"groups": [1.0]},
        {"id_bytes": 0},
        {"id_bytes": 5},
        {"hashes": 2**62, "hash_bytes": 0},
        {"hashes": 0, "hash_bytes": 2**31},
        {"hashes": -1},
        {"hash_bytes": -1},
        {"more": 1},
    ],
)
def test_offer_with_a_wrong_fact_is_no_offer(change: dict[str, Any]) -> None:
    assert unpack_offer(offer_bytes(OFFER_FACTS, b"\x07\xff")).to_json() == {
        "remote_block_ids": [[7]],
        "remote_block_hashes": ["ff"],
    }
    with pytest.raises(ValueError):
        unpack_offer(offer_bytes({**OFFER_FACTS, **change}, b"\x07\xff"))
