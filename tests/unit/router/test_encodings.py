"""What an encoder says is matched to the media it was asked for, or to none."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.wire.transfer import ECTransferParams
from router.encodings import NONE, Encodings, descriptions, match, merged
from router.media import Described, Medium, find

NAMES = ("A", "B", "C")


def pictures(*names: str, uuids: bool = False) -> list[Medium]:
    parts = [
        {"type": "image_url", "image_url": {"url": name}, **({"uuid": name.lower()} if uuids else {})} for name in names
    ]
    return find([{"role": "user", "content": parts}])


def film() -> list[Medium]:
    return find([{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "film"}}]}])


def told(**items: Any) -> ECTransferParams:
    return ECTransferParams.parse(items)


def at(*indices: int, **more: Any) -> dict[str, Any]:
    return {"modality": "image", "item_indices": list(indices), **more}


def names(media: list[Medium], params: ECTransferParams) -> list[list[str]] | None:
    found = match(media, params)
    return None if found is None else [sorted(found.get(one.key, {})) for one in media]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"x": at(0), "y": at(1), "z": at(2)}, [["x"], ["y"], ["z"]]),
        ({"z": at(2), "x": at(0), "y": at(1)}, [["x"], ["y"], ["z"]]),
        ({"x": at(0, 2), "y": at(1)}, [["x"], ["y"], ["x"]]),
        ({"x": at(0, 1, 2)}, [["x"], ["x"], ["x"]]),
        ({"y": at(1)}, [[], ["y"], []]),
        ({}, [[], [], []]),
        ({"x": at(0), "y": at(1), "z": at(3)}, None),
        ({"x": at(0), "y": at(0, 1)}, None),
        ({"x": at(0), "y": {"modality": "image"}}, None),
        ({"x": {}}, None),
        ({"x": at(0) | {"modality": "audio"}}, None),
    ],
    ids=str,
)
def test_items_of_a_batch_go_by_their_indices(params: dict[str, Any], expected: object) -> None:
    assert names(pictures(*NAMES), told(**params)) == expected


def test_items_without_indices_go_by_the_clients_names() -> None:
    params = told(c={"modality": "image"}, a={"modality": "image"}, b={})
    assert names(pictures(*NAMES, uuids=True), params) == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"x": at(0)}, [["x"]]),
        ({"x": {}}, [["x"]]),
        ({"x": at(7)}, [["x"]]),
        ({}, [[]]),
        ({"x": at(0), "y": at(0)}, None),
        ({"x": at(0) | {"modality": "video"}}, None),
    ],
    ids=str,
)
def test_single_medium_needs_no_index(params: dict[str, Any], expected: object) -> None:
    assert names(pictures("A"), told(**params)) == expected


@pytest.mark.parametrize(
    ("modalities", "expected"),
    [
        (["video"], True),
        (["video", "audio"], True),
        (["audio", "video"], True),
        (["audio"], False),
        (["video", "video"], False),
        (["video", "audio", "audio"], False),
    ],
)
def test_film_may_have_sound(modalities: list[str], expected: bool) -> None:
    params = told(**{f"x{number}": {"modality": modality} for number, modality in enumerate(modalities)})
    assert (match(film(), params) is not None) is expected


def test_params_of_all_are_merged_as_they_were_told_but_for_positions() -> None:
    media = pictures("A", "B")
    items = {"x": at(0, peer_host="e1", peer_port=1, extra={"kept": 1}), "y": at(1, peer_host="e2", shape=[4, 8])}
    found = match(media, told(**items))
    assert found is not None
    params = merged(found)
    assert params is not None
    kept = {name: {key: item[key] for key in item if key != "item_indices"} for name, item in items.items()}
    assert params.to_json() == kept
    assert merged({}) is None


def test_bodies_are_copies() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "A"}}]}], "n": 1}
    before = repr(body)
    encodings = Encodings(told(x=at(0)), {0: Described("x", "image", {"grid": [1]})})
    leg = encodings.put_into(encodings.shown(body))
    assert leg["ec_transfer_params"] == {"x": at(0)}
    assert leg["messages"][0]["content"] == [{"type": "image_embeds", "image_embeds": {"grid": [1]}, "uuid": "x"}]
    assert repr(body) == before
    assert NONE.put_into(NONE.shown(body)) is body


@pytest.mark.parametrize(
    "items",
    [
        {"x": at(0, metadata={"grid": [1]})},
        {"x": at(0, metadata={"grid": [1]}), "y": at(1)},
        {"x": at(0, metadata={"grid": [1]}), "y": at(1, metadata={})},
    ],
)
def test_either_all_media_are_described_or_none(items: dict[str, Any]) -> None:
    media = pictures("A", "B")
    found = match(media, told(**items))
    assert found is not None
    assert descriptions(media, found) == {}
    full = match(media, told(x=at(0, metadata={"grid": [1]}), y=at(1, metadata={"grid": [2]})))
    assert full is not None
    assert sorted(descriptions(media, full)) == [0, 1]
