"""The whole product, started as a user starts it, and the reference its answers are compared with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

START_TIMEOUT = 90.0
STOP_TIMEOUT = 20.0


@dataclass(frozen=True)
class Engine:
    url: str
    role: str
    pid: int

    def metrics(self) -> dict[str, float]:
        """Every sample, summed over labels other than those in the key: `name` and `name{label="value"}`."""
        return read_metrics(f"{self.url}/metrics")


@dataclass(frozen=True)
class Stack:
    base_url: str
    model: str
    router: str
    router_pid: int
    engines: tuple[Engine, ...]
    store: str

    @property
    def prefill(self) -> Engine:
        return next(engine for engine in self.engines if engine.role == "prefill")

    @property
    def decode(self) -> Engine:
        return next(engine for engine in self.engines if engine.role == "decode")


def read_metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, value = line.rsplit(" ", 1)
        samples[name] = float(value)
        bare = name.split("{", 1)[0]
        samples[bare] = samples.get(bare, 0.0) + (float(value) if "{" in name else 0.0)
    return samples


def post(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
    return dict(json.loads(post_raw(url, body, headers)))


def post_raw(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> bytes:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
    )
    with urllib.request.urlopen(request, timeout=100) as answer:
        return bytes(answer.read())


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def start_stack(folder: Path, *flags: str, **env: str) -> tuple[subprocess.Popen[bytes], Stack]:
    """`env` is added to the environment."""
    ready = folder / "up.json"
    with open(folder / "up.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "backhaul", "up", "--port", "0", "--json", str(ready), *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
        )
    deadline = time.monotonic() + START_TIMEOUT
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            stop_stack(process)
            pytest.fail(f"backhaul up did not become ready:\n{(folder / 'up.log').read_text()[-4000:]}")
        time.sleep(0.05)
    facts = json.loads(ready.read_text())
    return process, Stack(
        base_url=facts["base_url"],
        model=facts["model"],
        router=facts["router"]["url"],
        router_pid=facts["router"]["pid"],
        engines=tuple(Engine(**engine) for engine in facts["engines"]),
        store=facts["store"]["url"],
    )


def stop_stack(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0, f"backhaul up ended with {process.returncode}"


class Reference:
    """`transformers` on the same weights; the GGUF file is read by the `gguf` library, not by the engine's reader."""

    def __init__(self, gguf: Path, dtype: torch.dtype) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
        from transformers.initialization import no_init_weights

        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        config = LlamaConfig(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=64,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            vocab_size=49152,
            tie_word_embeddings=True,
        )
        with no_init_weights():  # which takes longer than what it is overwritten with
            model = LlamaForCausalLM(config)
        model.tie_weights()
        missing = model.load_state_dict(read_weights(gguf), strict=False)
        assert missing.unexpected_keys == []
        assert missing.missing_keys in ([], ["lm_head.weight"])
        self.model = model.to(dtype).eval()

    @torch.inference_mode()
    def likeliest(self, prompt_ids: list[int], answer: list[int]) -> list[int]:
        """For each place of the answer the token that a cold model finds likeliest after those before it, from one pass
        over all of it. By induction, an answer that equals this is the one of greedy decoding."""
        logits = self.model(torch.tensor([prompt_ids + answer[:-1]]), logits_to_keep=len(answer)).logits
        return [int(token) for token in logits[0].argmax(-1)]

    def ends_rightly(self, answer: list[int], max_tokens: int) -> bool:
        """Whether its first end-of-sequence token is its last one, or it has none and all the tokens it may have."""
        ends = [self.tokenizer.convert_tokens_to_ids(name) for name in END_TOKENS]
        return len(answer) == next((n for n, token in enumerate(answer, 1) if token in ends), max_tokens)

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


HEADS, KV_HEADS = 9, 3
END_TOKENS = ("<|im_end|>", "<|endoftext|>")
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a GGUF file under the names `transformers` gives them, float32."""
    import numpy as np
    from gguf import GGUFReader, dequantize

    weights = {}
    for tensor in GGUFReader(str(path)).tensors:
        weight = np.array(dequantize(tensor.data, tensor.tensor_type))
        *layer, part = tensor.name.removesuffix(".weight").split(".")
        if part in ("attn_q", "attn_k"):  # GGUF keeps the rotary pairs side by side, transformers in two halves
            heads = HEADS if part == "attn_q" else KV_HEADS
            rows, columns = weight.shape
            weight = weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        weights[f"{prefix}{NAMES[part]}.weight"] = torch.from_numpy(np.ascontiguousarray(weight))
    return weights


WORDS = re.findall(
    r"\w+",
    """The harbour was quiet when the last freight train left for the north carrying copper timber and
    letters that nobody had read Seven sailors counted barrels under a pale lamp while the captain wrote in a
    narrow book every price he could remember In winter the river froze and children crossed it on their way
    to school singing about summer and green apples Later a teacher asked them which year had been the coldest""",
)
