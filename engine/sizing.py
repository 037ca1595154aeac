"""What an engine takes of the machine: device, dtype, compute threads, and memory for KV."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import StartError
from engine.kv_cache import KVLayout
from engine.model.config import ModelConfig
from engine.model.layers import prefers_bfloat16

DEFAULT_SEQUENCES = 2
"""Sequences of full length the default arena has room for."""
DEFAULT_SHARE = 4
"""The default arena takes at most one part in this many of the free memory."""

ENCODER_SHARE = 16
"""The same of the encoder cache."""

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Sizes:
    max_model_len: int
    """Tokens of prompt and output together."""
    num_blocks: int


def choose_device(config: EngineConfig) -> torch.device:
    """Raises StartError for a GPU that is not there."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise StartError("--device cuda: torch finds no CUDA device here; use --device cpu")
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if prefers_bfloat16(device) else torch.float32
    named: torch.dtype = getattr(torch, config.dtype)
    return named


def choose_threads(config: EngineConfig) -> int:
    return config.threads or len(os.sched_getaffinity(0))


def choose_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens of prompt and output together. Raises StartError if the model was not made for so many."""
    longest = model.max_position_embeddings
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        raise StartError(f"--max-model-len {max_model_len}: the model was made for at most {longest} tokens")
    if max_model_len < 2:
        raise StartError(f"--max-model-len {max_model_len}: a prompt and an answer need at least 2 tokens")
    return max_model_len


def choose_sizes(config: EngineConfig, model: ModelConfig, layout: KVLayout, device: torch.device) -> Sizes:
    """How long sequences may be and how many blocks there are. Raises StartError if the two do not go together."""
    max_model_len = choose_max_model_len(config, model)
    if layout.block_size > max_model_len:
        raise StartError(f"--block-size {layout.block_size}: larger than the longest sequence ({max_model_len} tokens)")
    per_sequence = -(-max_model_len // layout.block_size)
    free = free_memory(device)
    num_blocks = _num_blocks(config, layout, per_sequence, free)
    if num_blocks < per_sequence:
        needed = per_sequence * layout.block_bytes
        raise StartError(
            f"the KV cache has room for {num_blocks * layout.block_size} tokens, a sequence may have {max_model_len}: "
            f"lower --max-model-len, or set --kv-cache-memory-bytes to {needed} or more ({_mib(free)} are free)"
        )
    if num_blocks * layout.block_bytes > free:
        raise StartError(
            f"a KV cache of {_mib(num_blocks * layout.block_bytes)} does not fit into the {_mib(free)} of free memory: "
            "lower --kv-cache-memory-bytes, --num-gpu-blocks-override or --max-model-len"
        )
    return Sizes(max_model_len, num_blocks)


def choose_encoder_blocks(
    config: EngineConfig, block_bytes: int, rows_per_block: int, max_model_len: int, device: torch.device
) -> int:
    """How many blocks the encoder cache has. Raises StartError if there is no room for any."""
    free = free_memory(device)
    if config.encoder_cache_bytes is None:
        wanted = DEFAULT_SEQUENCES * -(-max_model_len // rows_per_block)
        return max(1, min(wanted, free // ENCODER_SHARE // block_bytes))
    num_blocks = config.encoder_cache_bytes // block_bytes
    if num_blocks < 1:
        raise StartError(f"--encoder-cache-bytes {config.encoder_cache_bytes}: a block has {block_bytes} bytes")
    if config.encoder_cache_bytes > free:
        raise StartError(f"--encoder-cache-bytes {config.encoder_cache_bytes}: only {_mib(free)} of memory are free")
    return num_blocks


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on `device`; within a container, at most what it may still use."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _read(_CGROUP / "memory.max").strip(), _read(_CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        # Page cache counts as used but is given up on demand.
        reclaimable = sum(
            int(line.split()[1])
            for line in _read(_CGROUP / "memory.stat").splitlines()
            if line.startswith("inactive_file ")
        )
        available = min(available, max(0, int(limit) - int(used) + reclaimable))
    return available


def _num_blocks(config: EngineConfig, layout: KVLayout, per_sequence: int, free: int) -> int:
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // layout.block_bytes
    return min(DEFAULT_SEQUENCES * per_sequence, free // DEFAULT_SHARE // layout.block_bytes)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
