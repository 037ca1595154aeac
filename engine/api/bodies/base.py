"""What all request bodies share: how they are read, and how what is wrong with one is told.

Read strictly (no `"8"` for 8), with the ranges vLLM has. Fields nobody knows are ignored, as vLLM does; fields
whose function this engine lacks are refused by name when they ask for it, never dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from connectors.wire.openai import APIError, bad_request

TokenId = Annotated[int, Field(ge=0)]
# Lists end at their first wrong item: an error for each of a million would be made before one is shown.
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
MAX_TOKEN_IDS = 1 << 20
OFF = (None, False)
"""Values of a switch that do not ask for what it stands for."""

B = TypeVar("B", bound=BaseModel)


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


def parse(model: type[B], body: Mapping[str, Any]) -> B:
    """Validate a body. Raises APIError 400 whose message and `param` name the first field that is wrong."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> APIError:
    first = error.errors(include_url=False, include_context=False)[0]
    path = _path(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        message = "required, but missing"
    elif isinstance(first["input"], bool | int | float):
        message = f"{message}, got {first['input']!r}"
    return bad_request(f"{path}: {message[:1].lower()}{message[1:]}", param=path)


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content", "str")` -> `messages[0].content`: pydantic's names of union members left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in ("str", "list[int]") and not part.startswith(("list[", "constrained-")):
            path += f".{part}" if path else part
    return path


def refuse_unsupported(body: Mapping[str, Any], table: Mapping[str, tuple[object, ...]]) -> None:
    for field, off in table.items():
        value = body.get(field)
        if not any(type(value) is type(harmless) and value == harmless for harmless in off):
            raise bad_request(f"{field}: not supported by this engine, leave it out", param=field)


def at_most(limit: int, value: object, what: str) -> object:
    """The value, if it is not a collection too long; looked at before its items are."""
    if isinstance(value, list | dict) and len(value) > limit:
        raise ValueError(f"at most {limit} {what} are possible, got {len(value)}")
    return value


def check_ids(ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raises APIError 400 for token ids that the model does not have."""
    if ids and max(ids) >= vocab_size:
        raise bad_request(
            f"{param}: token id {max(ids)} is out of vocabulary, ids end at {vocab_size - 1}", param=param
        )


def is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
