"""Whom the operators' port answers: it asks for no key, so what reaches it by way of an operator's browser is refused.

A page from elsewhere cannot read what comes from here, but it can send something, which then says where it is from; or
it gives its own name this address, and is from here as far as the browser knows. Then that name is what it asks for.
"""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

from connectors.wire.openai import APIError
from router.context import Request, Router
from router.front import Handler


def for_operators(handler: Handler) -> Handler:
    """Raises APIError, 403."""

    async def handle(router: Router, request: Request) -> web.StreamResponse:
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise _forbidden("A page from elsewhere may not do this.")
        if host and not _is_ours(host, router.config.admin_names):
            raise _forbidden("This port does not go by that name; --admin-names says which others it has.")
        return await handler(router, request)

    return handle


def _is_ours(host: str, names: tuple[str, ...]) -> bool:
    """Nobody on the internet owns a name without a dot."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if "." not in name and ":" not in name:
        return bool(name)
    try:
        ip_address(name)
    except ValueError:
        return name in names
    return True


def _forbidden(message: str) -> APIError:
    return APIError(403, message, type="ForbiddenError")
