"""Attention in plain torch operations: for any device, and the reference the kernels are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.base import Attend, Prefill, Step
from engine.kv_cache import KVCache
from engine.model.rope import rotate

QUERY_BLOCK = 128
"""Query rows per block of a prefill that continues a sequence: its mask stays small, and what is ahead of the block is
not computed."""


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
        seen = (places < step.context_lens[:num_decodes, None])[:, None, None]
        q_heads, kv_heads = self.num_heads, self.num_kv_heads

        def attend(layer: int, qkv: Tensor) -> Tensor:
            q, k, v = torch.split(qkv, [q_heads, kv_heads, kv_heads], dim=1)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            store = self.cache.arena[:, layer]
            store[blocks, 0, :, offsets] = k.to(store.dtype)
            store[blocks, 1, :, offsets] = v.to(store.dtype)
            out = torch.empty_like(q)
            if num_decodes:
                out[:num_decodes] = self._decode(layer, q[:num_decodes], decode_blocks, seen)
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

    def _decode(self, layer: int, q: Tensor, blocks: Tensor, seen: Tensor) -> Tensor:
        num, heads, dim = q.shape
        both = self.cache.arena[:, layer][blocks].to(q.dtype)  # [n, max_blocks, 2, kv_heads, block_size, dim]
        keys, values = both.permute(2, 0, 3, 1, 4, 5).reshape(2, num, self.num_kv_heads, -1, dim)
        rows = q.view(num, self.num_kv_heads, -1, dim)  # the query heads that share a key head, as rows of one matrix
        return F.scaled_dot_product_attention(rows, keys, values, attn_mask=seen).reshape(num, heads, dim)


def causal_attention(q: Tensor, keys: Tensor, values: Tensor, out: Tensor, *, query_block: int = QUERY_BLOCK) -> None:
    """Attention of the last len(q) positions of a sequence over all of it, into `out`.

    q, out: [tokens, heads, dim]; keys, values: [kv_heads, context, dim], the tokens' own included. The query heads that
    share a key head see the same memory, so keys are never repeated.
    """
    tokens, heads, dim = q.shape
    kv_heads, context, _ = keys.shape
    group, computed = heads // kv_heads, context - tokens
    queries, target = (x.view(tokens, kv_heads, group, dim).permute(1, 2, 0, 3) for x in (q, out))
    keys, values = (x[:, None].expand(-1, group, -1, -1) for x in (keys, values))
    if tokens == 1 or not computed:
        target.copy_(F.scaled_dot_product_attention(queries, keys, values, is_causal=tokens > 1))
        return
    for start in range(0, tokens, query_block):
        stop = min(start + query_block, tokens)
        context = computed + stop
        seen = torch.ones(stop - start, context, dtype=torch.bool, device=q.device).tril(computed + start)
        target[:, :, start:stop] = F.scaled_dot_product_attention(
            queries[:, :, start:stop], keys[:, :, :context], values[:, :, :context], attn_mask=seen
        )
