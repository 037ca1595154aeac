"""Pictures from bytes to tiles, against the preprocessor of transformers, and what is refused."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine.media.errors import MediaError, SettingsError
from engine.media.picture import cut, decode, grid, identifier
from engine.media.settings import PictureSettings, settings_from_folder
from engine.model.errors import ModelError
from engine.model.fields import Fields
from engine.model.vision_config import VisionConfig, configs_from_huggingface
from tests.seeing import draw, encoded
from tests.tiny_vlm import make_tiny_vlm

MAX_PIXELS = 1 << 20
SETTINGS = PictureSettings(64, 32, True, 1, 1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 16)


@pytest.fixture(scope="module")
def vision(tiny_vlm: Path) -> VisionConfig:
    return configs_from_huggingface(Fields.from_json(tiny_vlm / "config.json"))[1]


@pytest.mark.parametrize("size", [(64, 64), (1, 1), (33, 32), (31, 97), (300, 2), (1, 200), (129, 127), (640, 480)])
@pytest.mark.parametrize("changes", [{}, {"longest_edge": 97}, {"longest_edge": 32}, {"split": False}, {"resample": 3}])
def test_tiles_are_those_of_transformers_bit_for_bit(size: tuple[int, int], changes: dict[str, Any]) -> None:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    settings = replace(SETTINGS, **changes)
    image = draw(*size, seed=sum(size))
    reference = Idefics3ImageProcessorPil(
        size={"longest_edge": settings.longest_edge},
        max_image_size={"longest_edge": settings.tile_size},
        do_image_splitting=settings.split,
        resample=settings.resample,
        return_row_col_info=True,
    )([image], return_tensors="np")
    values = settings.levels(3)[np.arange(3)[:, None, None], cut(image, settings)]
    assert np.array_equal(values, reference["pixel_values"][0])
    assert reference["pixel_attention_mask"].all()
    rows, cols = grid(image, settings)
    assert ([[rows]], [[cols]]) == (reference["rows"], reference["cols"])


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_known_formats_are_decoded(format: str) -> None:
    image = draw(40, 30, seed=1)
    decoded = decode(encoded(image, format), max_pixels=MAX_PIXELS)
    assert (decoded.mode, decoded.size) == ("RGB", (40, 30))
    if format in ("PNG", "BMP"):
        assert decoded.tobytes() == image.tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_upright(orientation: int) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(draw(40, 30, seed=1), "PNG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    decoded = decode(data, max_pixels=MAX_PIXELS)
    assert (decoded.size, decoded.tobytes()) == (expected.size, expected.tobytes())


def test_what_shows_through_is_white_in_every_mode_that_has_it() -> None:
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([10, 20, 30])
    for data in (
        encoded(clear, "PNG"),
        encoded(clear.convert("LA"), "PNG"),
        encoded(palette, "PNG", transparency=0),
        encoded(Image.new("RGB", (4, 4), (10, 20, 30)), "PNG", transparency=(10, 20, 30)),
    ):
        assert decode(data, max_pixels=MAX_PIXELS).getpixel((1, 1)) == (255, 255, 255)
    half = decode(encoded(Image.new("RGBA", (4, 4), (0, 0, 0, 128)), "PNG"), max_pixels=MAX_PIXELS)
    assert half.getpixel((1, 1)) == (127, 127, 127)


def test_odd_modes_are_read_as_what_they_show() -> None:
    sixteen = Image.fromarray(np.full((4, 4), 0x8000, dtype=np.uint16))
    assert decode(encoded(sixteen, "PNG"), max_pixels=MAX_PIXELS).getpixel((0, 0)) == (128, 128, 128)
    for mode, shown in (("L", (200, 200, 200)), ("1", (255, 255, 255)), ("P", (200, 200, 200))):
        image = Image.new("L", (4, 4), 200).convert(mode)
        assert decode(encoded(image, "PNG"), max_pixels=MAX_PIXELS).getpixel((0, 0)) == shown
    cmyk = decode(encoded(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG"), max_pixels=MAX_PIXELS)
    assert cmyk.getpixel((0, 0)) == (255, 255, 255)


def test_of_a_cameras_several_pictures_the_first_is_taken() -> None:
    data = encoded(draw(40, 30, seed=1), "MPO", save_all=True, append_images=[draw(8, 8, seed=2)])
    assert decode(data, max_pixels=MAX_PIXELS).size == (40, 30)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_animated_pictures_are_refused(format: str) -> None:
    data = encoded(draw(8, 8, seed=1), format, save_all=True, append_images=[draw(8, 8, seed=2)])
    with pytest.raises(MediaError, match="animated"):
        decode(data, max_pixels=MAX_PIXELS)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width: int, height: int) -> bytes:
    """A PNG whose few bytes say that it is this large."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(1025, 1024), (20_000, 20_000), (2**31 - 1, 2**31 - 1)])
def test_large_pictures_are_refused_before_they_are_decoded(size: tuple[int, int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(MediaError, match=f"{size[0]} x {size[1]} pixels, at most 1048576"):
            decode(bomb(*size), max_pixels=MAX_PIXELS)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no picture",
        encoded(draw(64, 64, seed=1), "PNG")[:200],
        encoded(draw(64, 64, seed=1), "JPEG")[:300],
        bomb(100, 100),
        b"\x89PNG\r\n\x1a\n" + b"\xff" * 40,
        encoded(draw(8, 8, seed=1), "TIFF"),
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    ],
)
def test_what_is_no_picture_is_one_error(data: bytes) -> None:
    with pytest.raises(MediaError) as raised:
        decode(data, max_pixels=MAX_PIXELS)
    assert "\n" not in str(raised.value)


def bmp(width: int, height: int, data: bytes) -> bytes:
    """Eight bits for a pixel, run-length encoded."""
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(data), 0, 0, 256, 0) + bytes(4 * 256)
    return b"BM" + struct.pack("<IHHI", 14 + len(head) + len(data), 0, 0, 14 + len(head)) + head + data


def progressive(num_scans: int) -> bytes:
    """A JPEG with its last scan once more, again and again."""
    data = encoded(draw(40, 30, seed=1), "JPEG", progressive=True)
    scan = data[data.rfind(b"\xff\xda") : -2]
    return data[:-2] + scan * num_scans + b"\xff\xd9"


def behind_head(format: str, part: bytes, size: int) -> bytes:
    """A picture of this format with something in its file over and over."""
    data = encoded(Image.new("P", (4, 4)), format) if format == "GIF" else encoded(draw(4, 4, seed=1), format)
    at = {"PNG": 33, "JPEG": 2, "GIF": data.find(b",")}[format]
    return data[:at] + part * (size // len(part)) + data[at:]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bomb(1 << 16, 1), "at most 65535 on a side"),
        (bmp(1 << 10, 1 << 10, b"\0\2\0\xff"), "compressed BMP"),
        (progressive(100), "more than 64 scans"),
        (behind_head("PNG", chunk(b"zzZz", b""), 1 << 20), "more than 16384 parts"),
        (behind_head("JPEG", b"\xff\xfe\0\2", 1 << 20), "more than 16384 parts"),
        (behind_head("JPEG", b"\xff\xe1\0\x08Exif\0\0", 1 << 20), "more than 16384 parts"),
        (behind_head("JPEG", b"\xff", 1 << 20), "more than 16384 parts"),
        (behind_head("GIF", b"!\xfe\x01c\0", 1 << 20), "more than 1024 comment blocks"),
        (behind_head("GIF", b"!\xff" + b"\1a" * (1 << 19), 1 << 21), "more than 1024 comment blocks"),
        (behind_head("GIF", b"\1", 1 << 20), "more than 131072 blocks"),
    ],
    ids=["line", "run-lengths", "scans", "chunks", "comments", "exif", "filling", "notes", "extension", "junk"],
)
def test_files_that_take_longer_than_their_pixels_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        decode(data, max_pixels=MAX_PIXELS)


def test_files_of_usual_parts_are_not_refused() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (1000, 1000, 3), dtype=np.uint8))
    for data in (
        encoded(noise, "PNG"),
        encoded(noise.quantize(256), "GIF", comment=b"c" * 10_000),
        encoded(noise, "JPEG", progressive=True, comment=b"c" * 10_000, restart_marker_blocks=1),
        encoded(draw(40, 30, seed=1), "JPEG") + b"\xff\xda\0\2" * 1000,  # a camera's film, behind its picture
        progressive(20),
    ):
        decode(data, max_pixels=MAX_PIXELS)


def test_any_change_to_a_files_bytes_is_a_picture_or_one_error() -> None:
    chooser = np.random.default_rng(0)
    for format in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        whole = encoded(draw(24, 24, seed=1), format)
        for _ in range(60):
            data = bytearray(whole)
            for place in chooser.integers(0, len(data), 3):
                data[place] = chooser.integers(256)
            try:
                assert decode(bytes(data), max_pixels=MAX_PIXELS).mode == "RGB"
            except MediaError:
                pass


def test_names_tell_pixels_settings_and_models_apart_and_nothing_else() -> None:
    image = draw(40, 30, seed=1)
    png, bmp = (decode(encoded(image, format), max_pixels=MAX_PIXELS) for format in ("PNG", "BMP"))
    name = identifier(png, SETTINGS, b"model")
    assert identifier(bmp, SETTINGS, b"model") == name
    assert len(bytes.fromhex(name)) == 16
    others = {
        identifier(draw(40, 30, seed=2), SETTINGS, b"model"),
        identifier(png, replace(SETTINGS, split=False), b"model"),
        identifier(png, replace(SETTINGS, longest_edge=65), b"model"),
        identifier(png, SETTINGS, b"other"),
        identifier(png.transpose(Image.Transpose.ROTATE_90), SETTINGS, b"model"),
    }
    reshaped = Image.frombytes("RGB", (30, 40), png.tobytes())
    assert len(others | {name, identifier(reshaped, SETTINGS, b"model")}) == 7


def test_settings_are_read_from_the_folders_that_either_version_writes(tiny_vlm: Path, tmp_path: Path) -> None:
    import json

    vision = configs_from_huggingface(Fields.from_json(tiny_vlm / "config.json"))[1]
    assert settings_from_folder(tiny_vlm, vision) == SETTINGS
    inner = json.loads((tiny_vlm / "preprocessor_config.json").read_text())
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": inner, "image_seq_len": 16}))
    assert settings_from_folder(tmp_path, vision) == SETTINGS
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": inner}))
    assert settings_from_folder(tmp_path, vision) == SETTINGS


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("processor_config.json", {"image_seq_len": 17}, "makes 16 rows"),
        ("preprocessor_config.json", {"max_image_size": {"longest_edge": 30}}, "has 7 patches"),
        ("preprocessor_config.json", {"size": {"longest_edge": 5000}}, "more than 4096"),
        ("preprocessor_config.json", {"size": {"height": 5}}, "longest_edge is missing"),
        ("preprocessor_config.json", {"image_std": [0.5, 0, 0.5]}, "positive numbers"),
        ("preprocessor_config.json", {"image_mean": [0.5]}, "a list of 3 numbers"),
        ("preprocessor_config.json", {"resample": 9}, "resample must be one of"),
    ],
)
def test_a_folder_with_settings_the_engine_would_get_wrong_is_refused(
    file: str, change: dict[str, Any], message: str, vision: VisionConfig, tmp_path: Path
) -> None:
    import json

    folder = make_tiny_vlm(tmp_path)
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        settings_from_folder(folder, vision)


def test_requests_change_what_they_may() -> None:
    changed = SETTINGS.changed({"do_image_splitting": False, "size": {"longest_edge": 100}})
    assert changed == replace(SETTINGS, split=False, longest_edge=100)
    for wanted, field in (
        ({"do_image_splitting": 1}, "do_image_splitting"),
        ({"size": {"longest_edge": 4097}}, "size"),
        ({"size": {"longest_edge": True}}, "size"),
        ({"size": {"height": 3, "width": 4}}, "size"),
        ({"size": 5}, "size"),
        ({"max_image_size": {"longest_edge": 64}}, "max_image_size"),
        ({"trust_remote_code": True}, "trust_remote_code"),
    ):
        with pytest.raises(SettingsError) as raised:
            SETTINGS.changed(wanted)
        assert raised.value.field == field
