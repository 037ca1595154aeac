"""Work on large bodies, away from the event loop: peers' claims and health checks are answered meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

LARGE_BODY = 1 << 16
"""Bytes. Below, a body is worked on at once: handing it to a thread would cost more than it saves."""

_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="large-bodies")
"""Few, for each competes with the loop for the interpreter; two, so that one huge body does not hold up the others."""

_PICTURES = ThreadPoolExecutor(max_workers=2, thread_name_prefix="pictures")
"""Of their own: one can take seconds, for which no text is to wait."""

P = ParamSpec("P")
T = TypeVar("T")


async def offload(large: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """function(*args, **kwargs), in a thread if the work is large. A caller that is cancelled drops the result."""
    if not large:
        return function(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, lambda: function(*args, **kwargs))


async def offload_picture(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same for what prepares a picture."""
    return await asyncio.get_running_loop().run_in_executor(_PICTURES, lambda: function(*args, **kwargs))
