"""Gives back blocks that nobody will read, by the means that their owner offers.

Our engines are told so. vLLM has no such call, but a prefill engine that was given a decode engine's blocks and needs
none of them tells their owner that they are no longer wanted. So it is sent the smallest of requests with them: one
token to prefill, none to pull. That costs the prefill engine one block until the lease on its own answer ends.
Whatever cannot be given back waits for its lease, and is counted as such.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Iterator
from typing import Final, Literal

from connectors.wire.transfer import KVTransferParams, WireError
from router import jsontext
from router.api.legs import Body
from router.background import Background
from router.capabilities import OURS, Capabilities, exchanges
from router.client_protocol import ClientError
from router.member import Engine
from router.pool import Pool
from router.upstream import JSON, Upstream

Result = Literal["ok", "refused", "failed", "waits_for_ttl"]

PATH: Final = "/v1/completions"
PROVEN: Final = ("0.32",)
"""Releases of vLLM that were seen to free blocks in this way."""
SECONDS: Final = 5.0
"""For one such request."""
AT_ONCE: Final = 16
"""Such requests under way; they are one step of the engine together."""
WAITING: Final = 1000
"""Releases begun at most; beyond, blocks wait for their lease."""
LEASE_SECONDS: Final = 30.0
"""vLLM's default `kv_lease_duration`: so long the prefill engine keeps its own block of such a request."""
SHARE_OF_PREFILL: Final = 1 / 64
"""Of a prefill engine's blocks, so many at most are kept for that."""
AT_LEAST: Final = 8
MAX_ANSWER_BYTES: Final = 1 << 20
ONE_TOKEN: Final = [0]
"""The id of a token that every vocabulary has."""


def is_ours(blocks: KVTransferParams) -> bool:
    """Whether a Backhaul engine holds them: it compares hashes, refuses stale claims, and takes releases."""
    return blocks.kv_layout is not None


def tells(p: Capabilities, d: Capabilities) -> bool:
    """Whether a prefill engine is known to tell this decode engine that blocks are not wanted."""
    proven = p.version is not None and any(re.match(rf"v?{re.escape(one)}(?!\d)", p.version) for one in PROVEN)
    return p.kind == "vllm" and proven and p.bidirectional is True and exchanges(p, d)


def unwanted(offer: KVTransferParams) -> KVTransferParams:
    """Router to P: D's blocks, none of which is to be pulled.

    They hold no token, so there is nothing to wait for, whatever P's threshold is and whether or not it can pull; and
    should it read in spite of that, one block is all it could. Raises WireError if their owner is not named in full.
    """
    groups = offer.remote_block_ids or []
    named = (offer.remote_engine_id, offer.remote_request_id, offer.remote_host, offer.remote_port)
    if not any(groups) or not all(named):
        raise WireError("kv_transfer_params", "names no blocks, or not who holds them")
    first = [group[:1] for group in groups]
    return KVTransferParams.for_prefill(offer).model_copy(
        update={"remote_block_ids": first, "remote_num_tokens": 0},
    )


class Releases:
    """Everything that is given back passes here: in the background, bounded, and counted by what came of it."""

    def __init__(self, upstream: Upstream, pool: Pool, background: Background) -> None:
        self._upstream = upstream
        self._pool = pool
        self._background = background
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._num_begun = 0
        self._leases: dict[str, deque[float]] = {}
        pool.on_leave.append(self._left)
        """Of each prefill engine: when the leases end on the blocks that such requests have left there."""

    def start(self, blocks: KVTransferParams, *, may_be_read: bool = False) -> None:
        """In the background. `may_be_read`: an engine that was given them may be reading still; ours see to that, of
        others' nobody may have them before they are done."""
        if is_ours(blocks) or not (may_be_read or blocks.do_remote_prefill or self._num_begun >= WAITING):
            self._background.start(self.release(blocks))
        else:
            self._count("waits_for_ttl")

    async def release(self, blocks: KVTransferParams) -> None:
        """Raises nothing; what the engine says is counted."""
        self._num_begun += 1
        try:
            if is_ours(blocks):
                await self._upstream.release(blocks)
            else:
                self._count(await self._have_told(blocks))
        finally:
            self._num_begun -= 1

    def can(self, owner: Engine) -> bool:
        """Whether blocks of this decode engine can be given back now."""
        return owner.known.now.kind == OURS or self._teller([owner]) is not None

    async def _have_told(self, blocks: KVTransferParams) -> Result:
        async with self._at_once:
            teller = self._teller(list(self._owners(blocks)))
            if teller is None:
                return "waits_for_ttl"
            engine, model = teller
            try:
                params = unwanted(blocks).to_json()
            except WireError:
                return "waits_for_ttl"
            loop = asyncio.get_running_loop()
            self._leases_at(engine).append(loop.time() + SECONDS + LEASE_SECONDS)
            body: Body = {"model": model, "prompt": ONE_TOKEN, "max_tokens": 1, "kv_transfer_params": params}
            headers = JSON + "".join(f"{name}: {value}\r\n" for name, value in engine.headers.items())
            due = loop.time() + SECONDS
            try:
                with await self._upstream.send(engine, PATH, body, headers, due) as response:
                    text = await response.read(MAX_ANSWER_BYTES, due)
                    status = response.status
            except (ClientError, TimeoutError):
                return "failed"
        if status != 200:
            return "failed" if status >= 500 else "refused"
        return "ok" if _is_taken(text) else "refused"

    def _owners(self, blocks: KVTransferParams) -> Iterator[Engine]:
        """The engine that holds them; where its id is not known, all it may be. None: it was started anew since."""
        others = [engine for engine in self._pool.decode if engine.known.now.kind == "vllm"]
        its_own = [engine for engine in others if engine.known.goes_by(blocks.remote_engine_id or "")]
        yield from its_own or [engine for engine in others if not engine.known.is_named]

    def _teller(self, owners: list[Engine]) -> tuple[Engine, str] | None:
        """A prefill engine that can tell each of these, the idlest, and a model that all of them serve."""
        if not owners or not all(owner.readable for owner in owners):
            return None  # one that is gone has no blocks to give back
        served = frozenset.intersection(*(frozenset(owner.models) for owner in owners))
        able = [
            engine
            for engine in self._pool.prefill
            if engine.ready
            and not served.isdisjoint(engine.models)
            and all(tells(engine.known.now, owner.known.now) for owner in owners)
            and len(self._leases_at(engine)) < self._most_leases(engine)
        ]
        if not able:
            return None
        engine = min(able, key=lambda one: one.in_flight)
        return engine, min(served.intersection(engine.models))

    def _left(self, engine: Engine) -> None:
        self._leases.pop(engine.url, None)

    def _leases_at(self, engine: Engine) -> deque[float]:
        leases = self._leases.setdefault(engine.url, deque())
        now = asyncio.get_running_loop().time()
        while leases and leases[0] <= now:
            leases.popleft()
        return leases

    def _most_leases(self, engine: Engine) -> int:
        return max(AT_LEAST, int(SHARE_OF_PREFILL * (engine.known.now.num_blocks or 0)))

    def _count(self, result: Result) -> None:
        self._upstream.metrics.releases.add(result)


def _is_taken(text: bytes) -> bool:
    """Whether a prefill leg's answer shows that its connector has seen the params: it names blocks of its own."""
    try:
        answer = jsontext.loads(text)
    except ValueError:
        return False
    return isinstance(answer, dict) and isinstance(answer.get("kv_transfer_params"), dict)
