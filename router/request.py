"""One turn as the client asked for it, and what is known of it so far."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

from multidict import CIMultiDictProxy

from connectors.wire.ids import TokenIds
from connectors.wire.openai import bad_request
from connectors.wire.transfer import KVTransferParams
from router import headers
from router.api.legs import Endpoint
from router.body import read_object
from router.clean import without_engine_talk
from router.context import Request, Router
from router.conversation import Conversation, Scope, identify, media_digests, name_of
from router.encodings import NONE, Encodings
from router.faults import Failure
from router.member import Engine
from router.report import Report
from router.store import Claimed
from router.verify import Why

MAX_MEDIA = 1024
"""In one request: each may be a request to an encoder, and is part of what is remembered of the conversation."""


@dataclass(slots=True)
class Past:
    """What is known of the turn before, and what of it this turn can use."""

    claimed: Claimed | None = None
    in_hand: bool = False
    """Whether the claimed offer is ours to give, to put back or to release. It is not while a prefill engine has it."""
    prompt_ids: TokenIds | None = None
    """Of the new prompt, if an engine told."""
    num_known: int = 0
    """How many of them the last decode engine has computed KV for."""
    offer: KVTransferParams | None = None
    """What a prefill engine may be offered: the claimed offer, cut to what serves this prompt."""
    why: Why = "no_record"

    @property
    def num_new(self) -> int | None:
        """Prompt tokens beyond the known ones, if that can be said."""
        return None if self.prompt_ids is None else len(self.prompt_ids) - self.num_known

    def lose(self) -> None:
        """The last turn's blocks are of no more use to this one."""
        self.in_hand, self.offer, self.num_known, self.why = False, None, 0, "gone"


@dataclass(slots=True)
class Turn:
    endpoint: Endpoint
    tenant: str
    """Whose it is, as a digest."""
    task: asyncio.Task[object]
    """Serves the turn."""
    body: dict[str, Any]
    """The client's, without what only router and engines may say to each other."""
    headers: str
    """For the legs, as they are sent."""
    name: str
    """What engines know its legs by; nobody else does."""
    model: str
    priority: int
    """Among those that wait for room; the lowest first."""
    alone: str | None
    several: bool
    """There will be no one answer to go on from."""
    conversation: Conversation
    media: tuple[str, ...]
    """Digests of what in the messages is no text."""
    explain: bool
    deadline: float
    """Event loop time."""
    report: Report
    past: Past = field(default_factory=Past)
    """Of the turn before."""
    remembered: bool = False
    """It has left a record itself."""
    blocks: KVTransferParams | None = None
    """Held for this turn by a prefill engine, and not taken by a decode engine yet."""
    prefilled_by: str | None = None
    """The last prefill engine that has computed its prompt, and has it in its cache now."""
    avoid: set[str] = field(default_factory=set)
    """Engines that failed this turn."""
    failures: list[Failure] = field(default_factory=list)
    """Of engines that had the request."""
    unsent: defaultdict[str, int] = field(default_factory=partial(defaultdict, int))
    """How many engines, by role, have not taken it on."""
    excused: bool = False
    """A decode engine has failed it at the blocks it was given, and was asked again."""
    engine: Engine | None = None
    """Works on it now."""
    aborted: bool = False
    """Its client has asked for its end."""
    encodings: Encodings = NONE
    """What encoders said of its media, for this attempt."""
    raw_media: bool = False
    """Descriptions in the place of its media may have failed an engine, which gets the media from now on."""
    encodings_excused: bool = False
    """An engine has failed it that was to fetch encodings, and was asked again."""
    encoders_lost: set[str] = field(default_factory=set)
    """That broke off while they had its media."""
    answered: bool = False
    """Its answer has come to its end, one way or the other: what is left is not for an abort to break off."""

    @property
    def may_go_on(self) -> bool:
        """Whether there may be a next turn, which finds what this one leaves."""
        return self.conversation.may_be_found and not self.several and self.alone != "beam_search"


async def read_turn(router: Router, request: Request, endpoint: Endpoint, report: Report) -> Turn:
    """Raises APIError, or web.HTTPException, for a request that cannot be one."""
    given = request.headers
    body = await read_object(request, router.config.max_body_bytes)
    body = without_engine_talk(body, given, refuse=router.config.client_transfer_params == "refuse")
    name = name_of(body, given)
    body.pop("conversation_id", None)
    model = _model(router, body)
    salt = body.get("cache_salt")
    tenant = tenant_of(router, given)
    scope = Scope(tenant, model, salt if isinstance(salt, str) else None)
    history = endpoint.history(body)
    media = media_digests(history)
    if len(media) > MAX_MEDIA:
        raise bad_request(f"At most {MAX_MEDIA} media are possible in a request, got {len(media)}.", param="messages")
    several = endpoint.several(body)
    leg = os.urandom(16).hex()
    return Turn(
        endpoint=endpoint,
        name=leg,
        tenant=tenant,
        task=this_task(router),
        body=body,
        headers=headers.onward(given, report.request_id, leg, traced=report.span is not None),
        model=model,
        priority=priority if isinstance(priority := body.get("priority"), int) else 0,
        alone=endpoint.alone(body, ours=several and router.pool.decodes_ours(model)),
        several=several,
        conversation=identify(scope, name, history),
        media=media,
        explain=router.config.explain and given.get("X-Backhaul-Explain") == "1",
        deadline=router.loop.time() + router.config.turn_timeout,
        report=report,
    )


def this_task(router: Router) -> asyncio.Task[object]:
    task = asyncio.current_task(router.loop)
    assert task is not None, "a turn is served by a task"
    return task


def tenant_of(router: Router, given: CIMultiDictProxy[str]) -> str:
    """All values of the header count: a client that sends one of its own beside that of a proxy is somebody else."""
    digest = blake2b(digest_size=16)
    for value in given.getall(router.config.tenant_header, ()):
        text = value.encode(errors="surrogatepass")
        digest.update(len(text).to_bytes(8) + text)
    return digest.hexdigest()


def _model(router: Router, body: dict[str, Any]) -> str:
    model = body.get("model")
    if isinstance(model, str):
        return model
    if model is not None:
        raise bad_request("A string expected.", param="model")
    served = router.pool.models()
    if len(served) > 1:
        raise bad_request("Several models are served here; say which one.", param="model")
    return next(iter(served), "")
