"""The HTTP side of a peer: who it is, and leave to read its blocks.

Blocking calls, each with a deadline for the whole exchange: an answer that never comes, never ends, or is not what was
asked for is a `PeerError` in bounded time. What peers send is not trusted.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

MAX_ANSWER_BYTES = 4 << 20
MAX_REASON_CHARS = 200
Service = Literal["kv", "ec"]
"""What is exchanged: KV, or the encoder cache. The first part of the paths."""
HEADERS = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}

Name = Annotated[str, Field(min_length=1, max_length=512)]
Count = Annotated[int, Field(ge=0)]


class PeerError(Exception):
    """An exchange with a peer came to nothing; the text says why."""

    def __init__(self, message: str) -> None:
        super().__init__(message[:MAX_REASON_CHARS])


class PeerUnreachable(PeerError):
    """No connection, no answer, or none in time."""


class BadAnswer(PeerError):
    """An answer that no Backhaul engine gives."""


class Refused(PeerError):
    """The peer says no, with an OpenAI-shaped error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"HTTP {status} {code}: {message}")
        self.status = status
        self.code = code


def _decode_base64(value: object) -> bytes:
    if isinstance(value, bytes):  # never from JSON
        return value
    if not isinstance(value, str):
        raise ValueError("base64 text expected")
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class AgentInfo(_Answer):
    """`GET /kv/agent`, or `/ec/agent`: identity, layout, and how to reach the peer's memory."""

    version: Annotated[int, Field(ge=1, le=1)]
    """1: claim, read, release."""
    engine_id: Name
    agent_name: Name
    agent_metadata: Annotated[bytes, BeforeValidator(_decode_base64), Field(min_length=1)]
    """Opaque to all but NIXL."""
    base_address: Annotated[int, Field(ge=1, lt=1 << 63)]
    num_blocks: Annotated[int, Field(ge=1, lt=1 << 23)]
    """Bounded: a reader describes each of them to NIXL."""
    block_bytes: Annotated[int, Field(ge=1, lt=1 << 32)]
    kv_layout: Name
    memory: Literal["DRAM", "VRAM"]
    device_id: Annotated[int, Field(ge=0, lt=1 << 16)]

    def to_json(self) -> dict[str, Any]:
        return {**self.model_dump(), "agent_metadata": base64.b64encode(self.agent_metadata).decode()}


class _ClaimAnswer(_Answer):
    valid_for: Annotated[float, Field(gt=0, le=86400)]
    block_ids: Annotated[list[Count], Field(max_length=1 << 20)]
    block_hashes: Annotated[list[str], Field(max_length=1 << 20)]
    claim_id: Name


class _RenewAnswer(_Answer):
    renewed: Count


class _ReleaseAnswer(_Answer):
    released: bool


class _ErrorDetail(BaseModel):
    message: str = ""
    code: str | int | None = None


class _ErrorAnswer(BaseModel):
    error: _ErrorDetail


@dataclass(frozen=True, slots=True)
class Claim:
    """Leave to read `block_ids`; what is not read completely by `valid_until` must be thrown away."""

    block_ids: tuple[int, ...]
    """In token order."""
    block_hashes: tuple[str, ...]
    """What the peer says that they hold, hex."""
    claim_id: str
    """Gives the claim back."""
    sent_at: float
    """Monotonic seconds just before the claim was sent: the peer counts from later on."""
    valid_until: float


A = TypeVar("A", bound=_Answer)


class PeerClient:
    """One peer's HTTP server: one exchange at a time, over a connection that is kept between them.

    Deadlines are in the seconds of time.monotonic.
    """

    def __init__(self, host: str, port: int, service: Service = "kv") -> None:
        self._host = host
        self._port = port
        self._service = service
        self._connection: _Connection | None = None

    def agent(self, deadline: float) -> AgentInfo:
        return self._ask(AgentInfo, "GET", f"/{self._service}/agent", None, deadline)

    def claim(self, engine_id: str, request_id: str, reader: str, deadline: float) -> Claim:
        body = {"engine_id": engine_id, "request_id": request_id, "reader": reader}
        sent_at = time.monotonic()
        answer = self._ask(_ClaimAnswer, "POST", f"/{self._service}/claim", body, deadline)
        valid_until = sent_at + answer.valid_for
        return Claim(tuple(answer.block_ids), tuple(answer.block_hashes), answer.claim_id, sent_at, valid_until)

    def renew(self, engine_id: str, request_ids: Sequence[str], deadline: float) -> int:
        body = {"engine_id": engine_id, "request_ids": list(request_ids)}
        return self._ask(_RenewAnswer, "POST", f"/{self._service}/renew", body, deadline).renewed

    def release(self, engine_id: str, request_id: str, deadline: float, claim_id: str | None = None) -> bool:
        """Nobody will read. The reader that has a claim names it; without it a claimed lease is left alone."""
        body = {"engine_id": engine_id, "request_id": request_id}
        if claim_id is not None:
            body["claim_id"] = claim_id
        return self._ask(_ReleaseAnswer, "POST", f"/{self._service}/release", body, deadline).released

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """From another thread: make the exchange under way fail now."""
        connection = self._connection
        if connection is not None:
            connection.abort()

    def _ask(self, answer: type[A], method: str, path: str, body: object, deadline: float) -> A:
        try:
            status, data = self._exchange(method, path, None if body is None else orjson.dumps(body), deadline)
        except OSError as error:
            raise PeerUnreachable(f"{method} {path}: {error or type(error).__name__}") from None
        except (http.client.HTTPException, ValueError) as error:
            # ValueError comes from names and numbers that the resolver or http.client can make no sense of.
            raise BadAnswer(f"{method} {path}: {type(error).__name__}: {error}") from None
        if 400 <= status < 600:
            raise _refusal(status, data)
        if status != 200:
            raise BadAnswer(f"{method} {path}: HTTP {status}")
        try:
            return answer.model_validate(orjson.loads(data))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise BadAnswer(f"{method} {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        except orjson.JSONDecodeError as error:
            raise BadAnswer(f"{method} {path}: not JSON: {error}") from None

    def _exchange(self, method: str, path: str, body: bytes | None, deadline: float) -> tuple[int, bytes]:
        if self._connection is not None:
            try:
                return self._once(self._connection, method, path, body, deadline)
            except (http.client.RemoteDisconnected, ConnectionError):
                # The peer closed a connection it had kept long enough, and did not see the request.
                self.close()
        self._connection = _Connection(self._host, self._port, deadline)
        return self._once(self._connection, method, path, body, deadline)

    def _once(
        self, connection: _Connection, method: str, path: str, body: bytes | None, deadline: float
    ) -> tuple[int, bytes]:
        keep = False
        try:
            connection.set_deadline(deadline)
            connection.request(method, path, body=body, headers=HEADERS)
            with connection.getresponse() as response:
                data = response.read(MAX_ANSWER_BYTES + 1)
                if len(data) > MAX_ANSWER_BYTES:
                    raise http.client.HTTPException(f"more than {MAX_ANSWER_BYTES} bytes")
                if response.length:
                    raise http.client.IncompleteRead(data, response.length)
                keep = not response.will_close
                return response.status, data
        finally:
            if not keep:
                self.close()


class _Connection(http.client.HTTPConnection):
    """A connection over a socket on which no wait goes past a deadline."""

    sock: _DeadlineSocket | None

    def __init__(self, host: str, port: int, deadline: float) -> None:
        super().__init__(host, port)
        self.sock = _DeadlineSocket.connect_to(host, port, deadline)

    def set_deadline(self, deadline: float) -> None:
        if self.sock is None:
            raise ConnectionResetError("the connection was closed")
        self.sock.deadline = deadline

    def connect(self) -> None:
        """Called by http.client when a request finds the socket gone; a new deadline needs a new object."""
        raise ConnectionResetError("the connection was closed")

    def abort(self) -> None:
        sock = self.sock
        if sock is not None:
            sock.abort()


class _DeadlineSocket(socket.socket):
    """A socket whose reads and writes fail once `deadline` has passed, however slowly the other side drips."""

    deadline: float

    @classmethod
    def connect_to(cls, host: str, port: int, deadline: float) -> _DeadlineSocket:
        plain = socket.create_connection((host, port), timeout=_remaining(deadline))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock = cls(plain.family, plain.type, plain.proto, fileno=plain.detach())
        sock.deadline = deadline
        return sock

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        self.settimeout(_remaining(self.deadline))
        return super().recv_into(*args, **kwargs)

    def sendall(self, *args: Any, **kwargs: Any) -> None:
        self.settimeout(_remaining(self.deadline))
        super().sendall(*args, **kwargs)

    def abort(self) -> None:
        try:
            self.shutdown(socket.SHUT_RDWR)
        except OSError:  # closed meanwhile
            pass


def _remaining(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds


def _refusal(status: int, data: bytes) -> PeerError:
    try:
        detail = _ErrorAnswer.model_validate_json(data).error
    except ValidationError:
        return BadAnswer(f"HTTP {status} without an error body")
    return Refused(status, str(status if detail.code is None else detail.code), detail.message)
