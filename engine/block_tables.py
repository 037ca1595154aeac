"""Which blocks requests hold: hits in the prefix cache, then room for what is loaded or computed.

A block gets its name, by which the prefix cache finds it, only after the forward pass or the transfer that filled it.

Finished requests may leave their blocks to a reader that may never come. Those are room like free ones: whoever needs
it takes it, at the cost of the oldest such lease, before anybody waits or is preempted.
"""

from __future__ import annotations

from connectors.base import BlocksReleased, Connector
from engine import limits
from engine.blocks import BlockPool
from engine.request import Request


class BlockTables:
    """Fills and clears the block tables of requests. Main thread only; the counters may be read from any."""

    def __init__(self, pool: BlockPool, connector: Connector, *, enable_prefix_caching: bool) -> None:
        self._pool = pool
        self._connector = connector
        self._enable_prefix_caching = enable_prefix_caching
        self.num_prefix_queries = 0
        """Tokens looked up in the prefix cache."""
        self.num_prefix_hits = 0

    def match(self, request: Request) -> list[int]:
        """Cached blocks of the request's tokens, but for the last one: it is computed for its logits. None of them if
        the logits of all are wanted."""
        if request.wants_prompt_logprobs:
            return []
        return self._pool.match(request.block_hashes[: (request.num_tokens - 1) // request.block_size])

    def num_loadable(self, request: Request, num_local: int) -> tuple[int, bool]:
        """What another engine has of it beyond the local hit; nothing if the logits of all tokens are wanted. The
        connector then releases what is held for it, as with any request that needs no load."""
        if request.wants_prompt_logprobs:
            return 0, False
        return self._connector.get_num_new_matched_tokens(request, num_local)

    def reclaim(self, count: int) -> bool:
        """Have `count` blocks free, by revoking idle leases if it must be; False if there are not so many.

        Nothing is revoked if even all of it would not do, as far as is known: a reader may claim a lease at any time.
        """
        if count > self._pool.num_available:
            return False
        while count > self._pool.num_free:
            revoked = self._connector.revoke()
            if revoked is None:
                return False
            self.release(revoked)
        return True

    def lay_out(self, request: Request, hits: list[int], num_external: int, num_new: int) -> bool:
        """Lay out the block table of a request to be admitted: | local hits | to be loaded | to be computed |.

        False, and nothing taken, if idle leases that were counted on have been claimed meanwhile: the request waits
        until the claims are over.
        """
        num_local = len(hits) * request.block_size
        num_new_blocks = limits.num_blocks(request, num_local + num_external + num_new) - len(hits)
        self._pool.take(hits)  # first, for they may lie in the very lease that is revoked for the rest
        if not self.reclaim(num_new_blocks):
            self._pool.free(hits)
            return False
        request.block_ids = hits + self._pool.allocate(num_new_blocks)
        request.num_computed_tokens = num_local + num_external
        if self._enable_prefix_caching and not request.wants_prompt_logprobs:
            self.num_prefix_queries += request.num_tokens
            self.num_prefix_hits += num_local
        if not request.num_output_tokens:
            # Preempted before its first token, a prompt is what it is the next time.
            request.num_cached_tokens, request.num_external_tokens = num_local, 0
        self._connector.update_state_after_alloc(request, request.block_ids, num_external)
        return True

    def name(self, request: Request, start: int) -> None:
        """Let the prefix cache find the blocks that were filled since `start` tokens were computed."""
        if not self._enable_prefix_caching:
            return
        for index in range(start // request.block_size, request.num_computed_tokens // request.block_size):
            self._pool.cache(request.block_ids[index], request.block_hashes[index])

    def free(self, request: Request) -> None:
        self._pool.free(request.block_ids)
        request.block_ids = []

    def release(self, released: BlocksReleased) -> None:
        if released.idle:
            self._pool.pin(released.block_ids)
        self._pool.free(released.block_ids)


def num_blocks_owed(request: Request) -> int:
    """Blocks an admitted request still needs for the tokens it has."""
    if request.status.finished:
        return 0
    return max(0, limits.num_blocks(request, request.num_tokens) - len(request.block_ids))
