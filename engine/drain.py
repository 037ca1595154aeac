"""How a worker leaves: it takes nothing new, lets what runs end and what is held be read, then ends the loop."""

from __future__ import annotations

import asyncio
import logging

from engine.api.context import Serving, Worker
from engine.messages import Shutdown

logger = logging.getLogger(__name__)

LEASE_POLL = 0.05
"""Seconds between two looks at whether the leases that count have ended."""


async def drain_when_told(worker: Worker, serving: Serving) -> None:
    """Wait for `worker.leaving`; then drain, for as long as `--drain-timeout` at most.

    A prefill engine stays until the blocks it has handed over are read, given back or run out, and whoever has
    announced encodings until that is so of them. What a decode engine offers to a next turn, nobody has been promised:
    only a reader that is at work holds it up. Peers are answered all the while.
    """
    await worker.leaving.wait()
    worker.draining = True
    logger.info("draining", extra={"requests": serving.client.num_open, "leases": _num_awaited(serving)})
    try:
        async with asyncio.timeout(worker.config.drain_timeout):
            while serving.client.num_open or _num_awaited(serving):
                await serving.client.wait_idle()
                if _num_awaited(serving):
                    await asyncio.sleep(LEASE_POLL)  # they end on other threads
    except TimeoutError:
        logger.warning(
            "drain timeout: open requests are aborted, blocks held for other engines given up",
            extra={"requests": serving.client.num_open, "leases": _num_awaited(serving)},
        )
    # A request that was taken in before, and whose prompt is only now ready, must not wait for an engine that is gone.
    serving.client.close()
    serving.inbox.put(Shutdown())


def _num_awaited(serving: Serving) -> int:
    """Leases whose reader is on its way or at work, and can still read."""
    kv, ec = serving.kv, serving.ec
    blocks = 0 if kv is None or kv.transport.failed else kv.leases.num_held
    encodings = 0 if ec is None or ec.transport.failed else len(ec.leases)
    return blocks + encodings
