"""What encoders said of a turn's media: matched to them, and put into the bodies of its legs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from connectors.wire.transfer import ECItem, ECTransferParams
from router.api.legs import Body
from router.media import Described, Medium, rewritten

Items = Mapping[str, ECItem]
"""By identifier: where the encoding of one medium lies. A film may have a second one, of its sound."""

_OF_THE_BATCH: Final = "item_indices"
"""Counts within the request to the encoder, and says nothing of any other."""


def match(media: Sequence[Medium], told: ECTransferParams) -> dict[bytes, Items] | None:
    """What was told of each of the media that one request was about, by their keys; None if that cannot be said.

    An encoder may leave some out, and names pictures that turn out to be the same only once.
    """
    if len(media) == 1:
        items = dict(told.items)
        return {media[0].key: items} if items and _is_one(media[0], items) else {} if not items else None
    found: defaultdict[bytes, dict[str, ECItem]] = defaultdict(dict)
    for identifier, item in told.items.items():
        if item.item_indices:
            if max(item.item_indices) >= len(media):
                return None
            own = [media[index] for index in item.item_indices]
        else:
            own = [one for one in media if one.uuid == identifier]
        if not own:
            return None
        for one in own:
            found[one.key][identifier] = item
    if any(not _is_one(one, found[one.key]) for one in media if one.key in found):
        return None
    return dict(found)


def _is_one(medium: Medium, items: Items) -> bool:
    """Whether this can be one medium."""
    modalities = [item.modality or medium.kind for item in items.values()]
    return modalities == [medium.kind] or (medium.kind == "video" and sorted(modalities) == ["audio", "video"])


@dataclass(frozen=True, slots=True)
class Encodings:
    """For the engine that prefills: where encodings lie. With `described`, for the others too: what media look like."""

    params: ECTransferParams | None = None
    described: Mapping[int, Described] = field(default_factory=dict)
    """By the numbers of all media of the request, or empty."""

    @property
    def rewrites(self) -> bool:
        return bool(self.described)

    def shown(self, body: Body) -> Body:
        """The client's body as engines get to see it."""
        return {**body, "messages": rewritten(body["messages"], self.described)} if self.described else body

    def put_into(self, leg: Body) -> Body:
        """The leg's body, with the transfer params."""
        return leg if self.params is None else {**leg, "ec_transfer_params": self.params.to_json()}


NONE: Final = Encodings()


def merged(found: Mapping[bytes, Items]) -> ECTransferParams | None:
    """All that encoders told of the media of one turn."""
    told: dict[str, Any] = {}
    for items in found.values():
        for identifier, item in items.items():
            told[identifier] = {k: v for k, v in item.model_dump(exclude_unset=True).items() if k != _OF_THE_BATCH}
    return ECTransferParams.parse(told) if told else None


def descriptions(media: Sequence[Medium], found: Mapping[bytes, Items]) -> dict[int, Described]:
    """Of all of the media, or none: an engine that fetches one may as well fetch the others."""
    described: dict[int, Described] = {}
    for medium in media:
        items = list(found.get(medium.key, {}).items())
        if len(items) != 1 or not items[0][1].metadata:
            return {}
        identifier, item = items[0]
        one = Described(identifier, item.modality or medium.kind, item.metadata or {})
        described.update(dict.fromkeys(medium.numbers, one))
    return described
