"""The Kubernetes API, as far as finding engines takes it: list a collection, then watch it."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import orjson
from aiohttp import ClientResponse, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")

PAGE_OBJECTS: Final = 100  # parsed in one go while streams wait: a few milliseconds
MAX_PAGE_BYTES: Final = 64 << 20
MAX_EVENT_BYTES: Final = 8 << 20
MAX_STATUS_BYTES: Final = 64 << 10


class ApiError(Exception):
    """The API server does not give what was asked for."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Expired(ApiError):
    """It no longer knows what happened since then (410): list again."""


def _server(environ: Mapping[str, str] = os.environ) -> str:
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster that the router runs in, and who it is there."""

    directory: Path = SERVICE_ACCOUNT
    """Of the files token, ca.crt and namespace. They are replaced while the router runs."""
    server: str = field(default_factory=_server)
    """URL of the API server; empty outside of a cluster."""
    allow_http: bool = False
    """For tests: talk to the server without TLS."""
    answer_seconds: float = 10.0
    """For one page of a list, or the beginning of a watch."""
    watch_seconds: int = 60
    """Then the server ends a watch, and the collection is listed again: so long at most, nothing is noticed on a
    connection that is dead without saying so."""
    grace_seconds: float = 5.0
    """Beyond which a watch that the server did not end is cut."""
    longest_pause: float = 10.0
    """Seconds between two tries while there are errors."""

    def check(self) -> None:
        """Raises ValueError where nothing can be asked, now or ever."""
        if not self.server:
            raise ValueError("the router does not run in Kubernetes: KUBERNETES_SERVICE_HOST is not set")
        if not self.server.startswith("https://") and not self.allow_http:
            raise ValueError(f"{self.server}: the API server is asked over https only")
        try:
            self.token()
            self.tls()
        except (OSError, ApiError) as error:
            raise ValueError(f"{error}; the router's pod needs its service account's token") from None

    def token(self) -> str:
        """Raises OSError or ApiError."""
        token = (self.directory / "token").read_bytes().decode("ascii", "replace").strip()
        if not token or not token.isprintable():
            raise ApiError(f"{self.directory / 'token'}: not a token")
        return token

    def namespace(self) -> str:
        """The router's own. Raises OSError."""
        return (self.directory / "namespace").read_bytes().decode("ascii", "replace").strip()

    def tls(self) -> ssl.SSLContext | bool:
        """Raises OSError."""
        if self.server.startswith("http://"):
            return True  # aiohttp's default, which is not used
        authority = self.directory / "ca.crt"
        try:
            context = ssl.create_default_context(cafile=authority)
        except ssl.SSLError:
            raise OSError(f"{authority}: not a certificate") from None
        # Clusters' own authorities often lack extensions that newer Pythons insist on.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list."""

    items: list[object]
    version: str
    """Of the whole list; a watch begins there."""
    rest: str
    """Where the next page begins; empty for the last one."""


class Api:
    """A session with the API server."""

    def __init__(self, session: ClientSession, cluster: Cluster) -> None:
        self._session = session
        self._cluster = cluster

    async def page(self, path: str, selector: str, rest: str) -> Page:
        """Raises ApiError, ClientError, OSError."""
        query = {"labelSelector": selector, "limit": str(PAGE_OBJECTS)} | ({"continue": rest} if rest else {})
        async with (
            asyncio.timeout(self._cluster.answer_seconds),
            self._session.get(path, params=query, allow_redirects=False) as response,
        ):
            await _refuse(response)
            answer = _json(await _read(response, MAX_PAGE_BYTES))
        version = at(answer, "metadata", "resourceVersion")
        if not isinstance(version, str) or not isinstance(at(answer, "items"), list | None):
            raise ApiError("the API server's answer is not a list")
        return Page(items(at(answer, "items")), version, str(at(answer, "metadata", "continue") or ""))

    @asynccontextmanager
    async def watch(self, path: str, selector: str, version: str) -> AsyncIterator[AsyncIterator[tuple[str, object]]]:
        """What happened since that version, as type and object, until the server ends it.
        Raises ApiError, ClientError, OSError."""
        query = {
            "labelSelector": selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(self._cluster.watch_seconds),
        }
        async with asyncio.timeout(self._cluster.answer_seconds):
            response = await self._session.get(path, params=query, allow_redirects=False)
        async with response:
            async with asyncio.timeout(self._cluster.answer_seconds):
                await _refuse(response)
            yield _events(response)


@asynccontextmanager
async def connect(cluster: Cluster) -> AsyncIterator[Api]:
    """With the token and the authority of now. Raises OSError or ApiError if they cannot be read."""
    headers = {
        "Authorization": f"Bearer {cluster.token()}",
        "Accept": "application/json",
        "Accept-Encoding": "identity",
    }
    async with ClientSession(
        cluster.server,
        headers=headers,
        connector=TCPConnector(ssl=cluster.tls()),
        cookie_jar=DummyCookieJar(),
        timeout=ClientTimeout(total=None, sock_connect=cluster.answer_seconds),
    ) as session:
        yield Api(session, cluster)


async def _events(response: ClientResponse) -> AsyncIterator[tuple[str, object]]:
    rest = b""
    async for part in response.content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise ApiError(f"an event of a watch has more than {MAX_EVENT_BYTES} bytes")
        for line in filter(None, lines):
            event = _json(line)
            kind, value = at(event, "type"), at(event, "object")
            if kind == "ERROR":
                raise _error(at(value, "code"), at(value, "message"))
            yield str(kind), value


async def _refuse(response: ClientResponse) -> None:
    """Raises what it is if it is no good answer."""
    if response.status != 200:
        text = await _read(response, MAX_STATUS_BYTES)
        try:
            message = at(_json(text), "message")
        except ApiError:
            message = None
        raise _error(response.status, message)


def _error(status: object, message: object) -> ApiError:
    number = status if isinstance(status, int) else 0
    text = f"the API server says {number}: {message if isinstance(message, str) else 'no reason given'}"
    return Expired(text, number) if number == 410 else ApiError(text, number)


async def _read(response: ClientResponse, limit: int) -> bytes:
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > limit:
            raise ApiError(f"an answer of the API server has more than {limit} bytes")
    return bytes(body)


def _json(text: bytes) -> object:
    try:
        value: object = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise ApiError("an answer of the API server is not JSON") from None
    return value


def at(value: object, *path: str) -> object:
    """What an object of the API has there, or None."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def items(value: object) -> list[object]:
    """Those of a list; none if it is no list."""
    return value if isinstance(value, list) else []


def word(value: object) -> str:
    return value if isinstance(value, str) else ""
