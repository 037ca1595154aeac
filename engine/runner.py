"""Runs a batch: its tensors, the forward pass, and the tokens sampled from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.base import Attention, Prefill, Step
from engine.attention.cpu import CpuPagedAttention
from engine.attention.torch_paged import TorchPagedAttention
from engine.batch import Batch, ScheduledRequest, StepResult
from engine.kernels.build import load_kernels
from engine.kernels.decoder import DecoderKernel, LayerProducts
from engine.kernels.library import Kernels, PackedLinear
from engine.kv_cache import KVCache
from engine.likelihood import token_logprobs
from engine.logprobs import TokenLogprobs
from engine.media.encoder import Encoder
from engine.model.layers import KernelOps, TorchOps, compute_dtype
from engine.model.llama import Llama
from engine.model.loader import LoadedModel
from engine.request import Request
from engine.sampler import NO_TOKEN, sample

logger = logging.getLogger(__name__)

PROMPT_ROWS = 64
"""Tokens of a prompt whose logits are there at once, if they are wanted."""


class RunnerError(Exception):
    """A step whose results are not usable, because of the requests named."""

    def __init__(self, message: str, request_ids: Sequence[str]) -> None:
        super().__init__(message)
        self.request_ids = tuple(request_ids)


class Runner:
    """The model on its device, and the cache it writes.

    Keeps no reference to `loaded`: its weights may be dropped once the runner is built. Runs on one thread, with the
    number of compute threads given to torch there.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        *,
        max_num_seqs: int,
        use_kernels: bool = True,
        activations: torch.dtype | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        """activations: their dtype, if not the one that suits the device best; encoder: of a model that sees."""
        config, device = loaded.config, cache.device
        integer = loaded.quantization == "int8"
        dtype = activations or (torch.float32 if integer else compute_dtype(cache.layout.dtype, device))
        self.cache = cache
        self.device = device
        self.block_size = cache.layout.block_size
        self.encoder = encoder
        self.kernels = load_kernels() if use_kernels and device.type == "cpu" else None
        own = self.kernels if dtype == torch.float32 else None
        ops = TorchOps(dtype) if own is None else KernelOps(own, integer=integer)
        self.attention = _attention(cache, dtype, config.num_heads, self.kernels)
        weights = loaded.weights
        if device.type != "cpu":
            weights = {name: weight.to(device) for name, weight in weights.items()}
        self.model = Llama(config, weights, self.attention, ops, loaded.quantized)
        if own is not None and isinstance(self.attention, CpuPagedAttention):
            self.model.decode_layers = _decoder(self.model, self.attention, own)
        logger.info(
            "model=%s device=%s weights=%s activations=%s attention=%s threads=%d",
            loaded.name,
            device,
            str(cache.layout.dtype).removeprefix("torch."),
            str(dtype).removeprefix("torch."),
            type(self.attention).__name__,
            torch.get_num_threads(),
        )
        self._warm_up(max_num_seqs)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        """Compute and store the KV of every scheduled token, and sample for each request that samples. Raises
        RunnerError if the logits of any are not finite."""
        self._encode(batch)
        if not batch.scheduled:
            return StepResult([])
        hidden, hidden_of_prompts = self._hidden(batch)
        prompt_logprobs = self._prompt_logprobs(batch, hidden_of_prompts)
        requests = [scheduled.request for scheduled in batch.scheduled if scheduled.samples]
        if not requests:
            return StepResult([], prompt_logprobs=prompt_logprobs)
        logits = self.model.logits(hidden)
        _check_finite(logits, requests)
        asking = [row for row, request in enumerate(requests) if request.sampling.logprobs is not None]
        raw = logits[asking] if asking else None  # a copy, for sampling changes the logits
        tokens = sample(logits, requests)
        failures = {
            request.request_id: _why_stuck(request)
            for token, request in zip(tokens, requests, strict=True)
            if token == NO_TOKEN
        }
        logprobs = {}
        if raw is not None:
            num_top = [requests[row].sampling.logprobs or 0 for row in asking]
            told = token_logprobs(raw, [max(0, tokens[row]) for row in asking], num_top)
            logprobs = {requests[row].request_id: one for row, one in zip(asking, told, strict=True)}
        return StepResult(tokens, logprobs, prompt_logprobs, failures)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Compute and store the KV of every scheduled token; float32 [requests that sample, vocab_size]."""
        self._encode(batch)
        return self.model.logits(self._hidden(batch)[0])

    def _encode(self, batch: Batch) -> None:
        if batch.encode:
            assert self.encoder is not None, "pictures for a model that sees none"
            self.encoder.encode(batch.encode, batch.encodings)

    def _hidden(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What logits are made of: for each request that samples, and for each prompt token that is told about, both in
        the order of the batch."""
        if self.kernels is not None:
            self.kernels.use_torch_threads()
        # Sequences of one token first: the decode kernel takes them as one slice.
        order = sorted(range(len(batch.scheduled)), key=lambda index: batch.scheduled[index].num_tokens > 1)
        ordered = [batch.scheduled[index] for index in order]
        token_ids, step, last_rows = self._inputs(ordered)
        row_of = dict(zip(order, last_rows, strict=True))
        rows = [row_of[index] for index, scheduled in enumerate(batch.scheduled) if scheduled.samples]
        num_sampling = len(rows)
        for index, scheduled in enumerate(batch.scheduled):
            first = row_of[index] - scheduled.num_tokens + 1
            rows += range(first, first + scheduled.num_prompt_logprobs)
        given = self._given(ordered, last_rows, batch.encodings) if batch.encodings else None
        hidden = self.model.hidden(token_ids, step, self._tensor(np.array(rows, dtype=np.int64)), given)
        return hidden[:num_sampling], hidden[num_sampling:]

    def _given(
        self, ordered: Sequence[ScheduledRequest], last_rows: Sequence[int], encodings: Mapping[str, Sequence[int]]
    ) -> tuple[Tensor, Tensor] | None:
        """Of placeholders among the tokens, their places, and the rows of encodings that stand in for them."""
        assert self.encoder is not None, "encodings for a model that sees none"
        starts = [last - each.num_tokens + 1 for each, last in zip(ordered, last_rows, strict=True)]
        found = self.encoder.rows(ordered, starts, encodings)
        if found is None:
            return None
        places, rows = found
        return self._tensor(np.array(places, dtype=np.int64)), rows

    def _prompt_logprobs(self, batch: Batch, hidden: Tensor) -> dict[str, list[TokenLogprobs]]:
        """By request id. Slice by slice: logits of a whole prompt at once could be gigabytes."""
        found: dict[str, list[TokenLogprobs]] = {}
        start = 0
        for scheduled in batch.scheduled:
            request, count = scheduled.request, scheduled.num_prompt_logprobs
            first = scheduled.num_computed + 1
            targets = request.token_ids[first : first + count]
            num_top = request.sampling.prompt_logprobs or 0
            told: list[TokenLogprobs] = []
            while len(told) < count:
                part = targets[len(told) : len(told) + PROMPT_ROWS]
                logits = self.model.logits(hidden[start : start + len(part)])
                _check_finite(logits, [request] * len(part))
                told += token_logprobs(logits, part, [num_top] * len(part))
                start += len(part)
            if told:
                found[request.request_id] = told
        return found

    @torch.inference_mode()
    def _warm_up(self, max_num_seqs: int) -> None:
        """One step of the largest decode batch, in block 0, so that the first request finds all set up."""
        rows = torch.zeros(max_num_seqs, dtype=torch.int64, device=self.device)
        tables = rows.to(torch.int32)
        step = Step(rows, rows, tables[:, None], tables + 1, num_decodes=max_num_seqs, prefills=())
        self.model.forward(rows, step, rows)
        self.cache.arena[0].zero_()

    def _inputs(self, ordered: Sequence[ScheduledRequest]) -> tuple[Tensor, Step, list[int]]:
        """Token ids, the step, and the row of each sequence's last token."""
        counts = np.array([scheduled.num_tokens for scheduled in ordered])
        computed = np.array([scheduled.num_computed for scheduled in ordered])
        context_lens = computed + counts
        stops = counts.cumsum()
        starts = stops - counts
        num_blocks = -(-context_lens // self.block_size)
        table = np.zeros((len(ordered), num_blocks.max()), dtype=np.int32)
        token_ids = np.empty(stops[-1], dtype=np.int64)
        for row, scheduled in enumerate(ordered):
            request, first = scheduled.request, scheduled.num_computed
            table[row, : num_blocks[row]] = request.block_ids[: num_blocks[row]]
            token_ids[starts[row] : stops[row]] = request.token_ids[first : first + scheduled.num_tokens]
        sequences = np.repeat(np.arange(len(ordered)), counts)
        positions = np.arange(stops[-1]) - np.repeat(starts - computed, counts)
        slots = table[sequences, positions // self.block_size].astype(np.int64) * self.block_size
        slots += positions % self.block_size
        step = Step(
            positions=self._tensor(positions),
            slots=self._tensor(slots),
            block_table=self._tensor(table),
            context_lens=self._tensor(context_lens.astype(np.int32)),
            num_decodes=int((counts == 1).sum()),
            prefills=tuple(
                Prefill(row, int(starts[row]), int(counts[row]), int(context_lens[row]))
                for row in np.flatnonzero(counts > 1).tolist()
            ),
        )
        return self._tensor(token_ids), step, (stops - 1).tolist()

    def _tensor(self, array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _attention(cache: KVCache, dtype: torch.dtype, num_heads: int, kernels: Kernels | None) -> Attention:
    attention_kernels = None if kernels is None else kernels.attention_for(cache, dtype, num_heads)
    if attention_kernels is None:
        return TorchPagedAttention(cache, num_heads=num_heads)
    return CpuPagedAttention(attention_kernels, num_heads=num_heads)


def _decoder(model: Llama, attention: CpuPagedAttention, kernels: Kernels) -> DecoderKernel | None:
    """None for models that do more between two products than the kernel knows."""
    layers = []
    for layer in model.layers:
        products = (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
        packed = [product for product in products if isinstance(product, PackedLinear)]
        if layer.qk_norms is not None or len(packed) < len(products):
            return None
        layers.append(LayerProducts(*packed))
    return DecoderKernel(kernels, layers, attention.kernels)


def _check_finite(logits: Tensor, requests: Sequence[Request]) -> None:
    """A sum is finite only if all its terms are, and costs a tenth of looking at each."""
    finite = logits.sum(-1).isfinite()
    if not finite.all():
        bad = [request.request_id for request, good in zip(requests, finite.tolist(), strict=True) if not good]
        raise RunnerError("the model's output is not finite", bad)


def _why_stuck(request: Request) -> str:
    if request.matcher is not None and request.matcher.failure is not None:
        return request.matcher.failure
    return "its sampling parameters leave no token to choose"
