"""The pictures of one request: fetched, prepared off the event loop, and put in their places in the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from connectors.wire.openai import bad_request
from connectors.wire.transfer import ECTransferParams
from engine.api.bodies.media import Features, MediaFields, PicturePart
from engine.api.context import Serving
from engine.api.offload import offload_picture
from engine.formats.base import Pictures
from engine.media.errors import MediaError, SettingsError, TooLarge
from engine.media.fetch import decode_base64, decode_data_url, is_data_url
from engine.media.item import MediaItem
from engine.media.placement import IMAGE_TOKEN, Picture, place
from engine.media.sight import Sight

if TYPE_CHECKING:
    from engine.media.settings import PictureSettings


@dataclass(frozen=True, slots=True)
class Named:
    """Whose encodings a request may use without showing the picture."""

    transfers: ECTransferParams | None
    """Trusted ones; it may use those they name."""
    anybody: bool = False
    """It may name any: nothing will be computed of it."""

    def __contains__(self, name: str) -> bool:
        return self.anybody or (self.transfers is not None and name in self.transfers.items)


async def prepare(
    serving: Serving, body: MediaFields, parts: Sequence[PicturePart], named: Named, *, param: str
) -> list[Picture]:
    """The pictures of these parts, in their order. Raises APIError 400 naming the first that cannot be had."""
    if body.media_io_kwargs and any(body.media_io_kwargs.values()):
        raise bad_request("media_io_kwargs: nothing can be changed there, leave it out", param="media_io_kwargs")
    if not parts:
        return []
    sight = serving.sight
    if sight is None:
        raise bad_request(f"{param}: this model takes no pictures, text only", param=param)
    if len(parts) > sight.max_pictures:
        raise bad_request(
            f"{param}: at most {sight.max_pictures} pictures are possible, got {len(parts)}; "
            "the limit is set by --limit-mm-per-prompt",
            param=param,
        )
    settings = _settings(sight, body.mm_processor_kwargs or {})
    known: dict[str, asyncio.Task[Picture]] = {}
    """Of those that come several times, by their URL."""
    tasks: list[asyncio.Task[Picture]] = []
    for number, part in enumerate(parts):
        if part.url is not None and part.url in known:
            tasks.append(known[part.url])
            continue
        where = f"{param}: picture {number + 1}"
        task = asyncio.ensure_future(_explained(serving, _picture(sight, part, settings, named), where, param))
        tasks.append(task)
        if part.url is not None:
            known[part.url] = task
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def known(serving: Serving, features: Features | None, named: Named) -> list[Picture]:
    """The pictures of a prompt of ids, of which only encodings made elsewhere are known. Raises APIError 400."""
    if features is None or not features.pictures:
        return []
    sight = serving.sight
    if sight is None:
        raise bad_request("features: this model takes no pictures", param="features")
    if len(features.pictures) > sight.max_pictures:
        raise bad_request(f"features: at most {sight.max_pictures} pictures are possible", param="features")
    try:
        return [_named(sight, name, metadata, named) for name, metadata in features.pictures]
    except TooLarge as error:
        raise serving.too_long(f"more than {error.num_rows}", "features") from None
    except MediaError as error:
        raise bad_request(f"features: {error}", param="features") from None


def in_prompt(pictures: Sequence[Picture]) -> Pictures | None:
    """What the model's format puts in their places; the same picture is laid out the same."""
    return Pictures(IMAGE_TOKEN, [picture.layout.text for picture in pictures]) if pictures else None


def placed(serving: Serving, token_ids: Sequence[int], pictures: Sequence[Picture], param: str) -> Sequence[MediaItem]:
    """The pictures with their places in the prompt. Raises APIError 400."""
    if not pictures or serving.sight is None:
        return ()
    try:
        return place(token_ids, pictures, serving.sight.processor.config.image_token_id)
    except MediaError as error:
        raise bad_request(f"{param}: {error}", param=param) from None


def features(media: Sequence[MediaItem]) -> Mapping[str, object]:
    """What a rendered prompt tells of its pictures."""
    return {
        "mm_hashes": {"image": [item.identifier for item in media]},
        "mm_placeholders": placeholders(media),
        "mm_metadata": {"image": [dict(item.metadata) for item in media]},
    }


def placeholders(media: Sequence[MediaItem]) -> Mapping[str, object]:
    """From the first to the last of each picture, with what stands between its tiles."""
    ranges = [{"offset": item.positions[0], "length": item.positions[-1] - item.positions[0] + 1} for item in media]
    return {"image": ranges}


def _settings(sight: Sight, wanted: Mapping[str, object]) -> PictureSettings:
    try:
        return sight.processor.settings.changed(wanted)
    except SettingsError as error:
        where = f"mm_processor_kwargs.{error.field[:40]}"
        raise bad_request(f"{where}: {error}", param=where) from None


async def _picture(sight: Sight, part: PicturePart, settings: PictureSettings, named: Named) -> Picture:
    processor = sight.processor
    if part.type == "image_url":
        url = part.url or ""
        if is_data_url(url):
            return await offload_picture(
                lambda: processor.picture(decode_data_url(url, max_bytes=sight.max_bytes), settings)
            )
        data = await sight.fetcher.fetch(url)
        return await offload_picture(processor.picture, data, settings)
    whole = part.image_embeds
    tensor = whole.get("image_embeds") if isinstance(whole, dict) else whole
    metadata = (
        {key: value for key, value in whole.items() if key != "image_embeds"} if isinstance(whole, dict) else None
    )
    if tensor is None:
        return _named(sight, part.uuid or "", metadata or {}, named)
    if not sight.takes_embeds:
        raise MediaError("this engine takes no encodings from clients; start it with --enable-mm-embeds")
    return await offload_picture(lambda: processor.embeds(decode_base64(tensor), metadata or None))


def _named(sight: Sight, name: str, metadata: Mapping[str, object], named: Named) -> Picture:
    if name not in named:
        raise MediaError("an encoding that is only named must be among the ec_transfer_params of the request")
    return sight.processor.named(name, metadata)


async def _explained(serving: Serving, coming: Awaitable[Picture], where: str, param: str) -> Picture:
    """The picture. Raises APIError 400."""
    try:
        return await coming
    except TooLarge as error:
        raise serving.too_long(f"more than {error.num_rows}", param) from None
    except MediaError as error:
        raise bad_request(f"{where}: {error}", param=param) from None
