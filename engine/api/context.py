"""What handlers work with: the worker's state, from before the model is loaded until it has drained."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import cached_property
from queue import SimpleQueue
from typing import Generic, TypeVar

from aiohttp import web

from connectors.ec import EncoderConnector
from connectors.kv import KVConnector
from connectors.lease import Leases
from connectors.transport import Transport
from connectors.wire.openai import APIError, bad_request, model_not_found, unavailable
from connectors.wire.seal import SealKeys
from engine.api.bodies.base import check_ids
from engine.api.offload import offload
from engine.client import LEAVING, EngineClient
from engine.config import EngineConfig
from engine.formats.base import ChatFormat
from engine.grammars import Grammars
from engine.media.sight import Sight
from engine.messages import Inbox
from engine.metrics import EngineMetrics
from engine.tokenizer import Tokenizer

LONG_TEXT = 8192
"""Characters from which text is tokenized in a thread, so that other requests' tokens keep flowing."""


C = TypeVar("C", KVConnector, EncoderConnector)


@dataclass(frozen=True)
class Side(Generic[C]):
    """What an engine with a connector has for its peers."""

    engine_id: str
    connector: C

    @property
    def transport(self) -> Transport:
        return self.connector.transport

    @property
    def leases(self) -> Leases:
        return self.connector.leases


KVSide = Side[KVConnector]
ECSide = Side[EncoderConnector]


@dataclass(frozen=True)
class Serving:
    """Everything a loaded engine is served with."""

    model_name: str
    tokenizer: Tokenizer
    chat: ChatFormat
    client: EngineClient
    metrics: EngineMetrics
    inbox: SimpleQueue[Inbox]
    vocab_size: int
    """Rows of the embedding: every token id must be below."""
    max_model_len: int
    block_size: int
    model_fingerprint: bytes
    kv: KVSide | None
    ec: ECSide | None = None
    seals: SealKeys | None = None
    """Keys with which transfer params must be sealed; None: whoever reaches this engine is trusted."""
    max_logprobs: int = 20
    """Alternatives that a request may be told for each token."""
    priority_scheduling: bool = False
    sight: Sight | None = None
    """None: the model takes no pictures."""
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.vocab_size)

    def check_model(self, name: str | None) -> None:
        """Raises APIError 404 for a model that is not served here; no name means the one there is."""
        if name is not None and name != self.model_name:
            raise model_not_found(name)

    async def tokenize(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """encode(), of a long text in a thread."""
        return await offload(
            len(text) >= LONG_TEXT, self.encode, text, add_special_tokens=add_special_tokens, param=param
        )

    def encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Raises APIError 400 at once for text that cannot fit, however it falls into tokens."""
        at_least = len(text) // self.tokenizer.max_characters_per_token
        if at_least > self.max_model_len:
            raise self.too_long(f"more than {at_least}", param)
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise bad_request(f"{param}: {error}", param=param) from None

    def check_prompt(self, token_ids: list[int], param: str) -> list[int]:
        """The prompt itself, if the model can take it and answer at least one token."""
        if not token_ids:
            raise bad_request(f"{param}: must not be empty", param=param)
        if len(token_ids) >= self.max_model_len:
            raise self.too_long(str(len(token_ids)), param)
        check_ids(token_ids, self.vocab_size, param)
        return token_ids

    def too_long(self, num_tokens: str, param: str) -> APIError:
        return bad_request(
            f"{param}: the context holds {self.max_model_len} tokens including the answer, "
            f"the prompt has {num_tokens}; shorten it",
            param=param,
            code="context_length_exceeded",
        )


@dataclass
class Worker:
    """The state of the process as its routes see it."""

    config: EngineConfig
    serving: Serving | None = None
    """None while the model loads."""
    draining: bool = False
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, on the server's loop, once the process is to drain and end."""
    failure: str | None = None
    """Why it ends without having been told to."""

    def require_serving(self) -> Serving:
        """Raises APIError 503 while the model loads."""
        if self.serving is None:
            raise unavailable("the model is still loading, try again in a moment", retry_after=2)
        return self.serving

    def require_accepting(self) -> Serving:
        """Raises APIError 503 unless new requests are taken."""
        if self.draining:
            raise unavailable(LEAVING, retry_after=5)
        serving = self.require_serving()
        sides = [side for side in (serving.kv, serving.ec) if side is not None]
        if serving.client.failed or any(side.transport.failed for side in sides):
            raise unavailable(f"{LEAVING}: it has failed and must be restarted", retry_after=5)
        return serving

    def fail(self, reason: str) -> None:
        """Something broke that cannot be put right, though the engine's loop goes on. On the server's loop."""
        self.failure = self.failure or reason
        self.leaving.set()


WORKER = web.AppKey("worker", Worker)
