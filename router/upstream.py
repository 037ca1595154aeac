"""The requests the router makes of engines: the two legs of a turn, and giving blocks back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from multidict import CIMultiDictProxy
from yarl import URL

from connectors.wire.ids import TokenIds
from connectors.wire.openai import APIError
from connectors.wire.seal import SEAL_HEADER, SealKeys
from connectors.wire.transfer import KVTransferParams, WireError
from router import faults, jsontext
from router.api.legs import Body, Prefilled
from router.background import Background
from router.clean import TRANSFER_KEYS
from router.client import Client, Response
from router.client_protocol import (
    ClientError,
    ConnectFailed,
    ConnectTimeout,
    Disconnected,
    Exhausted,
    TooLarge,
)
from router.faults import EngineFault, FaultKind
from router.ids import PROMPT_IDS, TOKENS, read_answer
from router.member import Engine
from router.metrics import SPLICED, Metrics
from router.pool import Pool

MAX_ANSWER_BYTES: Final = 256 << 20
RELEASE_SECONDS: Final = 1.0
ABORT_PATH: Final = "/inference/v1/abort_requests"
DRAIN_SECONDS: Final = 0.5
LEAVING_SECONDS: Final = 0.5
NO_MODEL: Final = "NotFoundError"  # what engines say of a model they do not have; of a path they say something else
JSON: Final = "Content-Type: application/json\r\n"

log = logging.getLogger("router.upstream")


class Leg:
    """One request of a turn to an engine: counted while it lasts, and timed. `end` it in any case.

    What the network does to it is EngineFault, counted.
    """

    def __init__(self, upstream: Upstream, engine: Engine, due: float) -> None:
        """`due`: when its answer must have begun, in event loop time."""
        self.response: Response
        self._upstream = upstream
        self._engine = engine
        self._due = due
        self.started = upstream.loop.time()
        upstream.pool.dispatch(engine)

    async def send(self, path: str, body: Body, headers: str) -> None:
        try:
            self.response = await self._upstream.send(
                self._engine, path, body, headers, self._due, among=self._engine.legs
            )
        except (ClientError, TimeoutError) as error:
            raise self._upstream.fault_of(self._engine, error) from error

    async def whole(self, due: float | None = None, *, known: TokenIds | None = None) -> dict[str, Any]:
        """The answer as JSON, if it is a good one. `known`: what the ids of its prompt probably are."""
        try:
            answer = await self._upstream.good_object(self._engine, self.response, due or self._due, known=known)
            self._engine.answered()
            return answer
        except (ClientError, TimeoutError) as error:
            raise self._upstream.fault_of(self._engine, error) from error

    def end(self) -> None:
        """Leaving early cuts the connection, which aborts the request there."""
        engine = self._engine
        engine.in_flight -= 1
        if (response := getattr(self, "response", None)) is not None:
            engine.legs.discard(response)
            response.release()
        self._upstream.metrics.leg_seconds.observe(engine.role, self._upstream.loop.time() - self.started)


class Decoding(Leg):
    """A decode leg, whose answer may be a stream."""

    def __init__(self, upstream: Upstream, engine: Engine, due: float, deadline: float) -> None:
        super().__init__(upstream, engine, due)
        self._deadline = deadline
        self._has_begun = False

    @property
    def is_accepted(self) -> bool:
        """Whether the engine has begun a good answer: it has seen what it was given."""
        return self.response.status == 200

    @property
    def is_events(self) -> bool:
        return self.response.content_type == "text/event-stream"

    async def begun(self) -> None:
        """Wait for its status to be good."""
        engine, response, upstream = self._engine, self.response, self._upstream
        try:
            await response.begun(self._due)
            if response.status != 200:
                text = await response.read(MAX_ANSWER_BYTES, self._due)
                raise upstream.refusal_in(engine, response, text)
        except (ClientError, TimeoutError) as error:
            raise upstream.fault_of(engine, error) from error

    async def chunk(self) -> bytes:
        """What has come of the body; b"" at its end. Only waiting for the engine is timed, not what the caller does in
        between."""
        response = self.response
        if not (data := response.take()):
            if self._has_begun:
                self._due = min(self._upstream.loop.time() + self._upstream.idle_timeout, self._deadline)
            try:
                data = await response.readany(self._due)
            except (ClientError, TimeoutError) as error:
                raise self._upstream.fault_of(self._engine, error) from error
        if not self._has_begun:
            self._has_begun = True
            self._engine.answered()
        return data

    async def drain(self) -> None:
        """Read the little after the end of a stream, so that the connection can be used again."""
        if self.response.has_ended:
            return
        due = self._upstream.loop.time() + DRAIN_SECONDS
        try:
            while await self.response.readany(due) and self._upstream.loop.time() < due:
                pass
        except (ClientError, TimeoutError):
            pass  # then it is closed

    def refusal(self, error: Mapping[str, Any]) -> APIError:
        """The error an engine sent as an event, before anything else, as if it had come with a status."""
        code = error.get("code")
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        return self._upstream.refusal(self._engine, status, faults.known_fields(error))

    def ended_early(self) -> APIError:
        """The stream was over before it began."""
        return self._upstream.fault(self._engine, "nonsense", 502, "answered nothing")


@dataclass(frozen=True, slots=True)
class Told:
    headers: CIMultiDictProxy[str]
    body: bytes


class Upstream:
    def __init__(
        self,
        client: Client,
        pool: Pool,
        metrics: Metrics,
        background: Background,
        *,
        prefill_timeout: float,
        first_byte_timeout: float,
        idle_timeout: float,
        tokenize_timeout: float,
        seals: SealKeys | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.metrics = metrics
        self.idle_timeout = idle_timeout
        self._client = client
        self.pool = pool
        self._background = background
        self._prefill_timeout = prefill_timeout
        self._first_byte_timeout = first_byte_timeout
        self._tokenize_timeout = tokenize_timeout
        self._seals = seals

    async def prefill(
        self,
        engine: Engine,
        path: str,
        body: Body,
        headers: str,
        *,
        known: TokenIds | None,
        deadline: float,
        left: Callable[[Prefilled | None], None],
        unsent: Callable[[], None],
    ) -> Prefilled:
        """The prefill leg: the whole answer, or APIError. Deadlines are in event loop time. `known`: what the ids of
        the prompt probably are.

        If the caller is cancelled meanwhile, an answer may be on its way, and only it says which blocks to give back:
        `left` gets it, or None if it does not come soon; the request is aborted then, by closing the connection.
        `unsent` is called instead if the engine has not even got the whole request.
        """
        leg = Leg(self, engine, min(self.loop.time() + self._prefill_timeout, deadline))
        ends_here = True
        try:
            try:
                await leg.send(path, body, headers)
            except asyncio.CancelledError:
                unsent()
                raise
            try:
                return self._prefilled(engine, await leg.whole(known=known), leg.started)
            except asyncio.CancelledError:
                ends_here = False
                self._background.start(self._leave(engine, leg, left))
                raise
        finally:
            if ends_here:
                leg.end()

    async def _leave(self, engine: Engine, leg: Leg, left: Callable[[Prefilled | None], None]) -> None:
        prefilled = None
        try:
            answer = await self.good_object(engine, leg.response, self.loop.time() + LEAVING_SECONDS)
            prefilled = self._prefilled(engine, answer, leg.started)
        except (APIError, ClientError, TimeoutError):
            pass
        finally:
            leg.end()
            left(prefilled)

    def _prefilled(self, engine: Engine, answer: Mapping[str, Any], started: float) -> Prefilled:
        answered_at = self.loop.time()
        return Prefilled(
            engine=engine.url,
            params=_params_for_decode(engine, answer.get("kv_transfer_params")),
            prompt_token_ids=_prompt_token_ids(answer),
            answered_at=answered_at,
            seconds=answered_at - started,
        )

    async def decode(self, engine: Engine, path: str, body: Body, headers: str, *, deadline: float) -> Decoding:
        """The decode leg, sent."""
        # An answer in one piece begins only when it is complete: then the turn's own deadline is the limit.
        due = min(self.loop.time() + self._first_byte_timeout, deadline) if body.get("stream") else deadline
        leg = Decoding(self, engine, due, deadline)
        try:
            await leg.send(path, body, headers)
        except BaseException:
            leg.end()
            raise
        return leg

    async def tokenize(self, engine: Engine, query: Body, headers: str) -> TokenIds | None:
        """The ids of a prompt; None if they cannot be had. What may be wrong with the request, its legs will say."""
        ids = None
        due = self.loop.time() + self._tokenize_timeout
        try:
            with await self.send(engine, "/tokenize", query, headers, due) as response:
                answer = await self.good_object(engine, response, due, key=TOKENS)
                ids = TokenIds.of(answer.get(TOKENS))
                if type(num_spliced := answer.get("num_spliced")) is int and num_spliced > 0:
                    self.metrics.tokens.add(SPLICED, by=num_spliced)
            engine.known.saw("tokenize", True)
        except (APIError, ClientError, TimeoutError) as error:
            if isinstance(error, APIError) and error.status in (404, 405) and error.type != NO_MODEL:
                engine.known.saw("tokenize", False)
            log.info("prompt not tokenized", extra={"engine": engine.name, "why": type(error).__name__})
        self.metrics.tokenizations.add("failed" if ids is None else "ok")
        return ids

    async def ask(self, engine: Engine, method: str, target: URL, body: Body | None, headers: str) -> Told:
        """A request that is no turn: the engine's good answer as it is, or APIError. `target` is path and query."""
        due = self.loop.time() + self._prefill_timeout
        url = str(URL(engine.url).join(target))
        data = None if body is None else jsontext.dumps_request(body)
        for again in (False, True):
            try:
                with await self._client.send(method, url, headers, data, due) as response:
                    text = await response.read(MAX_ANSWER_BYTES, due)
                    if response.status != 200:
                        raise self.refusal_in(engine, response, text)
                    return Told(response.headers, text)
            except (ClientError, TimeoutError) as error:
                if again or method != "GET" or not (isinstance(error, Disconnected) and error.stale):
                    raise self.fault_of(engine, error) from error
        raise AssertionError("two tries")

    async def abort(self, engine: Engine, name: str) -> bool:
        """Whether the engine has ended the leg of this name: its answer comes to its end by itself. Raises APIError."""
        body: Body = {"request_ids": [name]}
        headers = JSON
        if self._seals is not None:
            headers += f"{SEAL_HEADER}: {self._seals.seal(ABORT_PATH, body)}\r\n"
        due = self.loop.time() + RELEASE_SECONDS
        try:
            with await self.send(engine, ABORT_PATH, body, headers, due) as response:
                answer = await self.good_object(engine, response, due)
        except (ClientError, TimeoutError) as error:
            raise self.fault_of(engine, error) from error
        return bool(answer.get("aborted"))  # one of ours may be several there

    async def release(self, params: KVTransferParams) -> None:
        """Tell the owner of blocks that nobody will read them. Best effort: otherwise their lease ends by itself."""
        host, port = params.remote_host or "", params.remote_port
        lease = {"engine_id": params.remote_engine_id, "request_id": params.remote_request_id}
        due = self.loop.time() + RELEASE_SECONDS
        try:
            url = str(URL.build(scheme="http", host=host, port=port, path="/kv/release"))
            with await self._client.send("POST", url, JSON, jsontext.dumps(lease), due) as response:
                await response.read(MAX_ANSWER_BYTES, due)
                result = "ok" if response.status == 200 else "refused"
        except (ClientError, TimeoutError, ValueError):  # or no host at all
            result = "failed"
        self.metrics.releases.add(result)

    async def send(
        self,
        engine: Engine,
        path: str,
        body: Body,
        headers: str,
        due: float,
        *,
        among: set[Response] | None = None,
    ) -> Response:
        """Send a request, sealed if it has to be. Raises ClientError."""
        if self._seals is not None and ("kv_transfer_params" in body or "ec_transfer_params" in body):
            headers = f"{headers}{SEAL_HEADER}: {self._seals.seal(path, body)}\r\n"
        data = jsontext.dumps_request(body)
        return await self._client.send("POST", engine.url + path, headers, data, due, among=among)

    async def good_object(
        self,
        engine: Engine,
        response: Response,
        due: float,
        *,
        key: str = PROMPT_IDS,
        known: TokenIds | None = None,
    ) -> dict[str, Any]:
        """The answer's JSON, if its status says that it is good. Raises APIError, ClientError. `key`: where it has the
        ids of a prompt; `known`: what they probably are."""
        text = await response.read(MAX_ANSWER_BYTES, due)
        if response.status != 200:
            raise self.refusal_in(engine, response, text)
        if not response.is_json:
            raise self.fault(engine, "nonsense", 502, f"answered {response.content_type} where JSON was due")
        try:
            body = read_answer(text, key, known)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise self.fault(engine, "nonsense", 502, "answered with broken JSON")
        return body

    def refusal_in(self, engine: Engine, response: Response, text: bytes) -> APIError:
        """What an answer that is not good says."""
        return self.refusal(engine, response.status, faults.error_fields(response, text))

    def refusal(self, engine: Engine, status: int, fields: dict[str, Any]) -> APIError:
        """The engine's own error, status and words kept."""
        message = fields.pop("message", None) or f"The {engine.role} engine answered with status {status}."
        if status == 503:
            told = fields.get("headers", {})
            fields["headers"] = {**told, "Retry-After": str(round(_seconds(told.get("Retry-After", "1"))))}
            if faults.LEAVING in message:
                engine.leaves()
            else:
                engine.spare(_seconds(fields["headers"]["Retry-After"]))
        if status >= 500 and status != 501:
            return self._counted(EngineFault(engine, "status", status, message, **fields))
        if status in (400, 403) and str(fields.get("param")).startswith(TRANSFER_KEYS):
            # What it refuses is ours: a client cannot send these.
            if status == 403:
                log.error("an engine does not accept the seal", extra={"engine": engine.name, "why": message})
            return self.fault(engine, "params", 502, "refused what the router told it")
        if status >= 400:
            return APIError(status, message, **fields)
        return self.fault(engine, "nonsense", 502, f"answered with status {status}, which is no answer")

    def fault_of(self, engine: Engine, error: ClientError | TimeoutError) -> EngineFault:
        """What the network has done to an exchange with an engine."""
        if isinstance(error, ConnectFailed):
            if isinstance(error, ConnectTimeout):
                engine.doubt.set()  # it may be busy, or the network; a look will tell
            else:
                engine.lost("unreachable")
            return self.fault(engine, "unreachable", 503, "cannot be reached")
        if isinstance(error, Exhausted):
            log.error("no connection to an engine", extra={"engine": engine.name, "why": str(error)})
            return self.fault(engine, "unreachable", 503, "cannot be asked: the router has too many connections")
        if isinstance(error, TimeoutError):
            return self.fault(engine, "timeout", 504, "did not answer in time")
        if isinstance(error, TooLarge):
            return self.fault(engine, "nonsense", 502, f"answered with more than {MAX_ANSWER_BYTES} bytes")
        return self.fault(engine, "disconnected", 502, "broke off the connection")

    def fault(self, engine: Engine, kind: FaultKind, status: int, what: str) -> EngineFault:
        return self._counted(faults.fault(engine, kind, status, what))

    def _counted(self, fault: EngineFault) -> EngineFault:
        self.metrics.leg_failures.add(fault.engine.role, fault.kind)
        return fault


def _seconds(retry_after: str) -> float:
    return float(retry_after) if retry_after.isdecimal() and len(retry_after) < 6 else 1.0


def _params_for_decode(engine: Engine, value: object) -> KVTransferParams | None:
    """The prefill engine's transfer params if a decode engine can use them."""
    if value is None:
        log.warning("no transfer params", extra={"engine": engine.name, "why": "it answered without any"})
        return None
    try:
        return KVTransferParams.parse(value).for_decode()
    except WireError as error:
        log.warning("transfer params not usable", extra={"engine": engine.name, "why": str(error)})
        return None


def _prompt_token_ids(answer: Mapping[str, Any]) -> TokenIds | None:
    if told := answer.get(PROMPT_IDS):
        return TokenIds.of(told)
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    return TokenIds.of(first.get(PROMPT_IDS))
