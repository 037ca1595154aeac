"""The requests the router makes of engines: the two legs of a turn, and giving blocks back.

APIError                an engine refused the request itself (4xx): passed on as it is, nothing is tried again
+-- EngineFault         an engine could not answer, and nothing has reached the client: another engine may
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final, Literal

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from connectors.wire.openai import APIError
from connectors.wire.seal import SEAL_HEADER, SealKeys
from connectors.wire.transfer import KVTransferParams, WireError
from router import jsontext
from router.api.legs import Body, Prefilled
from router.clean import TRANSFER_KEYS
from router.metrics import Metrics
from router.pool import Engine, Pool
from router.reuse import Sent

MAX_ANSWER_BYTES: Final = 256 << 20
IN_ONE_PIECE_BYTES: Final = 1 << 19
RELEASE_SECONDS: Final = 1.0
ABORT_PATH: Final = "/inference/v1/abort_requests"
DRAIN_SECONDS: Final = 0.5
LEAVING: Final = "shutting down"  # what our engine's 503 says then
PASSED_ERROR_HEADERS: Final = ("Retry-After", "WWW-Authenticate")

FaultKind = Literal["unreachable", "disconnected", "timeout", "status", "params", "nonsense"]

log = logging.getLogger("router.upstream")


class EngineFault(APIError):
    def __init__(self, engine: Engine, kind: FaultKind, status: int, message: str, **fields: Any) -> None:
        fields.setdefault("type", "ServiceUnavailableError" if status == 503 else "InternalServerError")
        super().__init__(status, message, **fields)
        self.engine = engine
        self.kind = kind
        self.stale = False
        """Broken off, unanswered, on a connection from before: it may have been closed as we sent."""
        self.may_be_offer = False
        """It answered, and may have failed only at the blocks that it was offered."""

    @property
    def unsent(self) -> bool:
        """The engine never saw the request; what was meant for it can be given to another."""
        return self.kind == "unreachable"


class Stream:
    """A decode engine's answer, once its status is known to be good. What breaks while reading it is EngineFault."""

    def __init__(
        self, upstream: Upstream, engine: Engine, response: aiohttp.ClientResponse, first_byte: float, deadline: float
    ) -> None:
        self.headers = response.headers
        self._engine = engine
        self._upstream = upstream
        self._response = response
        self._first_byte = first_byte
        self._deadline = deadline

    @property
    def is_events(self) -> bool:
        return self._response.content_type == "text/event-stream"

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Only waiting for the engine is timed, not what the caller does in between."""
        loop = asyncio.get_running_loop()
        due, begun = self._first_byte, False
        while True:
            with self._upstream.faults(self._engine):
                async with asyncio.timeout_at(due) as limit:
                    with nullcontext() if begun else self._engine.awaited(limit):
                        chunk = await self._response.content.readany()
            if not chunk:
                return
            begun = True
            yield chunk
            due = min(loop.time() + self._upstream.idle_timeout, self._deadline)

    async def whole(self) -> dict[str, Any]:
        """The body as JSON, for an answer that comes in one piece."""
        with self._upstream.faults(self._engine):
            async with asyncio.timeout_at(self._deadline) as limit:
                with self._engine.awaited(limit):
                    return _json_object(self._engine, self._response, await _read(self._engine, self._response))

    def refusal(self, error: Mapping[str, Any]) -> APIError:
        """The error an engine sent as an event, before anything else, as if it had come with a status."""
        code = error.get("code")
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        return self._upstream.counted(_refusal(self._engine, status, _known_fields(error)))

    def ended_early(self) -> APIError:
        """The stream was over before it began."""
        return self._upstream.counted(_fault(self._engine, "nonsense", 502, "answered nothing"))


@dataclass(frozen=True, slots=True)
class Told:
    headers: CIMultiDictProxy[str]
    body: bytes


class Upstream:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        pool: Pool,
        metrics: Metrics,
        *,
        prefill_timeout: float,
        first_byte_timeout: float,
        idle_timeout: float,
        tokenize_timeout: float,
        seals: SealKeys | None = None,
    ) -> None:
        self._session = session
        self._pool = pool
        self._metrics = metrics
        self._prefill_timeout = prefill_timeout
        self._first_byte_timeout = first_byte_timeout
        self.idle_timeout = idle_timeout
        self._tokenize_timeout = tokenize_timeout
        self._seals = seals

    async def prefill(
        self, engine: Engine, path: str, body: Body, headers: Mapping[str, str], *, deadline: float
    ) -> Prefilled:
        """The prefill leg: the whole answer, or APIError. Deadlines are in event loop time."""
        started = asyncio.get_running_loop().time()
        due = min(started + self._prefill_timeout, deadline)
        with self._timed(engine), self.faults(engine):
            async with asyncio.timeout_at(due) as limit:
                with engine.awaited(limit):
                    async with self._post(engine, path, body, headers) as response:
                        answer = _json_object(engine, response, await _read(engine, response))
        answered_at = asyncio.get_running_loop().time()
        return Prefilled(
            engine=engine.url,
            params=_params_for_decode(engine, answer.get("kv_transfer_params")),
            prompt_token_ids=_prompt_token_ids(answer),
            answered_at=answered_at,
            seconds=answered_at - started,
        )

    @asynccontextmanager
    async def decode(
        self, engine: Engine, path: str, body: Body, headers: Mapping[str, str], *, deadline: float
    ) -> AsyncIterator[Stream]:
        """The decode leg: a good answer, open. Leaving early cuts the connection, which aborts the request there."""
        # An answer in one piece begins only when it is complete: then the turn's own deadline is the limit.
        now = asyncio.get_running_loop().time()
        first_byte = min(now + self._first_byte_timeout, deadline) if body.get("stream") else deadline
        with self._timed(engine):
            async with AsyncExitStack() as stack:
                with self.faults(engine):
                    async with asyncio.timeout_at(first_byte) as limit:
                        with engine.awaited(limit):
                            response = await stack.enter_async_context(self._post(engine, path, body, headers))
                yield Stream(self, engine, response, first_byte, deadline)
                await _drain(response)

    async def tokenize(self, engine: Engine, query: Body, headers: Mapping[str, str]) -> list[int] | None:
        """The ids of a prompt; None if they cannot be had. What may be wrong with the request, its legs will say."""
        ids = None
        try:
            async with (
                asyncio.timeout(self._tokenize_timeout),
                self._post(engine, "/tokenize", query, headers) as response,
            ):
                ids = ids_or_none(_json_object(engine, response, await _read(engine, response)).get("tokens"))
        except (APIError, aiohttp.ClientError, TimeoutError, OSError) as error:
            log.info("prompt not tokenized", extra={"engine": engine.url, "why": type(error).__name__})
        self._metrics.tokenizations.labels("failed" if ids is None else "ok").inc()
        return ids

    async def ask(self, engine: Engine, method: str, target: URL, body: Body | None, headers: CIMultiDict[str]) -> Told:
        """A request that is no turn: the engine's good answer as it is, or APIError. `target` is path and query."""
        with self.faults(engine):
            async with asyncio.timeout(self._prefill_timeout):
                url = URL(engine.url).join(target)
                data = None if body is None else _payload(body)
                async with self._session.request(
                    method, url, data=data, headers=headers, allow_redirects=False
                ) as response:
                    if response.status != 200:
                        raise _refusal(engine, response.status, await _error_fields(engine, response))
                    return Told(response.headers, await _read(engine, response))

    async def abort(self, engine: Engine, request_id: str) -> bool:
        """Whether the engine has ended the request: its answer comes to its end by itself. Raises APIError."""
        body: Body = {"request_ids": [request_id]}
        headers = {} if self._seals is None else {SEAL_HEADER: self._seals.seal(ABORT_PATH, body)}
        with self.faults(engine):
            async with asyncio.timeout(RELEASE_SECONDS), self._post(engine, ABORT_PATH, body, headers) as response:
                answer = _json_object(engine, response, await _read(engine, response))
        return answer.get("aborted") == 1

    async def release(self, params: KVTransferParams) -> None:
        """Tell the owner of blocks that nobody will read them. Best effort: otherwise their lease ends by itself."""
        host, port = params.remote_host or "", params.remote_port
        lease = {"engine_id": params.remote_engine_id, "request_id": params.remote_request_id}
        try:
            url = URL.build(scheme="http", host=host, port=port, path="/kv/release")
            async with asyncio.timeout(RELEASE_SECONDS), self._session.post(url, json=lease) as response:
                result = "ok" if response.status == 200 else "refused"
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):  # or no host at all
            result = "failed"
        self._metrics.releases.labels(result).inc()

    @asynccontextmanager
    async def _post(
        self, engine: Engine, path: str, body: Body, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        sent = Sent()
        if self._seals is not None and any(key in body for key in TRANSFER_KEYS):
            headers = CIMultiDict(headers)  # not a dict, which would keep one of several values
            headers[SEAL_HEADER] = self._seals.seal(path, body)
        try:
            response = await self._session.post(
                engine.url + path, data=_payload(body), headers=headers, allow_redirects=False, trace_request_ctx=sent
            )
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            fault = _broken_off(engine)
            fault.stale = sent.on_reused
            raise fault from error
        try:
            if response.status != 200:
                raise _refusal(engine, response.status, await _error_fields(engine, response))
            yield response
        finally:
            response.release()  # closes the connection if the answer was not read to its end

    @contextmanager
    def _timed(self, engine: Engine) -> Iterator[None]:
        started = time.monotonic()
        try:
            with engine.request():
                yield
        finally:
            self._metrics.leg_seconds.labels(engine.role).observe(time.monotonic() - started)

    @contextmanager
    def faults(self, engine: Engine) -> Iterator[None]:
        """Turn what the network does to an exchange with an engine into EngineFault, counted."""
        try:
            yield
        except EngineFault as fault:
            raise self.counted(fault) from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self._pool.gone(engine, "unreachable")
            raise self.counted(_fault(engine, "unreachable", 503, "cannot be reached")) from error
        except TimeoutError as error:
            raise self.counted(_fault(engine, "timeout", 504, "did not answer in time")) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self.counted(_broken_off(engine)) from error

    def counted(self, error: APIError) -> APIError:
        if isinstance(error, EngineFault):
            self._metrics.leg_failures.labels(error.engine.role, error.kind).inc()
            if error.status == 503 and LEAVING in error.message:
                self._pool.gone(error.engine, LEAVING)
        return error


def _payload(body: Body) -> bytes | BytesIO:
    data = jsontext.dumps_request(body)
    return data if len(data) < IN_ONE_PIECE_BYTES else BytesIO(data)  # sent in pieces, others get their turn between


def gone_for_now(engine: Engine) -> EngineFault:
    """It broke off and nobody can step in: likely it has crashed, and will be back."""
    return _fault(engine, "disconnected", 503, "broke off the connection")


def _broken_off(engine: Engine) -> EngineFault:
    return _fault(engine, "disconnected", 502, "broke off the connection")


def _fault(engine: Engine, kind: FaultKind, status: int, what: str) -> EngineFault:
    headers = {"Retry-After": "1"} if status == 503 else {}
    return EngineFault(engine, kind, status, f"The {engine.role} engine {what}. Try again.", headers=headers)


def _refusal(engine: Engine, status: int, fields: dict[str, Any]) -> APIError:
    """The engine's own error, status and words kept."""
    message = fields.pop("message", None) or f"The {engine.role} engine answered with status {status}."
    if status == 503:
        fields["headers"] = {"Retry-After": "1", **fields.get("headers", {})}
    if status >= 500 and status != 501:
        return EngineFault(engine, "status", status, message, **fields)
    if status == 400 and str(fields.get("param")).startswith("kv_transfer_params"):
        # What it refuses is ours: a client cannot send these.
        return _fault(engine, "params", 502, "refused what the router told it")
    if status >= 400:
        return APIError(status, message, **fields)
    return _fault(engine, "nonsense", 502, f"answered with status {status}, which is no answer")


async def _error_fields(engine: Engine, response: aiohttp.ClientResponse) -> dict[str, Any]:
    """What the body of an error says, in any of the shapes engines use, and the headers that belong to it."""
    text = await _read(engine, response)
    fields: dict[str, Any] = {}
    if response.content_type == "application/json":
        try:
            body = jsontext.loads(text)
        except ValueError:
            body = None
        error = body.get("error", body) if isinstance(body, dict) else None
        fields = _known_fields(error) if isinstance(error, dict) else {"message": error if error else None}
    fields["headers"] = {name: response.headers[name] for name in PASSED_ERROR_HEADERS if name in response.headers}
    return fields


def _known_fields(error: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        key: value for key in ("message", "type", "param", "code") if isinstance(value := error.get(key), str)
    }
    if isinstance(code := error.get("code"), int):
        fields["code"] = code
    return fields


async def _read(engine: Engine, response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise _fault(engine, "nonsense", 502, f"answered with more than {MAX_ANSWER_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _json_object(engine: Engine, response: aiohttp.ClientResponse, text: bytes) -> dict[str, Any]:
    if response.content_type != "application/json":
        raise _fault(engine, "nonsense", 502, f"answered {response.content_type} where JSON was due")
    try:
        body = jsontext.loads(text)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise _fault(engine, "nonsense", 502, "answered with broken JSON")
    return body


def _params_for_decode(engine: Engine, value: object) -> KVTransferParams | None:
    """The prefill engine's transfer params if a decode engine can use them."""
    if value is None:
        log.warning("no transfer params", extra={"engine": engine.url, "why": "it answered without any"})
        return None
    try:
        return KVTransferParams.parse(value).for_decode()
    except WireError as error:
        log.warning("transfer params not usable", extra={"engine": engine.url, "why": str(error)})
        return None


def _prompt_token_ids(answer: Mapping[str, Any]) -> list[int] | None:
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    return ids_or_none(answer.get("prompt_token_ids") or first.get("prompt_token_ids"))


def ids_or_none(value: object) -> list[int] | None:
    """A list of token ids, or None for anything else."""
    if not isinstance(value, list) or not value:
        return None
    return value if all(type(token) is int and 0 <= token < 2**32 for token in value) else None


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read the little after the end of an answer, so that the connection can be used again."""
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            while await response.content.readany():
                pass
    except (aiohttp.ClientError, TimeoutError):
        response.close()
