"""Pictures, sound and film in a request's messages: where they stand, which are the same, what takes their place.

Two parts are the same medium if their content is: data or URL, and what the client says of how to look at it. A `uuid`
that the client gives goes to engines with the part. vLLM goes by it instead of the content, so that one picture under
two names is two to it; here it never makes one of two contents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Final, Literal

import orjson

from router import jsontext
from router.conversation import beside_text

Kind = Literal["image", "audio", "video"]
Part = dict[str, Any]

_KINDS: Final[Mapping[str, Kind]] = {
    "image_url": "image",
    "input_image": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "video_url": "video",
}
_WORDS: Final = ("type", "cache_control")
"""Of a part, what is not its content."""


@dataclass(frozen=True, slots=True)
class Medium:
    """One picture, recording or film, however often it appears."""

    kind: Kind
    part: Part
    """As a chat has it."""
    key: bytes
    """Digest of its content and its name."""
    uuid: str | None
    numbers: tuple[int, ...]
    """Its appearances, counted among all parts that are no text, as `media_digests` counts."""


def find(messages: object) -> list[Medium]:
    """The media that an encoder can be given, by their first appearance."""
    found: dict[bytes, Medium] = {}
    for number, (_, part) in enumerate(beside_text(messages)):
        if not isinstance(part, dict) or (told := _told(part)) is None:
            continue
        kind, chat_part = told
        content = {name: value for name, value in chat_part.items() if name not in _WORDS}
        key = blake2b(jsontext.dumps_request([kind, content], option=orjson.OPT_SORT_KEYS), digest_size=16).digest()
        if (first := found.get(key)) is None:
            uuid = part.get("uuid")
            found[key] = Medium(kind, chat_part, key, uuid if isinstance(uuid, str) else None, (number,))
        else:
            found[key] = replace(first, numbers=(*first.numbers, number))
    return list(found.values())


def _told(part: Part) -> tuple[Kind, Part] | None:
    """What it is, and as a chat has it; None if there is nothing in it to be encoded, only the name of something."""
    name = part.get("type")
    if name is None:  # vLLM goes by the key that is there
        name = next((key for key in _KINDS if key in part), None)
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None or name is None:
        return None
    if name == "input_image":
        return _input_image(part)
    content = part.get(name)
    data = content.get("data" if name == "input_audio" else "url") if isinstance(content, dict) else content
    return (kind, part) if isinstance(data, str) and data else None


def _input_image(part: Part) -> tuple[Kind, Part] | None:
    """Of the responses endpoint: the URL is no object, and what is said of it stands beside it."""
    url = part.get("image_url")
    if isinstance(url, dict):  # some clients take one for the other
        url = url.get("url")
    if not isinstance(url, str) or not url:
        return None
    image: Part = {"url": url}
    if part.get("detail") is not None:
        image["detail"] = part["detail"]
    told: Part = {"type": "image_url", "image_url": image}
    return "image", told | ({"uuid": part["uuid"]} if "uuid" in part else {})


@dataclass(frozen=True, slots=True)
class Described:
    """What an encoder says of one medium: enough to lay out its placeholders."""

    identifier: str
    modality: str
    metadata: Mapping[str, Any]

    def part(self) -> Part:
        """What takes the medium's place in a chat."""
        name = f"{self.modality}_embeds"
        return {"type": name, name: dict(self.metadata), "uuid": self.identifier}


def rewritten(messages: list[Any], described: Mapping[int, Described]) -> list[Any]:
    """The messages with descriptions in the place of media, by their numbers."""
    parts: dict[int, dict[int, Part]] = {}
    for number, ((i, j), _) in enumerate(beside_text(messages)):
        if number in described:
            parts.setdefault(i, {})[j] = described[number].part()
    return [
        {**message, "content": [parts[i].get(j, part) for j, part in enumerate(message["content"])]}
        if i in parts
        else message
        for i, message in enumerate(messages)
    ]
