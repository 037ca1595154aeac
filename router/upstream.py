"""The requests the router makes of engines: the two legs of a turn, and giving blocks back.

APIError                an engine refused the request itself (4xx): passed on as it is, nothing is tried again
+-- EngineFault         an engine could not answer, and nothing has reached the client: another engine may
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal

from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from connectors.wire.openai import APIError
from connectors.wire.seal import SEAL_HEADER, SealKeys
from connectors.wire.transfer import KVTransferParams, WireError
from router import jsontext
from router.api.legs import Body, Prefilled
from router.clean import TRANSFER_KEYS
from router.client import Client, Response
from router.client_protocol import ClientError, ConnectFailed, Disconnected, TooLarge
from router.ids import ids_or_none
from router.metrics import Metrics
from router.pool import Engine, Pool

MAX_ANSWER_BYTES: Final = 256 << 20
RELEASE_SECONDS: Final = 1.0
ABORT_PATH: Final = "/inference/v1/abort_requests"
DRAIN_SECONDS: Final = 0.5
LEAVING: Final = "shutting down"  # what our engine's 503 says then
PASSED_ERROR_HEADERS: Final = ("Retry-After", "WWW-Authenticate")
JSON: Final = {"Content-Type": "application/json"}

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
        self, upstream: Upstream, engine: Engine, response: Response, first_byte: float, deadline: float
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
        with self._upstream.faults(self._engine):
            while True:
                if not (chunk := self._response.take()):
                    async with asyncio.timeout_at(due) as limit:
                        with nullcontext() if begun else self._engine.awaited(limit):
                            chunk = await self._response.readany()
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
        client: Client,
        pool: Pool,
        metrics: Metrics,
        *,
        prefill_timeout: float,
        first_byte_timeout: float,
        idle_timeout: float,
        tokenize_timeout: float,
        seals: SealKeys | None = None,
    ) -> None:
        self._client = client
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
                with engine.awaited(limit), await self._post(engine, path, body, headers) as response:
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
            with self.faults(engine):
                async with asyncio.timeout_at(first_byte) as limit:
                    with engine.awaited(limit):
                        response = await self._post(engine, path, body, headers)
            with response:
                yield Stream(self, engine, response, first_byte, deadline)
                await _drain(response)

    async def tokenize(self, engine: Engine, query: Body, headers: Mapping[str, str]) -> list[int] | None:
        """The ids of a prompt; None if they cannot be had. What may be wrong with the request, its legs will say."""
        ids = None
        try:
            async with asyncio.timeout(self._tokenize_timeout):
                with await self._post(engine, "/tokenize", query, headers) as response:
                    ids = ids_or_none(_json_object(engine, response, await _read(engine, response)).get("tokens"))
        except (APIError, ClientError, TimeoutError) as error:
            log.info("prompt not tokenized", extra={"engine": engine.url, "why": type(error).__name__})
        self._metrics.tokenizations.labels("failed" if ids is None else "ok").inc()
        return ids

    async def ask(self, engine: Engine, method: str, target: URL, body: Body | None, headers: CIMultiDict[str]) -> Told:
        """A request that is no turn: the engine's good answer as it is, or APIError. `target` is path and query."""
        with self.faults(engine):
            async with asyncio.timeout(self._prefill_timeout):
                url = str(URL(engine.url).join(target))
                data = None if body is None else jsontext.dumps_request(body)
                with await _good(engine, await self._client.request(method, url, headers, data)) as response:
                    return Told(response.headers, await _read(engine, response))

    async def abort(self, engine: Engine, name: str) -> bool:
        """Whether the engine has ended the leg of this name: its answer comes to its end by itself. Raises APIError."""
        body: Body = {"request_ids": [name]}
        headers = JSON if self._seals is None else {**JSON, SEAL_HEADER: self._seals.seal(ABORT_PATH, body)}
        with self.faults(engine):
            async with asyncio.timeout(RELEASE_SECONDS):
                with await self._post(engine, ABORT_PATH, body, headers) as response:
                    answer = _json_object(engine, response, await _read(engine, response))
        return bool(answer.get("aborted"))  # one of ours may be several there

    async def release(self, params: KVTransferParams) -> None:
        """Tell the owner of blocks that nobody will read them. Best effort: otherwise their lease ends by itself."""
        host, port = params.remote_host or "", params.remote_port
        lease = {"engine_id": params.remote_engine_id, "request_id": params.remote_request_id}
        try:
            url = str(URL.build(scheme="http", host=host, port=port, path="/kv/release"))
            async with asyncio.timeout(RELEASE_SECONDS):
                with await self._client.request("POST", url, JSON, jsontext.dumps(lease)) as response:
                    result = "ok" if response.status == 200 else "refused"
        except (ClientError, TimeoutError, ValueError):  # or no host at all
            result = "failed"
        self._metrics.releases.labels(result).inc()

    async def _post(self, engine: Engine, path: str, body: Body, headers: Mapping[str, str]) -> Response:
        """A good answer, which the caller releases."""
        if self._seals is not None and any(key in body for key in TRANSFER_KEYS):
            headers = CIMultiDict(headers)  # not a dict, which would keep one of several values
            headers[SEAL_HEADER] = self._seals.seal(path, body)
        data = jsontext.dumps_request(body)
        return await _good(engine, await self._client.request("POST", engine.url + path, headers, data))

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
        except ConnectFailed as error:
            self._pool.gone(engine, "unreachable")
            raise self.counted(_fault(engine, "unreachable", 503, "cannot be reached")) from error
        except TimeoutError as error:
            raise self.counted(_fault(engine, "timeout", 504, "did not answer in time")) from error
        except ClientError as error:
            broken = _broken_off(engine)
            broken.stale = isinstance(error, Disconnected) and error.stale
            raise self.counted(broken) from error

    def counted(self, error: APIError) -> APIError:
        if isinstance(error, EngineFault):
            self._metrics.leg_failures.labels(error.engine.role, error.kind).inc()
            if error.status == 503 and LEAVING in error.message:
                self._pool.gone(error.engine, LEAVING)
        return error


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
    if status in (400, 403) and str(fields.get("param")).startswith(TRANSFER_KEYS):
        # What it refuses is ours: a client cannot send these.
        if status == 403:
            log.error("an engine does not accept the seal", extra={"engine": engine.url, "why": message})
        return _fault(engine, "params", 502, "refused what the router told it")
    if status >= 400:
        return APIError(status, message, **fields)
    return _fault(engine, "nonsense", 502, f"answered with status {status}, which is no answer")


async def _good(engine: Engine, response: Response) -> Response:
    """The answer, if its status says so. Raises APIError."""
    if response.status == 200:
        return response
    with response:
        raise _refusal(engine, response.status, await _error_fields(engine, response))


async def _error_fields(engine: Engine, response: Response) -> dict[str, Any]:
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


async def _read(engine: Engine, response: Response) -> bytes:
    try:
        return await response.read(MAX_ANSWER_BYTES)
    except TooLarge:
        raise _fault(engine, "nonsense", 502, f"answered with more than {MAX_ANSWER_BYTES} bytes") from None


def _json_object(engine: Engine, response: Response, text: bytes) -> dict[str, Any]:
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


async def _drain(response: Response) -> None:
    """Read the little after the end of an answer, so that the connection can be used again."""
    if response.has_ended:
        return
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            while await response.readany():
                pass
    except (ClientError, TimeoutError):
        pass  # then it is closed
