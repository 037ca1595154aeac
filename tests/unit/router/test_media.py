"""Which media a request has: wherever they stand, each once, by their content."""

from __future__ import annotations

from typing import Any

import pytest

from router.conversation import media_digests
from router.media import Described, find, rewritten

TEXT = {"type": "text", "text": "What is it?"}
PNG = {"url": "data:image/png;base64,AAAA"}


def image(name: str = "AAAA", **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}, **more}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        (image(), "image"),
        ({"image_url": PNG}, "image"),
        ({"type": "image_url", "image_url": "https://example.org/a.png"}, "image"),
        ({"type": "input_image", "image_url": PNG["url"]}, "image"),
        ({"type": "audio_url", "audio_url": {"url": "https://example.org/a.wav"}}, "audio"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "audio"),
        ({"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}, "video"),
    ],
)
def test_media_of_every_kind_are_found(part: dict[str, Any], kind: str) -> None:
    [found] = find([user(TEXT, part)])
    assert (found.kind, found.numbers) == (kind, (0,))


@pytest.mark.parametrize(
    "part",
    [
        "text",
        None,
        5,
        TEXT,
        {},
        {"type": "image_url"},
        {"type": "image_url", "image_url": None, "uuid": "known"},
        {"type": "image_url", "image_url": {"url": ""}},
        {"type": "image_url", "image_url": {"url": 5}},
        {"type": "image_url", "image_url": [PNG]},
        {"type": ["image_url"], "image_url": PNG},
        {"type": "input_image", "file_id": "f"},
        {"type": "input_audio", "input_audio": {"format": "wav"}},
        {"type": "image_embeds", "image_embeds": "AAAA"},
        {"type": "file", "file": {"file_data": "AAAA"}},
    ],
    ids=str,
)
def test_what_holds_nothing_to_encode_is_passed_over(part: object) -> None:
    assert find([user(part)]) == []


@pytest.mark.parametrize("messages", [None, "text", 5, [], [None, 5, "x"], [{"role": "user"}], [{"content": "text"}]])
def test_requests_without_parts_have_no_media(messages: object) -> None:
    assert find(messages) == []


def test_same_content_is_one_medium() -> None:
    messages = [user(image(), TEXT, image("B")), user({"type": "hologram"}, image(), image("B"))]
    one, two = find(messages)
    assert (one.numbers, two.numbers) == ((0, 3), (1, 4))
    assert one.part == messages[0]["content"][0]
    assert len(media_digests(messages)) == 5


def test_two_names_for_one_content_are_two_media() -> None:
    """To vLLM they are, which would look for both."""
    found = find([user(image(uuid="one"), image(uuid="two"), image(uuid="one"), image())])
    assert [(one.uuid, one.numbers) for one in found] == [("one", (0, 2)), ("two", (1,)), (None, (3,))]


def test_one_name_for_two_contents_is_two_media() -> None:
    assert len({one.key for one in find([user(image("A", uuid="x"), image("B", uuid="x"))])}) == 2


def test_how_to_look_at_it_is_part_of_the_content() -> None:
    low = {"type": "image_url", "image_url": {**PNG, "detail": "low"}}
    assert len(find([user(image(), low)])) == 2


def test_picture_of_a_response_is_that_of_a_chat() -> None:
    [one] = find([user({"type": "input_image", "image_url": PNG["url"], "uuid": "x"}, image(uuid="x"))])
    assert one.numbers == (0, 1)
    assert one.part == {"type": "image_url", "image_url": PNG, "uuid": "x"}


def test_descriptions_take_the_place_of_media_and_of_nothing_else() -> None:
    messages = [{"role": "system", "content": "Look."}, user(image(), TEXT, image("B")), user(TEXT, image())]
    before = repr(messages)
    one, two = Described("a", "image", {"grid": [1]}), Described("b", "image", {"grid": [2]})
    system, first, second = rewritten(messages, {0: one, 1: two, 2: one})
    a = {"type": "image_embeds", "image_embeds": {"grid": [1]}, "uuid": "a"}
    b = {"type": "image_embeds", "image_embeds": {"grid": [2]}, "uuid": "b"}
    assert system is messages[0]
    assert (first["content"], second["content"]) == ([a, TEXT, b], [TEXT, a])
    assert repr(messages) == before
