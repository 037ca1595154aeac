"""KV blocks: who uses which, and which of the unused ones still hold something worth finding again.

A block is *used* (its reference count says by how many) or *free*. A free block keeps its content and its hash until
it is allocated anew, so the free list is the prefix cache's eviction order: the front goes first.

Some references are *idle*: they keep a block for a reader that may never come, and can be given up at any time. A block
that has only such references is room as good as free; the pool counts it, who holds it knows how to get at it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Block:
    block_id: int
    ref_count: int = 0
    idle_count: int = 0
    """How many of the references are idle."""
    block_hash: bytes | None = None
    """Name of the tokens whose KV the block holds; only ever set on a block that is full and filled."""


class BlockPool:
    """All blocks of one KV arena. Owned by the engine's main thread."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, "a pool needs blocks"
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        """Free blocks, the next one to be allocated (and so evicted) first."""
        self.cached: dict[bytes, int] = {}
        """Hash -> the block that holds those tokens, used or free."""
        self.num_idle = 0
        """Used blocks whose references are all idle. An upper bound of what can be freed, for a reader may come and
        claim them on another thread; it is put right by `pin`."""
        self.num_evictions = 0

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        return len(self.free_ids)

    @property
    def num_used(self) -> int:
        return len(self.blocks) - len(self.free_ids)

    @property
    def num_available(self) -> int:
        """Blocks that are free, or would be without idle references."""
        return len(self.free_ids) + self.num_idle

    @property
    def usage(self) -> float:
        """Share of the blocks that nobody new can have, 0 to 1; those only kept by idle references can be had."""
        return 1.0 - self.num_available / len(self.blocks)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The cached blocks of the longest prefix of `hashes`, in order; they are not taken yet."""
        found = []
        for block_hash in hashes:
            block_id = self.cached.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_revived(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are available, so that taking them uses up room."""
        blocks = (self.blocks[block_id] for block_id in block_ids)
        return sum(block.ref_count == block.idle_count for block in blocks)

    def take(self, block_ids: Iterable[int]) -> None:
        """Use blocks found by `match`."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self.free_ids[block_id]
            elif block.ref_count == block.idle_count:
                self.num_idle -= 1
            block.ref_count += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks for new content; whatever they held is forgotten."""
        assert count <= len(self.free_ids), f"{count} blocks wanted, {len(self.free_ids)} free"
        taken = [self.free_ids.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            block = self.blocks[block_id]
            block.ref_count = 1
            if block.block_hash is not None:
                del self.cached[block.block_hash]
                block.block_hash = None
                self.num_evictions += 1
        return taken

    def cache(self, block_id: int, block_hash: bytes) -> None:
        """Make a block findable. Call it only once the block's KV has been written in full.

        If another block already holds the same tokens, this one stays nameless: block tables are append-only, so
        the two are not merged.
        """
        block = self.blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is named while free"
        assert block.block_hash in (None, block_hash), f"block {block_id} is named twice"
        if block_hash not in self.cached:
            self.cached[block_hash] = block_id
            block.block_hash = block_hash

    def idle(self, block_ids: Iterable[int]) -> None:
        """The references of one table become idle."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            block.idle_count += 1
            assert block.idle_count <= block.ref_count, f"block {block_id} has more idle references than any"
            self.num_idle += block.idle_count == block.ref_count

    def pin(self, block_ids: Iterable[int]) -> None:
        """The idle references of one table become ordinary ones."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            assert block.idle_count > 0, f"block {block_id} has no idle reference"
            self.num_idle -= block.idle_count == block.ref_count
            block.idle_count -= 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Stop using the blocks of one table, given in token order.

        Freed from the end, so that of one sequence the tail is evicted first: a cached block is of no use without
        those before it. Nameless blocks can never be found again and go to the front.
        """
        for block_id in reversed(block_ids):
            block = self.blocks[block_id]
            assert block.ref_count > block.idle_count, f"block {block_id} is freed twice"
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_ids[block_id] = None
                if block.block_hash is None:
                    self.free_ids.move_to_end(block_id, last=False)
            elif block.ref_count == block.idle_count:
                self.num_idle += 1
