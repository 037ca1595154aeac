"""What the part that sees is made of, in SmolVLM and Idefics3: a SigLIP tower whose patches a text model reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.model.config import ModelConfig, config_from_huggingface
from engine.model.errors import ModelError
from engine.model.fields import Fields

VISION_MODELS = ("idefics3", "smolvlm")
"""Values of model_type."""
_ACTIVATION = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class VisionConfig:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_channels: int
    image_size: int
    """Side of the square of pixels that has a position of its own for every patch."""
    patch_size: int
    """Side of a patch, in pixels."""
    layer_norm_eps: float
    scale_factor: int
    """So many patches in each direction become one row of an encoding."""
    output_size: int
    """Columns of an encoding: the text model's hidden size."""
    image_token_id: int
    """The placeholder in a prompt, one for each row."""

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    def rows_per_tile(self, side: int) -> int:
        """Rows that a square of so many pixels makes."""
        return (side // self.patch_size // self.scale_factor) ** 2

    def weight_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every weight, by its Hugging Face name, with its shape."""
        hidden, inner, patch = self.hidden_size, self.intermediate_size, self.patch_size
        tower = "model.vision_model"

        def module(name: str, *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
            yield f"{tower}.{name}.weight", shape
            yield f"{tower}.{name}.bias", shape[:1]

        yield from module("embeddings.patch_embedding", hidden, self.num_channels, patch, patch)
        yield f"{tower}.embeddings.position_embedding.weight", (self.patches_per_side**2, hidden)
        for index in range(self.num_layers):
            layer = f"encoder.layers.{index}"
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                yield from module(f"{layer}.self_attn.{name}", hidden, hidden)
            yield from module(f"{layer}.layer_norm1", hidden)
            yield from module(f"{layer}.mlp.fc1", inner, hidden)
            yield from module(f"{layer}.mlp.fc2", hidden, inner)
            yield from module(f"{layer}.layer_norm2", hidden)
        yield from module("post_layernorm", hidden)
        yield "model.connector.modality_projection.proj.weight", (self.output_size, hidden * self.scale_factor**2)


def configs_from_huggingface(fields: Fields) -> tuple[ModelConfig, VisionConfig]:
    """Read config.json of such a model: of the text model within it, and of what sees."""
    text, vision = fields.section("text_config"), fields.section("vision_config")
    if text is None or vision is None:
        missing = "text_config" if text is None else "vision_config"
        raise ModelError(f"{fields.source}: {missing} is missing")
    if text.flag("qk_layer_norms", False) or text.flag("use_resampler", False):
        raise ModelError(f"{text.source}: qk_layer_norms and use_resampler are not supported")
    tied = fields.flag("tie_word_embeddings", False)
    config = config_from_huggingface(text.with_("tie_word_embeddings", tied).with_default("rms_norm_eps", 1e-5))
    return config, _vision(fields, vision, config)


def _vision(fields: Fields, vision: Fields, text: ModelConfig) -> VisionConfig:
    if (activation := vision.text("hidden_act", _ACTIVATION)) != _ACTIVATION:
        raise ModelError(f"{vision.source}: hidden_act {activation!r} is not supported (supported: {_ACTIVATION})")
    config = VisionConfig(
        # What a config.json leaves out is what the library that wrote it has by default.
        hidden_size=vision.integer("hidden_size", 1152),
        intermediate_size=vision.integer("intermediate_size", 3072),
        num_layers=vision.integer("num_hidden_layers", 12),
        num_heads=vision.integer("num_attention_heads", 16),
        num_channels=vision.integer("num_channels", 3),
        image_size=vision.integer("image_size", 224),
        patch_size=vision.integer("patch_size", 32),
        layer_norm_eps=vision.number("layer_norm_eps", 1e-6),
        scale_factor=fields.integer("scale_factor", 2),
        output_size=text.hidden_size,
        image_token_id=fields.integer("image_token_id"),
    )
    if config.num_channels != 3:
        raise ModelError(f"{vision.source}: num_channels {config.num_channels} is not supported (supported: 3)")
    if config.hidden_size % config.num_heads:
        raise ModelError(
            f"{vision.source}: hidden_size {config.hidden_size} is no multiple of {config.num_heads} attention heads"
        )
    if config.image_token_id >= text.vocab_size:
        raise ModelError(
            f"{fields.source}: image_token_id {config.image_token_id} is none of the {text.vocab_size} tokens"
        )
    return config
