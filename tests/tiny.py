"""Tiny random models for tests: a Hugging Face folder, or the same weights as one GGUF file.

Two layers, GQA 2:1, 320 byte-level tokens. transformers loads the folders too, so it can serve as the reference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file

VOCAB_SIZE = 320
ENDOFTEXT, IM_START, IM_END = 317, 318, 319
SPECIAL_TOKENS = {"<|endoftext|>": ENDOFTEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '')"
    " + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_WORDS = [
    " the",
    " and",
    " of",
    " to",
    " in",
    " is",
    " that",
    " you",
    " hello",
    " world",
    " what",
    " with",
    " have",
    "ing",
    "tion",
    "ment",
    "er",
    "es",
    "ly",
    "out",
    "all",
    "com",
    "ight",
    "ould",
    "ence",
    "able",
    "ther",
]

_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
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


def make_tiny(
    folder: Path,
    *,
    architecture: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    tie_word_embeddings: bool = False,
    num_shards: int = 1,
    **config: Any,
) -> Path:
    """Write a Hugging Face model folder; keyword arguments not named here go into config.json. Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_size": num_heads * head_dim,
        "intermediate_size": 2 * num_heads * head_dim,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": ENDOFTEXT,
        "eos_token_id": IM_END,
        "torch_dtype": str(dtype).removeprefix("torch."),
    } | config
    _write_json(folder / "config.json", fields)
    _write_json(folder / "tokenizer.json", tokenizer_json())
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "chat_template": CHATML,
        },
    )
    weights = _random_weights(fields, architecture, seed)
    _save_safetensors(folder, {name: tensor.to(dtype) for name, tensor in weights.items()}, num_shards)
    return folder


def make_tiny_gguf(
    path: Path, *, architecture: str = "llama", seed: int = 0, quantization: str = "F32", **config: Any
) -> Path:
    """Write the model of make_tiny(architecture=, seed=, …) as one GGUF file, its matrices as `quantization`."""
    folder = make_tiny(path.with_suffix(".hf"), architecture=architecture, seed=seed, **config)
    fields = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_key_length(fields["head_dim"])
    writer.add_value_length(fields["head_dim"])
    writer.add_rope_dimension_count(fields["head_dim"])
    writer.add_rope_freq_base(fields["rope_theta"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_vocab_size(fields["vocab_size"])
    _add_tokenizer(writer)

    weights = _random_weights(fields, architecture, seed)
    for name, tensor in weights.items():
        array = tensor.numpy()
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            array = _interleave(array, fields["head_dim"])
        kind = GGMLQuantizationType[quantization] if array.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """The tokens in order of their ids, and the BPE merges."""
    tokens = [*_byte_characters().values()]
    merges = []
    for word in _WORDS:
        characters = word.replace(" ", "Ġ")
        for end in range(2, len(characters) + 1):
            if characters[:end] not in tokens:
                merges.append((characters[: end - 1], characters[end - 1]))
                tokens.append(characters[:end])
    merges = merges[: ENDOFTEXT - 256]
    assert len(merges) == ENDOFTEXT - 256
    return [*tokens[:ENDOFTEXT], *SPECIAL_TOKENS], merges


def _byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def tokenizer_json(more: Sequence[str] = ()) -> dict[str, Any]:
    """What stands in tokenizer.json; `more` are special tokens after those that every tiny model has."""
    tokens, merges = vocabulary()
    special = SPECIAL_TOKENS | {token: len(tokens) + place for place, token in enumerate(more)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id_, "content": token} | flags for token, id_ in special.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: id_ for id_, token in enumerate([*tokens, *more])},
            "merges": [list(pair) for pair in merges],
        },
    }


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    special, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([special if token in SPECIAL_TOKENS else normal for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(ENDOFTEXT)
    writer.add_eos_token_id(IM_END)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)


def _random_weights(fields: dict[str, Any], architecture: str, seed: int) -> dict[str, torch.Tensor]:
    """Float32 weights by Hugging Face name; scaled so that the layers, not the embedding, decide the next token."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, head_dim = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    q_size, kv_size = fields["num_attention_heads"] * head_dim, fields["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain / math.sqrt(columns)

    def near(value: float, size: int) -> torch.Tensor:
        return value + 0.1 * torch.randn(size, generator=generator)

    weights = {"model.embed_tokens.weight": torch.randn(fields["vocab_size"], hidden, generator=generator) * 0.5}
    for layer in range(fields["num_hidden_layers"]):
        block = {
            "input_layernorm.weight": near(1.0, hidden),
            "self_attn.q_proj.weight": matrix(q_size, hidden, 2.0),
            "self_attn.k_proj.weight": matrix(kv_size, hidden, 2.0),
            "self_attn.v_proj.weight": matrix(kv_size, hidden),
            "self_attn.o_proj.weight": matrix(hidden, q_size, 2.0),
            "post_attention_layernorm.weight": near(1.0, hidden),
            "mlp.gate_proj.weight": matrix(inner, hidden),
            "mlp.up_proj.weight": matrix(inner, hidden),
            "mlp.down_proj.weight": matrix(hidden, inner, 2.0),
        }
        if architecture == "qwen2":
            for projection, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
                block[f"self_attn.{projection}_proj.bias"] = near(0.0, size)
        if architecture == "qwen3":
            block["self_attn.q_norm.weight"] = near(1.0, head_dim)
            block["self_attn.k_norm.weight"] = near(1.0, head_dim)
        weights |= {f"model.layers.{layer}.{name}": tensor for name, tensor in block.items()}
    weights["model.norm.weight"] = near(1.0, hidden)
    if not fields["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(fields["vocab_size"], hidden)
    return weights


def _interleave(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder each head's rows as GGUF `llama` files have them: rotary pairs side by side, not half a head apart."""
    return rows.reshape(-1, 2, head_dim // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _gguf_name(name: str) -> str:
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    _, _, layer, module, *rest = name.split(".")
    stem = ".".join([module, *rest[:-1]])
    return f"blk.{layer}.{_GGUF_NAMES[stem]}.{rest[-1]}"


def _save_safetensors(folder: Path, weights: dict[str, torch.Tensor], num_shards: int) -> None:
    if num_shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(weights)
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        chosen = names[shard::num_shards]
        save_file({name: weights[name] for name in chosen}, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file_name)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1))
