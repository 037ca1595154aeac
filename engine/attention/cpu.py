"""Attention on a CPU, by the C++ kernels; where activations are rounded, torch computes what they store and gather."""

from __future__ import annotations

from dataclasses import astuple

import torch
from torch import Tensor

from engine.attention.base import Attend, Prefill, Step
from engine.attention.torch_paged import causal_attention
from engine.kernels.library import AttentionKernels


class CpuPagedAttention:
    def __init__(self, kernels: AttentionKernels, *, num_heads: int) -> None:
        self.kernels = kernels
        self.num_heads = num_heads

    def begin(self, step: Step, cos: Tensor, sin: Tensor) -> Attend:
        num_decodes = step.num_decodes
        decode_lens = step.context_lens[:num_decodes]
        prefills = torch.tensor([astuple(prefill) for prefill in step.prefills], dtype=torch.int64)
        # Where activations are rounded between operations, a decoded token takes the same ones as a prompt's: else it
        # would be rounded in other places than in the models' reference implementations.
        alike = [Prefill(row, row, 1, context_len) for row, context_len in enumerate(decode_lens.tolist())]

        def attend(layer: int, qkv: Tensor) -> Tensor:
            self.kernels.rope_store(layer, qkv, cos, sin, step.slots)
            q = qkv[:, : self.num_heads]
            out = qkv.new_empty(q.shape)
            if qkv.dtype == torch.float32:
                if num_decodes:
                    self.kernels.decode(layer, qkv, step.block_table, decode_lens, out)
                if len(prefills):
                    self.kernels.prefill(layer, qkv, step.block_table, prefills, out)
                return out.flatten(1)
            for sequence in (*alike, *step.prefills):
                rows = slice(sequence.start, sequence.start + sequence.num_tokens)
                blocks = step.block_table[sequence.index]
                keys, values = self.kernels.gather(layer, blocks, sequence.context_len, qkv.dtype)
                causal_attention(q[rows], keys, values, out[rows])
            return out.flatten(1)

        return attend
