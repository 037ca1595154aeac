"""Attention in plain torch operations: for any device, and the reference the kernels are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.base import Attend, Prefill, Step
from engine.kv_cache import KVCache
from engine.model.rope import rotate

QUERY_BLOCK = 128
"""Query rows per block of a prefill: its scores stay in the cache, and most of the causal triangle is not computed."""


class TorchPagedAttention:
    def __init__(self, cache: KVCache, *, num_heads: int) -> None:
        self.cache = cache
        self.num_heads = num_heads
        self.num_kv_heads = cache.layout.num_kv_heads
        self.query_block = QUERY_BLOCK if cache.device.type == "cpu" else 8 * QUERY_BLOCK

    def begin(self, step: Step, cos: Tensor, sin: Tensor) -> Attend:
        block_size = self.cache.layout.block_size
        blocks, offsets = step.slots // block_size, step.slots % block_size
        num_decodes = step.num_decodes
        decode_blocks = step.block_table[:num_decodes].long()
        places = torch.arange(decode_blocks.shape[1] * block_size, device=step.slots.device)
        unseen = (places >= step.context_lens[:num_decodes, None])[:, None, None]
        q_heads, kv_heads = self.num_heads, self.num_kv_heads

        def attend(layer: int, qkv: Tensor) -> Tensor:
            q, k, v = torch.split(qkv, [q_heads, kv_heads, kv_heads], dim=1)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            store = self.cache.arena[:, layer]
            store[blocks, 0, :, offsets] = k.to(store.dtype)
            store[blocks, 1, :, offsets] = v.to(store.dtype)
            out = torch.empty_like(q)
            if num_decodes:
                out[:num_decodes] = self._decode(layer, q[:num_decodes], decode_blocks, unseen)
            for prefill in step.prefills:
                rows = slice(prefill.start, prefill.start + prefill.num_tokens)
                keys, values = self.gather(layer, step, prefill, q.dtype)
                causal_attention(q[rows], keys, values, out[rows], query_block=self.query_block)
            return out.flatten(1)

        return attend

    def gather(self, layer: int, step: Step, prefill: Prefill, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of one sequence, each [kv_heads, context, head_dim]."""
        layout = self.cache.layout
        num_blocks = -(-prefill.context_len // layout.block_size)
        blocks = step.block_table[prefill.index, :num_blocks].long()
        both = self.cache.arena[:, layer][blocks].to(dtype).permute(1, 2, 0, 3, 4)
        keys, values = both.reshape(2, layout.num_kv_heads, -1, layout.head_dim)[:, :, : prefill.context_len]
        return keys, values

    def _decode(self, layer: int, q: Tensor, blocks: Tensor, unseen: Tensor) -> Tensor:
        num, heads, dim = q.shape
        both = self.cache.arena[:, layer][blocks].to(q.dtype)  # [n, max_blocks, 2, kv_heads, block_size, dim]
        both = both.permute(2, 0, 3, 1, 4, 5).reshape(2, num, self.num_kv_heads, -1, dim)
        scores = q.view(num, self.num_kv_heads, -1, dim) * dim**-0.5 @ both[0].transpose(-1, -2)
        weights = scores.masked_fill_(unseen, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, both[1]).view(num, heads, dim)


def causal_attention(q: Tensor, keys: Tensor, values: Tensor, out: Tensor, *, query_block: int = QUERY_BLOCK) -> None:
    """Attention of the last len(q) positions of a sequence over all of it, into `out`.

    q, out: [tokens, heads, dim]; keys, values: [kv_heads, context, dim], the tokens' own included. The query heads that
    share a key head are rows of one matrix, so keys are never repeated.
    """
    tokens, heads, dim = q.shape
    kv_heads, context, _ = keys.shape
    group = heads // kv_heads
    computed = context - tokens
    grouped = (q * dim**-0.5).view(tokens, kv_heads, group, dim).permute(1, 2, 0, 3)
    target = out.view(tokens, kv_heads, group, dim).permute(1, 2, 0, 3)
    size = min(query_block, tokens)
    ahead = torch.full((size, size), float("-inf"), dtype=q.dtype, device=q.device).triu_(1)
    for start in range(0, tokens, query_block):
        stop = min(start + query_block, tokens)
        rows, seen = stop - start, computed + stop
        queries = grouped[:, :, start:stop].reshape(kv_heads, group * rows, dim)
        scores = torch.bmm(queries, keys[:, :seen].transpose(1, 2))
        scores.view(kv_heads, group, rows, seen)[..., computed + start :].add_(ahead[:rows, :rows])
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        target[:, :, start:stop] = torch.bmm(weights, values[:, :seen]).view(kv_heads, group, rows, dim)
