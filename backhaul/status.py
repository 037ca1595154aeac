"""`backhaul status`: what a router says of itself and its engines, as a table."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

from pydantic import BaseModel, Field, ValidationError

from backhaul.errors import CommandError
from backhaul.settings import Settings

PATH: Final = "/admin/status"
MAX_BYTES: Final = 16 << 20
MAX_WIDTH: Final = 60


class StatusConfig(Settings):
    """Show what a router says of its engines: their state, what they can do, and what turns do without."""

    url: str = "http://127.0.0.1:8000"
    """Of the router."""
    as_json: Annotated[bool, Field(alias="json")] = False
    """Print what it answers instead of a table."""
    timeout: Annotated[float, Field(gt=0)] = 5.0
    """Seconds to wait for its answer."""


class Fact(BaseModel):
    value: bool | int | str
    source: str


class Lowered(BaseModel):
    capability: str
    words: str


class Engine(BaseModel):
    url: str
    role: str
    state: str
    in_flight: int
    models: list[str]
    num_models: int
    capabilities: dict[str, Fact]
    lowers: list[Lowered]


class Count(BaseModel):
    what: str
    why: str
    count: int


class Status(BaseModel):
    """The part of the answer that is shown."""

    version: str
    ready: bool
    draining: bool
    turns_in_flight: int
    engines: list[Engine]
    turns: dict[str, int]
    plans: dict[str, int]
    last_kv: dict[str, int]
    releases: dict[str, int]
    lowered: list[Count]


def run_status(config: StatusConfig) -> int:
    """Print it. Returns 0 if the router serves turns, 1 if not. Raises CommandError if it does not answer."""
    url = config.url.rstrip("/").removesuffix("/v1")
    answer = fetch(url, config.timeout)
    try:
        status = Status.model_validate_json(answer)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the answer"
        raise CommandError(f"--url {url}: no status of a router: {where}: {first['msg']}") from None
    if config.as_json:
        print(json.dumps(json.loads(answer), indent=2))
    else:
        for line in lines(status, url):
            print(_printable(line))
    return 0 if status.ready else 1


def fetch(url: str, timeout: float) -> bytes:
    """What the router answers. Raises CommandError."""
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"--url {url}: not an address; give it as http://HOST:PORT")
    # No proxy: the router is asked, whatever the environment says of the outside.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url + PATH, timeout=timeout) as answer:
            body: bytes = answer.read(MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            hint = "; is it a router, and not run with --status false?" if error.code == 404 else ""
            raise CommandError(f"--url {url}: answered with status {error.code}{hint}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise CommandError(f"--url {url}: no answer: {getattr(error, 'reason', None) or error}") from None
    if len(body) > MAX_BYTES:
        raise CommandError(f"--url {url}: answered with more than {MAX_BYTES} bytes")
    return body


def lines(status: Status, url: str) -> Iterator[str]:
    state = "draining" if status.draining else "ready" if status.ready else "not ready"
    yield f"backhaul {status.version} at {url}: {state}, {status.turns_in_flight} turns in flight"
    yield ""
    yield from table(
        (
            "ROLE",
            "ENGINE",
            "STATE",
            "IN FLIGHT",
            "KIND",
            "BLOCK",
            "TWO-WAY",
            "STREAMS",
            "TOKENIZE",
            "RELEASE",
            "MODELS",
        ),
        [
            (
                engine.role,
                engine.url,
                engine.state,
                str(engine.in_flight),
                " ".join(_value(engine, name) for name in ("kind", "version") if name in engine.capabilities) or "?",
                *(_value(engine, name) for name in ("block_size", "bidirectional", "streams_carry_params")),
                *(_value(engine, name) for name in ("tokenize", "release")),
                _models(engine),
            )
            for engine in status.engines
        ],
    )
    yield ""
    yield "yes, no: seen or stated; yes*, no*: assumed of its kind and version; ?: not known"
    if any(engine.lowers for engine in status.engines):
        yield ""
        yield "What turns do without:"
        yield from table(
            ("ROLE", "ENGINE", "CAPABILITY", "SO"),
            [(one.role, one.url, lack.capability, lack.words) for one in status.engines for lack in one.lowers],
            limit=120,
        )
    yield ""
    yield "Since its start:"
    yield f"  turns                  {_counts(status.turns)}"
    yield f"  engines chosen for     {_counts(status.plans)}"
    yield f"  KV of the turn before  {_counts(status.last_kv)}"
    yield f"  blocks given back      {_counts(status.releases)}"
    lowered = {f"{one.what} ({one.why})": one.count for one in status.lowered}
    yield f"  done without           {_counts(lowered)}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, limit: int = MAX_WIDTH) -> Iterator[str]:
    """Columns as wide as what is in them."""
    cut = [[cell if len(cell) <= limit else cell[: limit - 1] + "…" for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cut, strict=True)]
    for row in cut:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _value(engine: Engine, name: str) -> str:
    fact = engine.capabilities.get(name)
    if fact is None:
        return "?"
    if not isinstance(fact.value, bool):
        return str(fact.value)
    return ("yes" if fact.value else "no") + ("*" if fact.source == "assumed" else "")


def _models(engine: Engine) -> str:
    more = f" and {engine.num_models - 3} more" if engine.num_models > 3 else ""
    return ", ".join(engine.models[:3]) + more or "-"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "-"


def _printable(text: str) -> str:
    """Names come from engines: nothing of them is for the terminal itself."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
