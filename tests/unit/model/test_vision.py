"""Models that see, against transformers on the same weights: encodings, logits, and what is said of pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.media.picture import cut
from engine.model.loader import ModelError, load_model
from engine.model.vision import VisionTower
from tests.seeing import Sight, draw, make_sight, reference_processor, reference_vlm
from tests.tiny_vlm import make_tiny_vlm

TOLERANCE = 1e-5
"""Largest difference between float32 values, as a share of the largest."""
SIZES = [(64, 64), (100, 50), (31, 97), (32, 32), (7, 300)]


def assert_equal_float32(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=TOLERANCE * float(expected.abs().max()), rtol=0)


@pytest.fixture(scope="module", params=["idefics3", "smolvlm"])
def sight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sight:
    return make_sight(make_tiny_vlm(tmp_path_factory.mktemp("vlm"), model_type=request.param))


@pytest.mark.parametrize("split", [True, False])
def test_encodings_logits_and_greedy_tokens_equal_transformers_for_none_to_four_pictures(
    sight: Sight, split: bool
) -> None:
    processor = reference_processor(sight.folder, do_image_splitting=split)
    model = reference_vlm(sight.folder)
    for count in range(5):
        images = [draw(*SIZES[(count + number) % len(SIZES)], seed=number) for number in range(count)]
        text = "<|im_start|>User: what" + "".join(f"<image> and {number}" for number in range(count)) + " is that"
        inputs = processor(text=text, images=[images] if images else None, return_tensors="pt")
        ids = inputs["input_ids"][0].tolist()
        request = sight.request(text, images, split=split)
        assert request.prompt_token_ids == ids
        with torch.inference_mode():
            expected = model(**inputs).logits[0].float()
        assert_equal_float32(sight.prefill(request), expected[-1])
        chunked = sight.request(text, images, split=split)
        assert_equal_float32(sight.prefill(chunked, chunk=23), expected[-1])
        with torch.inference_mode():
            said = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, len(ids) :].tolist()
        assert sight.say(request, 8)[: len(said)] == said


def test_what_is_in_a_picture_changes_what_is_said(sight: Sight) -> None:
    text = "<|im_start|>User:<image> what is that"
    said = {tuple(sight.say(sight.request(text, [draw(64, 64, seed=seed)]), 8)) for seed in range(4)}
    assert len(said) > 1


def test_one_placeholder_alone_in_a_step_is_read_from_the_encoding(sight: Sight) -> None:
    """The decode kernels take it then."""
    text, images = "<|im_start|>User:<image> what is that", [draw(64, 64, seed=3)]
    whole = sight.prefill(sight.request(text, images))
    assert_equal_float32(sight.prefill(sight.request(text, images), chunk=1), whole)


def test_steps_of_several_requests_give_each_its_own_pictures(sight: Sight) -> None:
    first = sight.request("<|im_start|>User:<image> what", [draw(64, 64, seed=1)])
    other = sight.request("<|im_start|>User:<image> and<image>", [draw(64, 32, seed=2), draw(64, 64, seed=1)])
    text_only = sight.request("<|im_start|>User: what", [])
    alone = [sight.prefill(request) for request in (first, other, text_only)]
    requests = [sight.again(request) for request in (text_only, other, first)]
    together = sight.step(*requests)
    for ours, expected in zip(together, reversed(alone), strict=True):
        assert_equal_float32(ours, expected)


def test_tower_leaves_padding_out_as_transformers_does(sight: Sight) -> None:
    """Prepared pictures have none; the model knows it all the same."""
    model = reference_vlm(sight.folder)
    vision = sight.loaded.vision
    assert vision is not None
    levels = vision.settings.levels(3)
    tower = VisionTower(vision.config, vision.weights, levels, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    tiles = torch.randint(0, 256, (5, 3, 32, 32), generator=generator, dtype=torch.uint8)
    mask = torch.zeros(5, 32, 32, dtype=torch.bool)
    for index, (high, wide) in enumerate([(32, 32), (20, 32), (32, 12), (9, 17), (4, 4)]):
        mask[index, :high, :wide] = True
    values = torch.from_numpy(levels)[torch.arange(3)[:, None, None], tiles.long()]
    with torch.inference_mode():
        out = model.get_image_features(values[None], mask[None], return_dict=True)
        expected = torch.cat(list(out.pooler_output))
        ours = tower.encode(tiles, mask)
    assert_equal_float32(ours, expected)


@pytest.mark.parametrize(
    ("side", "patch", "scale"), [(26, 4, 3), (31, 4, 1), (32, 3, 2)], ids=["scale 3", "scale 1", "odd patches"]
)
def test_pixels_that_make_no_whole_patch_are_not_seen(tmp_path: Path, side: int, patch: int, scale: int) -> None:
    """As in models whose pictures are 384 pixels wide and their patches 14."""
    rows = (side // patch // scale) ** 2
    folder = make_tiny_vlm(
        tmp_path,
        longest_edge=2 * side,
        tile_size=side,
        rows_per_tile=rows,
        scale_factor=scale,
        vision={"image_size": side, "patch_size": patch},
    )
    sight = make_sight(folder)
    inputs = reference_processor(folder, image_seq_len=rows)(
        text="<|im_start|>User:<image> what", images=[[draw(64, 64, seed=1)]], return_tensors="pt"
    )
    with torch.inference_mode():
        expected = reference_vlm(folder)(**inputs).logits[0, -1].float()
    request = sight.request("<|im_start|>User:<image> what", [draw(64, 64, seed=1)])
    assert request.prompt_token_ids == inputs["input_ids"][0].tolist()
    assert_equal_float32(sight.prefill(request), expected)


def test_bfloat16_is_about_as_far_from_float32_as_in_transformers(sight: Sight) -> None:
    vision = sight.loaded.vision
    assert vision is not None
    rows = load_model(sight.folder, dtype=torch.bfloat16).vision
    assert rows is not None
    tiles = torch.from_numpy(cut(draw(64, 64, seed=1), vision.settings))
    levels = vision.settings.levels(3)
    values = torch.from_numpy(levels)[torch.arange(3)[:, None, None], tiles.long()]
    cpu = torch.device("cpu")
    with torch.inference_mode():
        exact = VisionTower(vision.config, vision.weights, levels, dtype=torch.float32, device=cpu).encode(tiles)
        ours = VisionTower(rows.config, rows.weights, levels, dtype=torch.bfloat16, device=cpu).encode(tiles)
        model = reference_vlm(sight.folder).bfloat16()
        theirs = torch.cat(list(model.get_image_features(values[None], return_dict=True).pooler_output))
    distance = [(found.float() - exact).norm() / exact.norm() for found in (ours, theirs)]
    assert distance[0] < 1.25 * distance[1]


def test_only_what_sees_is_loaded_for_an_encoder(sight: Sight) -> None:
    alone = load_model(sight.folder, dtype=torch.float32, vision_only=True)
    assert alone.weights == {}
    assert alone.vision is not None
    assert sight.loaded.vision is not None
    assert alone.vision.fingerprint == sight.loaded.vision.fingerprint
    assert alone.fingerprint != sight.loaded.fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": None}, "vision_config is missing"),
        ({"text_config": None}, "text_config is missing"),
        ({"image_token_id": 5}, "is not <image> in tokenizer.json"),
        ({"image_token_id": 360}, "none of the 360 tokens"),
        ({"text_config.model_type": "mistral"}, "model_type 'mistral' is not supported"),
        ({"text_config.qk_layer_norms": True}, "qk_layer_norms"),
        ({"vision_config.hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"vision_config.num_attention_heads": 5}, "no multiple of 5"),
        ({"vision_config.num_hidden_layers": 3}, "encoder.layers.2.self_attn.q_proj.weight is missing"),
        ({"vision_config.num_hidden_layers": 1}, "has no place"),
        ({"vision_config.intermediate_size": 65}, "has shape"),
        ({"scale_factor": 3}, "must be a multiple of 3"),
        ({"vision_config.num_channels": 1}, "num_channels"),
    ],
)
def test_a_folder_that_would_be_computed_wrongly_is_refused(
    tiny_vlm: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    for file in tiny_vlm.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tiny_vlm / "config.json").read_text())
    for key, value in change.items():
        *section, name = key.split(".")
        (config[section[0]] if section else config)[name] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path, dtype=torch.float32)


def test_tied_embeddings_and_a_template_of_its_own_file_load(tmp_path: Path) -> None:
    folder = make_tiny_vlm(
        tmp_path, tie_word_embeddings=True, template_file="chat_template.jinja", dtype=torch.bfloat16
    )
    loaded = load_model(folder, dtype=torch.float32)
    assert loaded.config.tie_word_embeddings
    assert loaded.tokenizer.has_chat_template
    assert loaded.vision is not None
    assert set(loaded.vision.weights).isdisjoint(loaded.weights)
