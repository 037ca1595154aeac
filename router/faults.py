"""How a request to an engine can fail, and what an engine's own errors say.

APIError                an engine refused the request itself (4xx): passed on as it is, nothing is tried again
+-- EngineFault         an engine could not answer, and nothing has reached the client: another engine may
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from connectors.wire.openai import APIError
from router import jsontext
from router.capabilities import OURS
from router.client import Response
from router.member import Engine

LEAVING: Final = "shutting down"
"""What our engine's 503 says when it is about to stop."""
PASSED_ERROR_HEADERS: Final = ("Retry-After", "WWW-Authenticate")

FaultKind = Literal["unreachable", "disconnected", "timeout", "status", "params", "nonsense"]


class EngineFault(APIError):
    def __init__(self, engine: Engine, kind: FaultKind, status: int, message: str, **fields: Any) -> None:
        fields.setdefault("type", "ServiceUnavailableError" if status == 503 else "InternalServerError")
        super().__init__(status, message, **fields)
        self.engine = engine
        self.kind = kind
        self.may_be_blocks = False
        """It may have failed only at having the blocks that it was given."""
        self.may_be_encodings = False
        """Or the encodings of its media."""

    @property
    def unsent(self) -> bool:
        """The engine never took the request on; what was meant for it can be given to another. So it is with one of
        ours that is full; one that shuts down may have begun."""
        is_full = self.kind == "status" and self.status == 503 and self.engine.can.kind == OURS
        return self.kind == "unreachable" or (is_full and LEAVING not in self.message)


@dataclass(frozen=True, slots=True)
class Failure:
    """What an engine did to a turn, to be looked at again when more is known."""

    engine: Engine
    kind: FaultKind
    at: float
    """Event loop time."""
    process: bytes
    """Which process of the engine it was, if that is known."""

    @classmethod
    def of(cls, fault: EngineFault) -> Failure:
        engine = fault.engine
        return cls(engine, fault.kind, asyncio.get_running_loop().time(), engine.process)

    @property
    def was_survived(self) -> bool:
        """Whether the engine only broke off: it was seen since, serves, and has not been started anew."""
        engine = self.engine
        seen = engine.process_seen_at > self.at and engine.process == self.process != b""
        return self.kind == "disconnected" and seen and engine.ready


def gone_for_now(engine: Engine) -> EngineFault:
    """It broke off and nobody can step in: likely it has crashed, and will be back."""
    return fault(engine, "disconnected", 503, "broke off the connection")


def fault(engine: Engine, kind: FaultKind, status: int, what: str) -> EngineFault:
    headers = {"Retry-After": "1"} if status == 503 else {}
    return EngineFault(engine, kind, status, f"The {engine.role} engine {what}. Try again.", headers=headers)


def error_fields(response: Response, text: bytes) -> dict[str, Any]:
    """What the body of an error says, in any of the shapes engines use, and the headers that belong to it."""
    fields: dict[str, Any] = {}
    if response.is_json:
        try:
            body = jsontext.loads(text)
        except ValueError:
            body = None
        error = body.get("error", body) if isinstance(body, dict) else None
        fields = known_fields(error) if isinstance(error, dict) else {"message": str(error) if error else None}
    fields["headers"] = {name: response.headers[name] for name in PASSED_ERROR_HEADERS if name in response.headers}
    return fields


def known_fields(error: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        key: value for key in ("message", "type", "param", "code") if isinstance(value := error.get(key), str)
    }
    if isinstance(code := error.get("code"), int):
        fields["code"] = code
    return fields
