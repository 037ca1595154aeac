"""The runner of an engine that only encodes."""

from __future__ import annotations

import torch

from engine.batch import Batch, StepResult
from engine.media.encoder import Encoder


class EncodeRunner:
    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def run(self, batch: Batch) -> StepResult:
        """Encode the pictures; they can be read by others once this returns."""
        self._encoder.encode(batch.encode, batch.encodings)
        if self._encoder.arena.tensor.is_cuda:
            torch.cuda.synchronize(self._encoder.arena.tensor.device)
        return StepResult([])
