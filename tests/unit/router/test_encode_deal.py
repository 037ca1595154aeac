"""Which encoder gets which media, and how many at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import pytest

from router.encode import batches, deal
from router.media import Medium, find
from router.member import Engine


@dataclass
class Idle:
    url: str
    load: float = 0.0


def encoders(*loads: float) -> list[Engine]:
    return [cast(Engine, Idle(f"http://e{number}:1", load)) for number, load in enumerate(loads)]


def pictures(count: int, first: int = 0) -> list[Medium]:
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": str(number)}} for number in range(first, first + count)
    ]
    return find([{"role": "user", "content": parts}])


def places(media: list[Medium], engines: list[Engine], slack: float = 4) -> dict[bytes, str]:
    return {one.key: engine.url for engine, own in deal(media, engines, slack=slack) for one in own}


def test_same_picture_always_goes_to_the_same_encoder() -> None:
    engines = encoders(0, 0, 0)
    alone = {one.key: places([one], engines)[one.key] for one in pictures(300)}
    assert alone == {one.key: places([one], engines[::-1])[one.key] for one in pictures(300)}
    assert min(Counter(alone.values()).values()) > 70


def test_only_what_a_new_encoder_gets_is_moved() -> None:
    before = {one.key: places([one], encoders(0, 0))[one.key] for one in pictures(300)}
    after = {one.key: places([one], encoders(0, 0, 0))[one.key] for one in pictures(300)}
    assert {after[key] for key in after if after[key] != before[key]} == {"http://e2:1"}


def test_encoder_with_too_much_to_do_is_passed_over() -> None:
    assert set(places(pictures(20), encoders(30, 0)).values()) == {"http://e1:1"}


@pytest.mark.parametrize("count", [2, 7, 40])
def test_media_of_one_request_are_spread(count: int) -> None:
    dealt = deal(pictures(count), encoders(0, 0), slack=1)
    shares = [len(own) for _, own in dealt]
    assert sum(shares) == count
    assert len(shares) == 1 or abs(shares[0] - shares[1]) <= 2
    assert len(shares) == 2 or count == 2


@pytest.mark.parametrize(
    ("count", "limit", "sizes"), [(5, 0, [5]), (5, 2, [2, 2, 1]), (4, 2, [2, 2]), (1, 9, [1]), (0, 0, []), (0, 3, [])]
)
def test_pictures_go_together_up_to_the_limit(count: int, limit: int, sizes: list[int]) -> None:
    dealt = batches(pictures(count), limit)
    assert list(map(len, dealt)) == sizes
    assert [one.key for batch in dealt for one in batch] == [one.key for one in pictures(count)]


@pytest.mark.parametrize("limit", [0, 5])
def test_all_else_goes_alone(limit: int) -> None:
    sound = {"type": "audio_url", "audio_url": {"url": "a"}}
    film = {"type": "video_url", "video_url": {"url": "b"}}
    others = find([{"role": "user", "content": [sound, film]}])
    assert list(map(len, batches([*pictures(1), *others], limit))) == [1, 1, 1]
