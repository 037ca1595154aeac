"""A tiny random vision-language model for tests: a folder as those of SmolVLM and Idefics3 are.

    python -m tests.tiny_vlm DIR

Pictures become tiles of 32 × 32 pixels with 16 placeholders each: one for all of the picture, and, where it is split,
up to 2 × 2 for its parts. So a square picture takes 5 tiles, one twice as wide as high 3.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, Literal

import torch

from tests.tiny import ENDOFTEXT, tokenizer_json, vocabulary

IMAGE, FAKE, GLOBAL, END = "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"
SPECIAL_TOKENS = (FAKE, IMAGE, END, GLOBAL, *(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)))
IMAGE_TOKEN_ID = 321
VOCAB_SIZE = 360
ROWS_PER_TILE = 16
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""As these models have it: what is said must come as a list of parts, or is not seen."""
ModelType = Literal["idefics3", "smolvlm"]


def make_tiny_vlm(
    folder: Path | str,
    *,
    model_type: ModelType = "idefics3",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tie_word_embeddings: bool = False,
    longest_edge: int = 64,
    tile_size: int = 32,
    rows_per_tile: int = ROWS_PER_TILE,
    scale_factor: int = 2,
    do_image_splitting: bool = True,
    template_file: Literal["chat_template.json", "chat_template.jinja"] = "chat_template.json",
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> Path:
    """Write the model, its weights saved by transformers. `vision` and `text` change those parts of config.json.

    longest_edge: pixels to which pictures are scaled before they are split; tile_size, rows_per_tile: must suit the
    vision part. Returns the folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"vision": vision or {}, "text": text or {}}
    model = _model(model_type, seed, tie_word_embeddings, scale_factor, **parts).to(dtype)
    model.save_pretrained(folder)
    tokenizer = tokenizer_json(SPECIAL_TOKENS)
    _write_json(folder / "tokenizer.json", tokenizer)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": END,
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": [FAKE, IMAGE, END],
            "model_max_length": 4096,
        },
    )
    _write_json(
        folder / "generation_config.json", {"bos_token_id": 318, "eos_token_id": 322, "pad_token_id": ENDOFTEXT}
    )
    _write_json(
        folder / "preprocessor_config.json",
        {
            "do_convert_rgb": True,
            "do_image_splitting": do_image_splitting,
            "do_normalize": True,
            "do_pad": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_processor_type": "Idefics3ImageProcessor",
            "image_std": [0.5, 0.5, 0.5],
            "max_image_size": {"longest_edge": tile_size},
            "processor_class": "Idefics3Processor",
            "resample": 1,
            "rescale_factor": 1 / 255,
            "size": {"longest_edge": longest_edge},
        },
    )
    _write_json(
        folder / "processor_config.json", {"image_seq_len": rows_per_tile, "processor_class": "Idefics3Processor"}
    )
    if template_file == "chat_template.json":
        _write_json(folder / template_file, {"chat_template": TEMPLATE})
    else:
        (folder / template_file).write_text(TEMPLATE)
    return folder


def _model(
    model_type: ModelType, seed: int, tied: bool, scale_factor: int, vision: dict[str, Any], text: dict[str, Any]
) -> Any:
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        SmolVLMConfig,
        SmolVLMForConditionalGeneration,
    )

    kinds: dict[ModelType, tuple[Any, Any]] = {
        "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration),
        "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration),
    }
    config_class, model_class = kinds[model_type]
    config = config_class(
        text_config={
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "bos_token_id": 318,
            "eos_token_id": 322,
            "pad_token_id": ENDOFTEXT,
            "tie_word_embeddings": tied,
        }
        | text,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 4,
        }
        | vision,
        scale_factor=scale_factor,
        image_token_id=IMAGE_TOKEN_ID,
        tie_word_embeddings=tied,
    )
    model = model_class(config)
    _fill(model, seed)
    return model


def _fill(model: Any, seed: int) -> None:
    """Weights large enough that what is in a picture decides the next token."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            values = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                values = (1.0 if name.endswith("weight") else 0.0) + 0.1 * values
            elif name.endswith("embed_tokens.weight"):
                values = 0.5 * values
            elif name.endswith("position_embedding.weight"):
                values = 0.3 * values
            elif weight.dim() == 1:
                values = 0.1 * values
            else:
                gain = (
                    2.0 if name.endswith(("q_proj.weight", "k_proj.weight", "o_proj.weight", "down_proj.weight")) else 1
                )
                values = gain * values / math.sqrt(weight[0].numel())
            weight.copy_(values)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1))


assert len(vocabulary()[0]) + len(SPECIAL_TOKENS) == VOCAB_SIZE

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="write a tiny vision-language model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model-type", choices=["idefics3", "smolvlm"], default="idefics3")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(make_tiny_vlm(args.folder, model_type=args.model_type, seed=args.seed))
