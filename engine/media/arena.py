"""The encoder cache's memory: one arena of equal blocks of rows, so that a block is one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

ROWS_PER_BLOCK = 64
"""What one tile of a picture takes, with the models there are, or little less. Engines exchange encodings only if it is
the same at both."""
LAYOUT_NAME = "blocks-rows-width/1"
"""Order of the arena's dimensions and its version; part of the fingerprint, since readers copy raw bytes."""


class EncoderArena:
    """The memory of `num_blocks` blocks of `rows_per_block` rows. An encoding fills whole blocks, the last one maybe
    in part; which blocks are whose is the affair of `engine/media/cache.py`."""

    def __init__(
        self,
        num_blocks: int,
        rows_per_block: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        self.rows_per_block = rows_per_block
        # Zeroed, so that every page is touched: the first transfer into untouched memory takes several times as long.
        self.tensor: Tensor = torch.zeros((num_blocks, rows_per_block, width), dtype=dtype, device=device)
        """[num_blocks, rows_per_block, width], contiguous."""

    @property
    def base_address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def block_bytes(self) -> int:
        return self.tensor[0].nbytes

    @property
    def row_bytes(self) -> int:
        return self.width * self.tensor.itemsize

    @property
    def width(self) -> int:
        return self.tensor.shape[2]

    def fingerprint(self, model_fingerprint: bytes) -> str:
        """Hex name, equal only on engines whose blocks hold the same bytes for the same encodings."""
        text = f"ec {LAYOUT_NAME} {self.rows_per_block}x{self.width} {self.tensor.dtype}"
        return blake2b(text.encode(), digest_size=16, key=model_fingerprint).hexdigest()

    def num_blocks_for(self, num_rows: int) -> int:
        return -(-num_rows // self.rows_per_block)

    def write(self, block_ids: Sequence[int], rows: Tensor) -> None:
        """Store an encoding [num_rows, width] in blocks that have just room for it."""
        blocks = list(block_ids)
        assert len(blocks) == self.num_blocks_for(len(rows)), f"{len(rows)} rows for {len(blocks)} blocks"
        full, rest = divmod(len(rows), self.rows_per_block)
        rows = rows.to(self.tensor.dtype)
        self.tensor[blocks[:full]] = rows[: full * self.rows_per_block].view(full, self.rows_per_block, self.width)
        if rest:
            self.tensor[blocks[full], :rest] = rows[full * self.rows_per_block :]

    def read(self, block_ids: Sequence[int], first: int, count: int) -> Tensor:
        """A copy of `count` rows of an encoding from its row `first` on, [count, width]."""
        start = first // self.rows_per_block
        stop = self.num_blocks_for(first + count)
        assert stop <= len(block_ids), f"rows up to {first + count} of {len(block_ids)} blocks"
        rows = self.tensor[list(block_ids[start:stop])].view(-1, self.width)
        offset = first - start * self.rows_per_block
        return rows[offset : offset + count]
