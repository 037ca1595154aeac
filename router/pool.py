"""The engines: what they serve, whether they are up, and how much of our work they have."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal

import orjson

from router.capabilities import OURS
from router.client import Client, Response
from router.client_protocol import ClientError, ConnectFailed, ConnectTimeout
from router.known import Known
from router.plan import EngineView
from router.probe import Probe, kind_of
from router.statement import EngineStatement

Role = Literal["prefill", "decode"]
State = Literal["unknown", "ready", "down"]

FIRST_RETRY_SECONDS: Final = 0.1
FAILURES_UNTIL_DOWN: Final = 3  # a busy engine may miss a probe; one that refuses connections is down at once

MAX_CARDS_BYTES: Final = 16 << 20

log = logging.getLogger("router.pool")


class Engine:
    """One engine in one role, for as long as the router runs."""

    def __init__(self, url: str, role: Role, stated: EngineStatement | None = None) -> None:
        stated = stated or EngineStatement()
        self.url = url
        self.role = role
        self.known = Known(url, role, stated.capabilities())
        self.headers = stated.headers()
        """For questions of our own."""
        self.state: State = "unknown"
        self.models: Mapping[str, Mapping[str, Any]] = {}
        """Model cards by name, as last listed."""
        self.in_flight = 0
        self.dispatched = 0
        self.failures = 0
        self.waits: set[Response] = set()
        """Answers not begun, whose callers could as well ask another engine."""
        self.doubt = asyncio.Event()
        """Set to have the engine looked at before the next look is due."""

    def view(self) -> EngineView:
        return EngineView(
            self.url,
            self.state == "ready",
            frozenset(self.models),
            self.in_flight,
            self.dispatched,
            self.known.now,
            self.known.pulls,
        )

    def is_ours(self, model: str) -> bool:
        """Whether it is a Backhaul engine, which understands more than the engines of others."""
        stated = self.known.stated.kind
        return stated == OURS if stated else self.models.get(model, {}).get("owned_by") == OURS

    def let_down(self) -> None:
        """It does not answer at all: end those waits now."""
        for response in self.waits:
            response.give_up()

    def turn_to(self, state: State, why: str) -> None:
        if state != self.state:
            level = logging.WARNING if state == "down" else logging.INFO
            log.log(level, "engine", extra={"engine": self.url, "role": self.role, "state": state, "why": why})
        self.state = state


class Pool:
    """All engines, each watched by its own task."""

    def __init__(
        self,
        client: Client,
        *,
        prefill: Sequence[str],
        decode: Sequence[str],
        probe_interval: float,
        probe_timeout: float,
        stated: Mapping[str, EngineStatement] = MappingProxyType({}),
    ) -> None:
        self._client = client
        self._interval = probe_interval
        self._timeout = probe_timeout
        self.prefill = tuple(Engine(url, "prefill", stated.get(url)) for url in prefill)
        self.decode = tuple(Engine(url, "decode", stated.get(url)) for url in decode)

    @property
    def engines(self) -> tuple[Engine, ...]:
        return self.prefill + self.decode

    def is_up(self, role: Role) -> bool:
        """Whether an engine of this role is ready."""
        return any(engine.state == "ready" for engine in self.engines if engine.role == role)

    def get(self, role: Role, url: str) -> Engine:
        return next(engine for engine in (self.prefill if role == "prefill" else self.decode) if engine.url == url)

    def one_ready(self, model: str, *, rather: Sequence[str | None]) -> Engine | None:
        """An engine to ask for the ids of a prompt; one of `rather` if it can be."""
        able = [
            engine
            for engine in self.engines
            if engine.state == "ready" and model in engine.models and engine.known.now.tokenize is not False
        ]
        return min(
            able,
            key=lambda one: (one.failures > 0, one.url not in rather, one.role != "prefill", one.in_flight),
            default=None,
        )

    def block_size(self, url: str) -> int | None:
        """Of the decode engine there, if it is known."""
        return next((engine.known.now.block_size for engine in self.decode if engine.url == url), None)

    def decodes_ours(self, model: str) -> bool:
        """Whether all engines that may decode for this model are Backhaul's."""
        able = [engine for engine in self.decode if model in engine.models]
        return bool(able) and all(engine.is_ours(model) for engine in able)

    def models(self) -> dict[str, Mapping[str, Any]]:
        """The models that can be decoded, with the smallest `max_model_len` any engine has for them."""
        cards: dict[str, Mapping[str, Any]] = {}
        for engine in self.decode:
            for name, card in engine.models.items():
                cards.setdefault(name, card)
        return {name: {**card, **self._shortest(name)} for name, card in cards.items()}

    def gone(self, engine: Engine, why: str) -> None:
        """It cannot be reached, or says that it is about to stop: take the engine out, and look again soon."""
        engine.turn_to("down", why)
        engine.doubt.set()

    async def watch(self) -> None:
        """Keep the states true until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for engine in self.engines:
                tasks.create_task(self._watch(engine), name=f"watch {engine.url}")

    async def _watch(self, engine: Engine) -> None:
        delay = FIRST_RETRY_SECONDS
        while True:
            engine.doubt.clear()
            await self._look(engine)
            delay = self._interval if engine.state == "ready" else min(2 * delay, self._interval)
            try:
                async with asyncio.timeout(delay):
                    await engine.doubt.wait()
                delay = FIRST_RETRY_SECONDS
            except TimeoutError:
                pass

    async def _look(self, engine: Engine) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                with await self._client.request("GET", f"{engine.url}/v1/models", engine.headers) as answer:
                    if answer.status != 200:
                        return self._missed(engine, f"status {answer.status} for /v1/models")
                    cards = _cards(await answer.read(MAX_CARDS_BYTES))
        except (ClientError, TimeoutError, ValueError) as error:
            if isinstance(error, ConnectFailed) and not isinstance(error, ConnectTimeout):
                engine.turn_to("down", "connection refused")
            else:
                self._missed(engine, type(error).__name__)
        else:
            await self._discover(engine, cards)
            engine.models = cards
            engine.failures = 0
            engine.turn_to("ready", "lists " + (", ".join(engine.models) or "no model"))
        return None

    async def _discover(self, engine: Engine, cards: Mapping[str, Mapping[str, Any]]) -> None:
        """Find out what it can do, where it may be another engine than at the last look."""
        if engine.state == "down":
            engine.known.forget()
        if engine.known.stale or engine.failures or engine.state != "ready" or cards.keys() != engine.models.keys():
            probe = Probe(self._client, engine.url, engine.headers, self._timeout)
            only_prefills = engine.role == "prefill" and all(other.url != engine.url for other in self.decode)
            found = await probe.run(engine.known.stated.kind or kind_of(cards), only_prefills=only_prefills)
            engine.known.found(found, complete=probe.is_complete)

    def _missed(self, engine: Engine, why: str) -> None:
        engine.failures += 1
        if engine.state != "ready" or engine.failures >= FAILURES_UNTIL_DOWN:
            engine.turn_to("down", why)
            engine.let_down()

    def _shortest(self, model: str) -> dict[str, int]:
        lengths = [engine.models[model].get("max_model_len") for engine in self.engines if model in engine.models]
        known = [length for length in lengths if isinstance(length, int)]
        return {"max_model_len": min(known)} if known else {}


def _cards(body: bytes) -> dict[str, Mapping[str, Any]]:
    """The model cards of a `/v1/models` answer. Raises ValueError if it is none."""
    answer = orjson.loads(body)
    cards = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(cards, list) or not all(isinstance(card, dict) and card.get("id") for card in cards):
        raise ValueError("not a list of models")
    return {str(card["id"]): card for card in cards}
