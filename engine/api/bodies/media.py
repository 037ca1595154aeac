"""Pictures in requests: the parts they come in, and what may be said of how they are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from engine.api.bodies.base import Body

MAX_UUID = 256


_KINDS = ("image_url", "image_embeds", "input_image")


def shows_pictures(body: Mapping[str, Any]) -> bool:
    """Whether a body, as it came, has pictures in its messages or input items."""
    return any(
        isinstance(part, dict) and part.get("type") in _KINDS
        for field in ("messages", "input")
        for item in (body[field] if isinstance(body.get(field), list) else ())
        if isinstance(item, dict)
        for key in ("content", "output")
        for part in (item[key] if isinstance(item.get(key), list) else ())
    )


class PicturePart(Body):
    """A content part that is a picture, or that stands for one."""

    type: Literal["image_url", "image_embeds"]
    image_url: str | dict[str, Any] | None = None
    """The URL, or an object that has it as `url`; its `detail` is taken, and changes nothing."""
    image_embeds: str | dict[str, Any] | None = None
    """An encoding: a tensor in base64, or an object that has it as `image_embeds` beside what tells its layout; without
    it, the encoding is known by its `uuid` alone, and the request's ec_transfer_params tell where it lies."""
    uuid: Annotated[str, Field(max_length=MAX_UUID)] | None = None
    """Of a picture: taken, but what names an encoding is what is in the picture, never what a request calls it."""

    @property
    def url(self) -> str | None:
        value = self.image_url.get("url") if isinstance(self.image_url, dict) else self.image_url
        return value if isinstance(value, str) else None


class MediaFields(Body):
    mm_processor_kwargs: dict[str, Any] | None = None
    """How pictures are prepared: do_image_splitting, and size as {"longest_edge": pixels}."""
    media_io_kwargs: dict[str, Any] | None = None
    """How they are read; nothing there can be changed."""


class Range(Body):
    offset: Annotated[int, Field(ge=0)]
    length: Annotated[int, Field(ge=1)]


class Features(Body):
    """Pictures in a prompt of ids, as `/render` tells of them. Each list is by modality, of which there is one."""

    mm_hashes: dict[Literal["image"], list[str]]
    mm_metadata: dict[Literal["image"], list[dict[str, Any]]]
    mm_placeholders: dict[Literal["image"], list[Range]] | None = None
    kwargs_data: dict[Literal["image"], list[None]] | None = None
    """What would bring the pictures themselves: not taken."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        lengths = {
            len(lists.get("image", ()))
            for lists in (self.mm_hashes, self.mm_metadata, self.mm_placeholders, self.kwargs_data)
            if lists is not None
        }
        if len(lengths) > 1:
            raise ValueError("lists of one length expected, an entry for each picture")
        return self

    @property
    def pictures(self) -> list[tuple[str, dict[str, Any]]]:
        """Names and layouts."""
        return list(zip(self.mm_hashes.get("image", ()), self.mm_metadata.get("image", ()), strict=True))


def wrong_with(part: Mapping[str, Any]) -> str | None:
    """What is wrong with a picture's part, if anything, for whoever wrote it."""
    if part.get("type") == "image_url":
        value = part.get("image_url")
        url = value.get("url") if isinstance(value, dict) else value
        return None if isinstance(url, str) and url else "has no url"
    value = part.get("image_embeds")
    if isinstance(value, str) and value:
        return None
    if not isinstance(value, dict):
        return "has no image_embeds"
    tensor = value.get("image_embeds")
    if not isinstance(tensor, str | None):
        return "has image_embeds that are no text"
    return "has neither a tensor nor a uuid" if tensor is None and not isinstance(part.get("uuid"), str) else None
