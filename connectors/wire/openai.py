"""OpenAI-shaped errors: the one error both programs raise, and its body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

MAX_MESSAGE: Final = 2000
MAX_PARAM: Final = 200
"""Characters. An error may quote what is wrong with a request, not give all of it back."""


class APIError(Exception):
    """An answer the client can act on: `{"error": {"message", "type", "param", "code"}}` with a status.

    Raised anywhere below a handler, turned into a response by one middleware per program.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "BadRequestError",
        param: str | None = None,
        code: str | int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = status if code is None else code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return error_body(self.message, type=self.type, param=self.param, code=self.code)


def error_body(message: str, *, type: str, param: str | None = None, code: str | int | None = None) -> dict[str, Any]:
    """Return the JSON object of an error response, or of an SSE error event."""
    param = None if param is None else param[:MAX_PARAM]
    return {"error": {"message": message[:MAX_MESSAGE], "type": type, "param": param, "code": code}}


def bad_request(message: str, *, param: str | None = None, code: str | int | None = None) -> APIError:
    return APIError(400, message, param=param, code=code)


def model_not_found(model: str) -> APIError:
    return APIError(
        404,
        f"The model `{model}` does not exist. GET /v1/models lists the models served here.",
        type="NotFoundError",
        param="model",
        code="model_not_found",
    )


def unavailable(message: str, *, retry_after: float = 1.0) -> APIError:
    """503 with `Retry-After`: nothing is wrong with the request, try again."""
    return APIError(
        503,
        message,
        type="ServiceUnavailableError",
        headers={"Retry-After": str(max(1, round(retry_after)))},
    )
