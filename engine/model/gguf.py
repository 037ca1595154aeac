"""Weights from a GGUF file, under their Hugging Face names."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.config import ModelConfig, config_from_gguf
from engine.model.dequantize import SUPPORTED, as_stored, dequantize
from engine.model.errors import ModelError
from engine.model.fields import Fields
from engine.model.gguf_file import GGUFFile, TensorEntry
from engine.model.quantized import Quantized

_EMBEDDING, _OUTPUT, _ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def read_config(file: GGUFFile) -> ModelConfig:
    fields = Fields(str(file.path), file.metadata)
    if fields.get("split.count") not in (None, 0, 1):
        raise ModelError(f"{file.path} is one part of a split model: join the parts with llama-gguf-split --merge")
    # The architecture comes first: of an unsupported one, nothing else can be expected to be there.
    embedding = file.tensors.get(_EMBEDDING)
    factors = file.tensors.get(_ROPE_FACTORS)
    return config_from_gguf(
        fields,
        vocab_size=embedding.shape[0] if embedding is not None else 1,
        tied=_OUTPUT not in file.tensors,
        rope_factors=None if factors is None else _rope_factors(file, factors),
    )


def read_weights(file: GGUFFile, config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every weight of `config` as `dtype`. A tensor that is missing, misshapen, or of no known use is a ModelError."""
    weights = {}
    unused = set(file.tensors) - {_ROPE_FACTORS}
    for name, shape in config.weight_shapes():
        gguf_name = _gguf_name(name)
        entry = file.tensors.get(gguf_name)
        if entry is None:
            raise ModelError(f"{file.path}: tensor {gguf_name} is missing")
        if entry.shape != shape:
            raise ModelError(
                f"{file.path}: tensor {gguf_name} has shape {list(entry.shape)}, its metadata ask for {list(shape)}"
            )
        weight = _read(file, gguf_name, entry, dtype)
        if _is_interleaved(name, config):
            weight = _rotate_half_order(weight, config.head_dim)
        weights[name] = weight
        unused.discard(gguf_name)
    if unused:
        raise ModelError(f"{file.path}: tensor {min(unused)} has no place in a {config.architecture} model")
    return weights


def read_quantized(file: GGUFFile, config: ModelConfig) -> dict[str, Quantized]:
    """Those weights of read_weights that the file holds quantised, as it holds them."""
    found = {}
    for name, shape in config.weight_shapes():
        entry = file.tensors[_gguf_name(name)]
        quantized = as_stored(torch.from_numpy(file.tensor_bytes(entry)), entry.kind, shape)
        if quantized is None:
            continue
        if _is_interleaved(name, config):
            quantized = quantized.reordered(lambda rows: _rotate_half_order(rows, config.head_dim))
        found[name] = quantized
    return found


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, layer, module = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[module]}.{kind}"


def _read(file: GGUFFile, name: str, entry: TensorEntry, dtype: torch.dtype) -> Tensor:
    if entry.kind not in SUPPORTED:
        raise ModelError(
            f"{file.path}: tensor {name} has the unsupported type {entry.kind} (supported: {', '.join(SUPPORTED)})"
        )
    return dequantize(torch.from_numpy(file.tensor_bytes(entry)), entry.kind, entry.shape, dtype)


def _is_interleaved(name: str, config: ModelConfig) -> bool:
    return config.architecture == "llama" and ("q_proj" in name or "k_proj" in name)


def _rotate_half_order(weight: Tensor, head_dim: int) -> Tensor:
    """Undo the reordering of q and k rows in `llama` files, which puts the two halves of each rotary pair side by side.

    Only `llama` files have it; those of qwen2 and qwen3 keep the pairs half a head apart, as the engine rotates them.
    """
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _rope_factors(file: GGUFFile, entry: TensorEntry) -> tuple[float, ...]:
    return tuple(_read(file, _ROPE_FACTORS, entry, torch.float32).flatten().tolist())
