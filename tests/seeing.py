"""Running tiny models that see in tests: our runner, and transformers on the same weights."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from engine.batch import Batch, ScheduledRequest
from engine.kv_cache import KVCache, KVLayout
from engine.media.arena import EncoderArena
from engine.media.encoder import Encoder
from engine.media.item import MediaItem
from engine.media.picture import cut, grid, identifier
from engine.media.placement import Layout, Picture, place
from engine.model.loader import LoadedModel, load_model
from engine.request import Request
from engine.runner import Runner
from tests.running import BLOCK_SIZE, GREEDY


def draw(width: int, height: int, *, seed: int) -> Image.Image:
    """A picture of a few large spots of colour."""
    chooser = np.random.default_rng(seed)
    spots = Image.fromarray(chooser.integers(0, 256, (3, 3, 3), dtype=np.uint8))
    return spots.resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(encoded(image)).decode()


@dataclass
class Sight:
    """A runner with its caches; blocks are handed out once, and never taken back."""

    folder: Path
    loaded: LoadedModel
    runner: Runner
    arena: EncoderArena
    _kv: itertools.count[int] = field(default_factory=itertools.count)
    _ec: itertools.count[int] = field(default_factory=itertools.count)

    def request(self, text: str, images: Sequence[Image.Image], *, split: bool = True, room: int = 16) -> Request:
        """Of a prompt that has `<image>` where the pictures stand."""
        vision = self.loaded.vision
        assert vision is not None
        settings = vision.settings.changed({"do_image_splitting": split})
        pictures = []
        for image in images:
            layout = Layout(*grid(image, settings), settings.rows_per_tile)
            name = identifier(image, settings, vision.fingerprint)
            pictures.append(Picture(name, layout, torch.from_numpy(cut(image, settings))))
            text = text.replace("<image>", layout.text.replace("<image>", "<IMAGE>"), 1)
        ids = self.loaded.tokenizer.encode(text.replace("<IMAGE>", "<image>"), add_special_tokens=False)
        return self._admitted(ids, place(ids, pictures, vision.config.image_token_id), room)

    def again(self, request: Request) -> Request:
        """The same as a request of its own."""
        return self._admitted(request.prompt_token_ids, request.media, 16)

    def prefill(self, request: Request, chunk: int | None = None) -> Tensor:
        """Logits [vocab] after the request's tokens, its pictures encoded before, computed `chunk` at a time."""
        chunk = chunk or request.num_tokens
        encodings = self.blocks(request)
        encode = {item.identifier: item for item in request.media}
        for start in range(0, request.num_tokens, chunk):
            count = min(chunk, request.num_tokens - start)
            scheduled = ScheduledRequest(request, start, count)
            logits = self.runner.logits(Batch([scheduled], list(encode.values()) if not start else (), encodings))
        return logits[0]

    def step(self, *requests: Request) -> Tensor:
        """Logits [requests, vocab] of a step that computes all of these."""
        encodings: dict[str, list[int]] = {}
        items: dict[str, MediaItem] = {}
        for request in requests:
            items |= {item.identifier: item for item in request.media}
            encodings = self.blocks(request) | encodings
        scheduled = [ScheduledRequest(request, 0, request.num_tokens) for request in requests]
        return self.runner.logits(Batch(scheduled, list(items.values()), encodings))

    def say(self, request: Request, count: int) -> list[int]:
        """The most likely tokens that follow; ends where the model does."""
        logits = self.prefill(request)
        said: list[int] = []
        while True:
            said.append(int(logits.argmax()))
            if len(said) == count or said[-1] in self.loaded.tokenizer.eos_token_ids:
                return said
            request.append(said[-1])
            scheduled = ScheduledRequest(request, request.num_tokens - 1, 1)
            logits = self.runner.logits(Batch([scheduled]))[0]

    def blocks(self, request: Request) -> dict[str, list[int]]:
        """Of the encoder's arena, for each of its pictures."""
        needed = {item.identifier: self.arena.num_blocks_for(item.num_rows) for item in request.media}
        return {name: [next(self._ec) for _ in range(count)] for name, count in needed.items()}

    def _admitted(self, ids: Sequence[int], media: Sequence[MediaItem], room: int) -> Request:
        request = Request("r", list(ids), GREEDY, frozenset({0}), BLOCK_SIZE, b"seed", media=media)
        request.block_ids = [next(self._kv) for _ in range(-(-(len(ids) + room) // BLOCK_SIZE))]
        return request


def make_sight(folder: Path, *, num_blocks: int = 4096) -> Sight:
    loaded = load_model(folder, dtype=torch.float32)
    config = loaded.config
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, torch.float32)
    arena = EncoderArena(num_blocks, 16, config.hidden_size, torch.float32)
    assert loaded.vision is not None
    encoder = Encoder(loaded.vision, arena, activations=torch.float32)
    runner = Runner(loaded, KVCache(layout, num_blocks), max_num_seqs=8, encoder=encoder)
    return Sight(folder, loaded, runner, arena)


def reference_vlm(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def reference_processor(folder: Path, *, image_seq_len: int = 16, **changed: Any) -> Any:
    """As the folder says, on Pillow; torchvision's filters are others."""
    from transformers import AutoTokenizer
    from transformers.models.idefics3 import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    images = Idefics3ImageProcessorPil.from_pretrained(folder, **changed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Idefics3Processor(images, tokenizer, image_seq_len=image_seq_len)
