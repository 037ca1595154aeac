"""The bytes of a picture that a request names: in the URL itself, or on a host that the operator allows."""

from __future__ import annotations

import asyncio
import base64
import binascii
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    TCPConnector,
)
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from engine.media.address import Network, is_odd_number, may_connect
from engine.media.errors import MediaError

MAX_REDIRECTS = 3
MAX_URL = 4096
"""Characters of one that is not a data URL."""
AT_ONCE = 8
"""Pictures being fetched; others wait."""
_REDIRECTS = (301, 302, 303, 307, 308)
_TYPES = ("image/", "application/octet-stream", "binary/octet-stream")
_CHUNK = 1 << 16

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> its addresses; OSError if there are none."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """As the system resolves names."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


@dataclass(frozen=True, slots=True)
class Fetcher:
    hosts: Collection[str]
    """As in the setting allowed_media_hosts."""
    networks: Sequence[Network]
    max_bytes: int
    timeout: float
    """Seconds for one picture, redirects included."""
    resolve: Resolve = resolve
    _gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    async def fetch(self, text: str) -> bytes:
        """What an http or https URL holds. Raises MediaError."""
        if len(text) > MAX_URL:
            raise MediaError(f"a URL has at most {MAX_URL} characters, got {len(text)}")
        url = self._checked(text)
        try:
            async with asyncio.timeout(self.timeout), self._gate, self._session() as session:
                for _ in range(MAX_REDIRECTS + 1):
                    async with session.get(url, allow_redirects=False) as response:
                        if response.status not in _REDIRECTS:
                            return await self._body(response)
                        url = self._next(url, response.headers.get("Location", ""))
        except TimeoutError:
            raise MediaError(f"{_shown(url)} took longer than {self.timeout:g} seconds") from None
        except (ClientError, OSError) as error:
            if isinstance(error, ClientConnectorError) and isinstance(error.os_error, _Refused):
                raise MediaError(f"{_shown(url)} is at an address that this engine does not connect to") from None
            raise MediaError(f"{_shown(url)} cannot be reached") from None
        raise MediaError(f"{_shown(url)} redirects more than {MAX_REDIRECTS} times")

    def _checked(self, text: str) -> URL:
        try:
            url = URL(text)
            host, port = url.raw_host, url.port
        except ValueError:
            raise MediaError("not a URL") from None
        if url.scheme not in ("http", "https"):
            raise MediaError("a data URL expected, or one of http or https")
        if not host or port is None or url.user is not None or url.password is not None:
            raise MediaError("a URL with a host and without a user expected")
        name = host.lower()
        allowed = f"{name}:{port}" in self.hosts or (url.is_default_port() and name in self.hosts)
        if not allowed and not ("*" in self.hosts and url.is_default_port()):
            raise MediaError(f"this engine fetches nothing from {name[:80]}: send the picture in a data URL")
        if is_odd_number(name):
            raise MediaError(f"{name[:80]} is no host")
        if _is_literal(name) and not may_connect(name, self.networks):
            raise MediaError(f"{name[:80]} is at an address that this engine does not connect to")
        return url.with_fragment(None)

    def _next(self, url: URL, location: str) -> URL:
        """Where a redirect leads: elsewhere on the same host, or there by https."""
        try:
            following = url.join(URL(location))
        except ValueError:
            raise MediaError(f"{_shown(url)} redirects to no URL") from None
        same = (following.raw_host, following.port) == (url.raw_host, url.port) and following.scheme == url.scheme
        secured = url.scheme == "http" and following.scheme == "https" and following.is_default_port()
        if not location or not (same or (secured and url.is_default_port() and following.raw_host == url.raw_host)):
            raise MediaError(f"{_shown(url)} redirects to another host")
        return self._checked(str(following))

    async def _body(self, response: ClientResponse) -> bytes:
        url = response.url
        if response.status != 200:
            raise MediaError(f"{_shown(url)} answers {response.status}")
        if not response.content_type.startswith(_TYPES):
            raise MediaError(f"{_shown(url)} is no picture, but {response.content_type[:60]}")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise MediaError(f"{_shown(url)} is compressed, which was not asked for")
        body = bytearray()
        if (response.content_length or 0) <= self.max_bytes:
            async for chunk in response.content.iter_chunked(_CHUNK):
                body += chunk
                if len(body) > self.max_bytes:
                    break
            else:
                return bytes(body)
        raise MediaError(f"{_shown(url)} has more than {self.max_bytes} bytes, the limit set by --max-media-bytes")

    def _session(self) -> ClientSession:
        """One for each picture: what is connected to is what was looked up for it, and nothing else."""
        return ClientSession(
            connector=TCPConnector(resolver=_Resolver(self), use_dns_cache=False, force_close=True),
            cookie_jar=DummyCookieJar(),
            timeout=ClientTimeout(total=self.timeout),
            headers={"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "backhaul"},
            auto_decompress=False,
        )


class _Refused(OSError):
    """A name that resolves to where nobody is to be sent."""


class _Resolver(AbstractResolver):
    """Gives the connector the very addresses that were checked: a name that resolves otherwise a moment later (DNS
    rebinding) is not asked again."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_INET) -> list[ResolveResult]:
        addresses = await self._fetcher.resolve(host, port)
        if not addresses or not all(may_connect(address, self._fetcher.networks) for address in addresses):
            raise _Refused(host)
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in dict.fromkeys(addresses)
        ]

    async def close(self) -> None:
        pass


def decode_data_url(text: str, *, max_bytes: int) -> bytes:
    """What `data:image/…;base64,…` holds. Raises MediaError."""
    head, comma, payload = text[len("data:") :].partition(",")
    if not comma or not head.lower().endswith(";base64") or not head.lower().startswith("image/"):
        raise MediaError("data:image/…;base64,… expected")
    if len(payload) // 4 * 3 > max_bytes + 2:
        raise MediaError(f"a picture has at most {max_bytes} bytes, the limit set by --max-media-bytes")
    return decode_base64(payload)


def decode_base64(text: str) -> bytes:
    """Raises MediaError."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MediaError("not valid base64") from None


def is_data_url(text: str) -> bool:
    return text[:5].lower() == "data:"


def _is_literal(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()


def _shown(url: URL) -> str:
    """Without what may be secret in it."""
    return f"{url.scheme}://{url.host}{url.path}"[:120]
