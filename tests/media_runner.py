"""Pictures without pixels: a runner whose encodings say of which picture they are, and requests that have some.

An encoding's row is named after the picture and its place in it. Computing a placeholder reads its row from the blocks
that the step was given, and refuses what is not its own: reading a block that was recycled, or not yet filled, is a
`WrongEncoding`, not a slightly different answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from connectors.wire.transfer import ECTransferParams
from engine.batch import Batch, StepResult
from engine.media.item import MediaItem
from engine.request import Request
from tests.fake_runner import FakeKV, FakeRunner, make_request, prompt_of

PLACEHOLDER = 1
PIXELS = cast(Any, object())
"""Stands for a picture that is here; nobody looks at it."""


class WrongEncoding(AssertionError):
    """A placeholder was about to be computed on what is not its row."""


class FakeEncoderMemory:
    """The arena: per block, the rows of it, None where nothing was ever written."""

    def __init__(self, num_blocks: int, rows_per_block: int) -> None:
        self.rows_per_block = rows_per_block
        self.blocks: list[list[str | None]] = [[None] * rows_per_block for _ in range(num_blocks)]

    def read(self, block_id: int) -> tuple[str | None, ...]:
        return tuple(self.blocks[block_id])

    def write(self, block_id: int, content: Sequence[str | None]) -> None:
        self.blocks[block_id] = list(content)

    def store(self, picture: MediaItem, block_ids: Sequence[int]) -> None:
        assert len(block_ids) == -(-picture.num_rows // self.rows_per_block), "blocks for another size"
        for row in range(picture.num_rows):
            self.blocks[block_ids[row // self.rows_per_block]][row % self.rows_per_block] = row_of(picture, row)

    def check(self, picture: MediaItem, row: int, block_ids: Sequence[int]) -> None:
        found = self.blocks[block_ids[row // self.rows_per_block]][row % self.rows_per_block]
        if found != row_of(picture, row):
            raise WrongEncoding(f"row {row} of {picture.identifier} is {found}")


class MediaRunner(FakeRunner):
    """Encodes what it is told to, then computes tokens, checking what it reads of either."""

    def __init__(self, kv: FakeKV, memory: FakeEncoderMemory) -> None:
        super().__init__(kv)
        self.memory = memory
        self.encoded: Counter[str] = Counter()
        """How often each picture was."""
        self.encodes: list[list[str]] = []
        """Per step."""

    def run(self, batch: Batch) -> StepResult:
        encode(batch, self.memory, self.encoded)
        self.encodes.append([picture.identifier for picture in batch.encode])
        for item in batch.scheduled:
            for picture in item.request.media:
                for row, position in enumerate(picture.positions):
                    if item.num_computed <= position < item.num_computed + item.num_tokens:
                        self.memory.check(picture, row, batch.encodings[picture.identifier])
        return super().run(batch)


def encode(batch: Batch, memory: FakeEncoderMemory, encoded: Counter[str]) -> None:
    names = [picture.identifier for picture in batch.encode]
    assert len(set(names)) == len(names), "a picture is encoded twice in one step"
    for picture in batch.encode:
        assert picture.pixels is not None, f"nobody has {picture.identifier}"
        memory.store(picture, batch.encodings[picture.identifier])
        encoded[picture.identifier] += 1


def row_of(picture: MediaItem, row: int) -> str:
    return f"{picture.identifier}/{picture.num_rows}:{row}"


def picture_request(
    *parts: int | tuple[str, int] | str,
    seed: int = 0,
    described: bool = False,
    ec_params: ECTransferParams | Mapping[str, Any] | None = None,
    **options: Any,
) -> Request:
    """A prompt of so many tokens, then a picture `name`, or `(name, number of rows)`, and so on.

    described: the pictures themselves are not here.
    """
    prompt: list[int] = []
    media: list[MediaItem] = []
    for number, part in enumerate(parts):
        if isinstance(part, int):
            prompt += prompt_of(part, seed + number)
            continue
        name, rows = (part, 4) if isinstance(part, str) else part
        positions = range(len(prompt), len(prompt) + rows)
        prompt += [PLACEHOLDER] * rows
        media.append(MediaItem(name, positions, {"grid": [1, rows]}, None if described else PIXELS))
    request = make_request(prompt, **options)
    request.media = media
    if ec_params is not None:
        params = ec_params if isinstance(ec_params, ECTransferParams) else ECTransferParams.parse(ec_params)
        request.sampling.extra_args["ec_transfer_params"] = params  # type: ignore[index]
    # Named anew: what is in a block depends on the pictures.
    request.block_hashes = []
    request.update_hashes()
    return request
