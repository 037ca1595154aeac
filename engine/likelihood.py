"""How likely tokens were, out of logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.logprobs import TokenLogprobs


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Of one token for each row of raw logits [rows, vocab_size], with as many alternatives as asked for. Leaves the
    logits as they are."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = (1 + (logprobs > chosen).sum(-1)).tolist()
    top = logprobs.topk(min(max(num_top), logits.shape[1]))
    ids, values = top.indices.tolist(), top.values.tolist()
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(ids[row][:count], values[row][:count], strict=True)))
        for row, (token_id, logprob, rank, count) in enumerate(
            zip(token_ids, chosen.squeeze(1).tolist(), ranks, num_top, strict=True)
        )
    ]
