"""Whether a request went out on a connection that was there before: aiohttp tells only through its tracing."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import aiohttp


@dataclass(slots=True)
class Sent:
    """Give one as `trace_request_ctx` of a request."""

    on_reused: bool = False


def watch_reuse() -> aiohttp.TraceConfig:
    """For the client session; requests without a `Sent` are left alone."""
    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(_reused)
    return config


async def _reused(
    _: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceConnectionReuseconnParams
) -> None:
    if isinstance(context.trace_request_ctx, Sent):
        context.trace_request_ctx.on_reused = True
