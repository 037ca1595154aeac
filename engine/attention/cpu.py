"""Attention on a CPU: decoding, storing and gathering by the C++ kernels, prefill by blocked matrix products."""

from __future__ import annotations

from torch import Tensor

from engine.attention.base import Attend, Step
from engine.attention.torch_paged import causal_attention
from engine.kernels.library import AttentionKernels


class CpuPagedAttention:
    def __init__(self, kernels: AttentionKernels, *, num_heads: int) -> None:
        self.kernels = kernels
        self.num_heads = num_heads

    def begin(self, step: Step, cos: Tensor, sin: Tensor) -> Attend:
        num_decodes = step.num_decodes
        decode_lens = step.context_lens[:num_decodes]

        def attend(layer: int, qkv: Tensor) -> Tensor:
            self.kernels.rope_store(layer, qkv, cos, sin, step.slots)
            q = qkv[:, : self.num_heads]
            out = qkv.new_empty(q.shape)
            if num_decodes:
                self.kernels.decode(layer, qkv, step.block_table, decode_lens, out)
            for prefill in step.prefills:
                rows = slice(prefill.start, prefill.start + prefill.num_tokens)
                blocks = step.block_table[prefill.index]
                keys, values = self.kernels.gather(layer, blocks, prefill.context_len, qkv.dtype)
                causal_attention(q[rows], keys, values, out[rows])
            return out.flatten(1)

        return attend
