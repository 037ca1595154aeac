"""Records and offers in a real server: who finds what, who gets the offer, and what becomes of the others."""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from router.metrics import Metrics
from router.record import Record, pack_offer
from router.scripts import DROP
from router.store import STAMP_BYTES, Claimed, Store
from tests.store_parts import count, eventually, names, offer, record, store_at


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(["chat"])


@pytest.fixture
async def store(redis_url: str, metrics: Metrics) -> AsyncIterator[Store]:
    async with store_at(redis_url, metrics=metrics) as store:
        yield store


@pytest.fixture
async def other(redis_url: str) -> AsyncIterator[Store]:
    """That of another router."""
    async with store_at(redis_url) as store:
        yield store


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url) as redis:
        yield redis


@pytest.fixture
def key() -> str:
    return f"test:{secrets.token_hex(8)}"


async def claimed(store: Store, key: str) -> Claimed:
    found = await store.claim(key)
    assert found is not None
    return found


async def test_record_is_for_all_and_the_offer_for_one(store: Store, other: Store, key: str, metrics: Metrics) -> None:
    saved = record()
    assert (await store.save(key, saved, offer())).kept
    claims = await asyncio.gather(*(one.claim(key) for one in [store, other] * 25))
    assert [claim.record for claim in claims if claim is not None] == [saved] * 50
    assert [claim.offer for claim in claims if claim is not None and claim.offer is not None] == [offer()]
    assert len({claim.stamp for claim in claims if claim is not None}) == 1
    assert count(metrics, "claim", "hit") + count(metrics, "claim", "hit_without_offer") == 25


async def test_nothing_saved_nothing_found(store: Store, key: str, metrics: Metrics) -> None:
    assert await store.claim(key) is None
    assert await store.claim(None) is None
    assert count(metrics, "claim", "miss") == 1


async def test_record_without_offer(store: Store, key: str) -> None:
    assert (await store.save(key, record(), None)).orphans == ()
    assert (await claimed(store, key)).offer is None


async def test_newest_turn_stays(store: Store, other: Store, key: str, metrics: Metrics) -> None:
    assert (await other.save(key, record(2), offer("second"))).kept
    late = await store.save(key, record(1), offer("first"))
    assert (late.kept, names(late.orphans), late.stamp) == (False, ["first"], b"")
    found = await claimed(store, key)
    assert (found.record.turn, found.offer) == (2, offer("second"))
    assert count(metrics, "save", "older") == 1


async def test_turn_numbers_are_compared_as_numbers(store: Store, key: str) -> None:
    await store.save(key, record(9), None)
    assert (await store.save(key, record(10), None)).kept
    assert not (await store.save(key, record(9), None)).kept


async def test_of_two_answers_to_one_turn_the_later_stays(store: Store, other: Store, key: str) -> None:
    first = await store.save(key, record(3), offer("first"))
    second = await other.save(key, record(3, ids=(5, 6)), offer("second"))
    assert (second.kept, names(second.orphans)) == (True, ["first"])
    assert first.stamp != second.stamp
    found = await claimed(store, key)
    assert (found.record.token_ids, found.offer, found.stamp) == (array("I", [5, 6]), offer("second"), second.stamp)


async def test_replaced_offer_is_an_orphan_unless_it_was_claimed(store: Store, key: str) -> None:
    await store.save(key, record(1), offer("first"))
    assert names((await store.save(key, record(2), None)).orphans) == ["first"]
    await store.save(key, record(3), offer("third"))
    await claimed(store, key)
    assert (await store.save(key, record(4), offer("fourth"))).orphans == ()


async def test_offer_saved_again_is_no_orphan(store: Store, key: str) -> None:
    await store.save(key, record(1), offer("same"))
    again = await store.save(key, record(2), offer("same"))
    assert (again.kept, again.orphans) == (True, ())
    assert (await claimed(store, key)).offer == offer("same")


async def test_offer_put_back_is_for_the_next_turn(store: Store, other: Store, key: str, redis: Redis) -> None:
    await store.save(key, record(seconds=30), offer())
    first = await claimed(store, key)
    await redis.pexpire(key, 20_000)
    assert await store.put_back(first)
    assert 15_000 < await redis.pttl(key) <= 20_000
    assert not await store.put_back(first), "it is there already"
    assert (await claimed(other, key)).offer == offer()


async def test_offer_of_a_replaced_record_is_not_put_back(store: Store, other: Store, key: str) -> None:
    await store.save(key, record(1), offer("first"))
    first = await claimed(store, key)
    await other.save(key, record(1), None)
    assert not await store.put_back(first)
    assert (await claimed(store, key)).offer is None


async def test_offer_of_an_expired_record_is_not_put_back(store: Store, key: str, redis: Redis) -> None:
    await store.save(key, record(), offer())
    first = await claimed(store, key)
    await redis.delete(key)
    assert not await store.put_back(first)
    assert not await redis.exists(key)


async def test_claim_without_offer_has_nothing_to_put_back(store: Store, key: str, redis: Redis) -> None:
    await store.save(key, record(), None)
    assert await store.put_back(await claimed(store, key))
    assert not await redis.hexists(key, "offer")


async def test_unclaimed_offer_is_taken_by_its_stamp(store: Store, other: Store, key: str, metrics: Metrics) -> None:
    first = await other.save(key, record(1), offer("first"))
    second = await other.save(key, record(2), offer("second"))
    assert await store.take_offer(key, first.stamp) is None
    assert await store.take_offer(key, second.stamp) == offer("second")
    assert await store.take_offer(key, second.stamp) is None
    assert (await claimed(store, key)).record.turn == 2, "the record is still of use"
    assert (count(metrics, "take_offer", "ok"), count(metrics, "take_offer", "gone")) == (1, 2)


async def test_record_does_not_outlive_its_deadline(store: Store, key: str, redis: Redis) -> None:
    late = await store.save(key, record(seconds=-1), offer("late"))
    assert (late.kept, names(late.orphans)) == (False, ["late"])
    assert not await redis.exists(key)
    await store.save(key, record(seconds=30), None)
    assert 25_000 < await redis.pttl(key) <= 30_000
    await redis.hset(key, "record", record(seconds=-1).pack())
    assert await store.claim(key) is not None, "that is for the server to say: no two routers' clocks agree"
    forever = replace(record(2), deadline=1e300)
    assert (await store.save(key, forever, None)).kept
    assert await redis.pttl(key) > 0


async def test_record_expires_in_the_server(store: Store, key: str, redis: Redis) -> None:
    assert (await store.save(key, record(seconds=0.2), offer())).kept

    async def gone() -> bool:
        return not await redis.exists(key)

    await eventually(gone)
    assert await store.claim(key) is None


async def test_huge_record_keeps_its_engines_only(redis_url: str, key: str, metrics: Metrics) -> None:
    async with store_at(redis_url, metrics=metrics, max_record_bytes=4000) as store:
        fits = record(1, ids=tuple(range(1500)))
        assert (await store.save(key, fits, offer("small"))).orphans == ()
        assert (await claimed(store, key)).record == fits
        await store.save(key, fits, offer("again"))
        for huge, blocks in [(tuple(range(2001)), 2), (tuple(range(1500)), 100)]:
            saved = await store.save(key, replace(record(2, ids=huge), media=("m",)), offer("large", blocks))
            assert saved.kept
            assert names(saved.orphans)[-1] == "large"
            found = await claimed(store, key)
            assert (found.record.decode, found.record.turn, found.offer) == ("http://d", 2, None)
            assert not found.record.token_ids
            assert not found.record.media
        assert count(metrics, "save", "oversize") == 2


async def test_offer_that_cannot_be_written_is_an_orphan(store: Store, key: str) -> None:
    odd: Any = []
    for _ in range(3000):
        odd = [odd]
    saved = await store.save(key, record(), offer("odd").model_copy(update={"odd": odd}))
    assert (saved.kept, names(saved.orphans)) == (True, ["odd"])
    assert (await claimed(store, key)).offer is None


async def test_script_cache_may_be_flushed(store: Store, key: str, redis: Redis) -> None:
    for turn in (1, 2):
        await redis.script_flush()
        assert (await store.save(key, record(turn), offer())).kept
        await redis.script_flush()
        found = await claimed(store, key)
        await redis.script_flush()
        assert await store.put_back(found)
        await redis.script_flush()
        assert await store.take_offer(key, found.stamp) == offer()


GOOD = {"record": record().pack(), "turn": "1", "stamp": b"s" * STAMP_BYTES}
LATER = record(7).pack()


@pytest.mark.parametrize(
    "fields",
    [
        {"something": "else"},
        {"turn": "99"},
        {"turn": "99", "stamp": b"s" * STAMP_BYTES},
        {**GOOD, "record": b""},
        {**GOOD, "record": b"garbage", "turn": "99"},
        {**GOOD, "record": LATER[:-1], "turn": "7"},
        {**GOOD, "record": LATER + b"x", "turn": "7"},
        {**GOOD, "record": b"\x01" + LATER[1:], "turn": "7"},
        {**GOOD, "turn": "2"},
        {**GOOD, "turn": "0x63"},
        {**GOOD, "turn": "inf"},
        {**GOOD, "turn": "99999999999"},
        {**GOOD, "turn": "9999999999"},
        {**GOOD, "turn": b"\xff\x00"},
        {**GOOD, "turn": ""},
        {**GOOD, "stamp": b""},
        {**GOOD, "stamp": b"s" * (STAMP_BYTES + 1)},
        {"record": LATER, "turn": "7"},
        {"record": LATER, "stamp": b"s" * STAMP_BYTES},
    ],
)
@pytest.mark.parametrize("expires", [True, False])
async def test_hash_nobody_can_read_is_a_miss_and_gives_way(
    store: Store, key: str, redis: Redis, metrics: Metrics, fields: dict[str, Any], expires: bool
) -> None:
    await redis.hset(key, mapping={**fields, "offer": pack_offer(offer("lost"))})
    if expires:
        await redis.pexpire(key, 60_000)
    assert await store.claim(key) is None
    assert count(metrics, "claim", "unreadable") == 1

    async def gone() -> bool:
        return not await redis.exists(key)

    await eventually(gone)
    assert (await store.save(key, record(1), offer())).kept
    assert await claimed(store, key)


async def test_hash_without_an_end_gives_way_unclaimed(store: Store, key: str, redis: Redis) -> None:
    await redis.hset(key, mapping={**GOOD, "record": LATER, "turn": "7"})
    assert (await store.save(key, record(1), offer())).kept
    assert await redis.pttl(key) > 0


@pytest.mark.parametrize("found", [b"", b"t" * STAMP_BYTES])
async def test_record_saved_before_an_unreadable_one_is_dropped_stays(store: Store, key: str, found: bytes) -> None:
    saved = await store.save(key, record(1), offer())
    assert await store._link.send("EVAL", DROP.text, 1, key, found).future == 0
    assert (await claimed(store, key)).stamp == saved.stamp


@pytest.mark.parametrize("value", [b"", b"garbage", b"\x02\xff\xff\xff\xff", pack_offer(offer())[:-1], b"\x02" * 500])
async def test_offer_nobody_can_read_is_none(
    store: Store, key: str, redis: Redis, metrics: Metrics, value: bytes
) -> None:
    saved = await store.save(key, record(), offer())
    await redis.hset(key, "offer", value)
    assert await store.take_offer(key, saved.stamp) is None
    await redis.hset(key, "offer", value)
    found = await claimed(store, key)
    assert (found.record.turn, found.offer) == (1, None)
    assert count(metrics, "claim", "hit_unreadable_offer") == 1
    await redis.hset(key, "offer", value)
    assert (await store.save(key, record(2), offer())).orphans == ()


@pytest.mark.parametrize("kind", ["string", "list", "set"])
async def test_key_of_another_type_is_a_miss_and_gives_way(
    store: Store, key: str, redis: Redis, metrics: Metrics, kind: str
) -> None:
    async def spoil() -> None:
        await redis.delete(key)
        command = {"string": "SET", "list": "LPUSH", "set": "SADD"}[kind]
        await redis.execute_command(command, key, "x")

    await spoil()
    assert await store.take_offer(key, b"s" * STAMP_BYTES) is None
    assert not await store.put_back(Claimed(key, record(), offer(), b"s" * STAMP_BYTES))
    assert (await store.save(key, record(), offer())).kept, "saved over it"
    assert (await claimed(store, key)).offer == offer()
    await spoil()
    assert await store.claim(key) is None
    assert count(metrics, "claim", "unreadable") == 1

    async def gone() -> bool:
        return not await redis.exists(key)

    await eventually(gone)


async def test_every_operation_is_one_exchange(store: Store, key: str, redis: Redis) -> None:
    async def calls() -> int:
        stats = await redis.info("commandstats")
        return sum(int(one["calls"]) for name, one in stats.items() if name in ("cmdstat_evalsha", "cmdstat_eval"))

    async def run() -> None:
        saved = await store.save(key, record(), offer())
        found = await claimed(store, key)
        assert await store.put_back(found)
        assert await store.take_offer(key, saved.stamp)

    await run()
    before = await calls()
    await run()
    assert await calls() - before == 4


@pytest.mark.parametrize(("vocabulary", "bytes_per_token"), [(49_152, 2.0), (151_936, 3.0)])
async def test_size_of_a_long_conversation(
    store: Store, key: str, redis: Redis, vocabulary: int, bytes_per_token: float
) -> None:
    """100,000 tokens; a block of 16 tokens is 16 bytes of hash and two or three of block id more."""
    tokens = 100_000
    ids = array("I", ((7919 * position) % vocabulary for position in range(tokens)))
    saved = Record(9, "http://p", "http://d", time.time() + 60, ids)
    assert (await store.save(key, saved, offer(num_blocks=tokens // 16))).kept
    assert await redis.hstrlen(key, "record") <= bytes_per_token * tokens + 300
    assert await redis.hstrlen(key, "offer") <= (16 + 3) * tokens // 16 + 1000
    found = await claimed(store, key)
    assert (found.record, found.offer) == (saved, offer(num_blocks=tokens // 16))
