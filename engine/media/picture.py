"""Pictures from bytes to tiles: decoded, turned upright, scaled and cut as the models' own preprocessor does it.

The bytes are anybody's, and so is what they expand to: what a picture would take is known from its head, before any of
it is decoded.
"""

from __future__ import annotations

import io
import math
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from engine.media.errors import MediaError
from engine.media.outline import check_outline
from engine.media.settings import PictureSettings

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Those that clients send; each further decoder is one more that anybody can try to break."""
MAX_SIDE = (1 << 16) - 1
"""Pixels, which is what a JPEG can have: to scale a line of millions takes gigabytes."""
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_PLAIN = ("RGB", "L", "1", "P", "CMYK", "YCbCr", "HSV", "LAB", "RGBX")
_TRANSPARENT = ("RGBA", "LA", "PA", "RGBa", "La")
_DIGEST_SIZE = 16

# A picture is measured by us, against the limit of this engine, and told of in its own words.
Image.MAX_IMAGE_PIXELS = None

Tiles = npt.NDArray[np.uint8]
"""[tiles, channels, height, width]"""


def decode(data: bytes, *, max_pixels: int) -> Image.Image:
    """The picture, RGB and upright. Raises MediaError."""
    try:
        check_outline(data)
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = picture.size
        if width * height > max_pixels:
            raise MediaError(f"the picture has {width} x {height} pixels, at most {max_pixels} are possible")
        if max(width, height) > MAX_SIDE:
            raise MediaError(f"the picture has {width} x {height} pixels, at most {MAX_SIDE} on a side are possible")
        if any(tile.codec_name == "bmp_rle" for tile in picture.tile):
            # Decoded in Python, to whatever size the file asks for.
            raise MediaError("compressed BMP is not supported")
        # A camera's file of several pictures (MPO) is one, with a preview; only its first is looked at.
        if picture.format != "MPO" and getattr(picture, "is_animated", False):
            raise MediaError("animated pictures are not supported")
        picture.load()
        return _rgb(ImageOps.exif_transpose(picture))
    except MediaError:
        raise
    except UnidentifiedImageError:
        raise MediaError(f"the picture is in none of the known formats ({', '.join(FORMATS)})") from None
    except Exception as error:  # the decoders raise any, for a picture that is cut off or made up
        raise MediaError(f"the picture cannot be decoded: {_one_line(error)}") from None


def identifier(picture: Image.Image, settings: PictureSettings, model: bytes) -> str:
    """Hex name of the encoding: of the pixels, whatever file they came in, how they are prepared, and the model."""
    digest = blake2b(digest_size=_DIGEST_SIZE, key=model)
    digest.update(f"{picture.width}x{picture.height} {picture.mode} ".encode())
    digest.update(settings.key)
    digest.update(picture.tobytes())
    return digest.hexdigest()


def grid(picture: Image.Image, settings: PictureSettings) -> tuple[int, int]:
    """Rows and columns of the parts into which the picture is to be cut; none of either if it is not."""
    if not settings.split:
        return 0, 0
    width, height = _tiled_size(*_scaled_size(picture, settings), settings.tile_size)
    rows, cols = height // settings.tile_size, width // settings.tile_size
    return (0, 0) if rows == cols == 1 else (rows, cols)


def cut(picture: Image.Image, settings: PictureSettings) -> Tiles:
    """The picture scaled, and cut into tiles: the parts row by row, then all of it; or only that, if there are none."""
    size = settings.tile_size
    rows, cols = grid(picture, settings)
    picture = _resize(picture, _scaled_size(picture, settings), settings)
    if settings.split:
        picture = _resize(picture, _tiled_size(*picture.size, size), settings)
    parts = [
        picture.crop((col * size, row * size, (col + 1) * size, (row + 1) * size))
        for row in range(rows)
        for col in range(cols)
    ]
    whole = _resize(picture, (size, size), settings)
    return np.stack([np.asarray(tile).transpose(2, 0, 1) for tile in (*parts, whole)])


def _rgb(picture: Image.Image) -> Image.Image:
    """Three channels of eight bits. What shows through is white, as on a page, not whatever colour lies beneath."""
    if picture.mode in _SIXTEEN_BITS:
        return Image.fromarray((np.asarray(picture).astype(np.uint16) >> 8).astype(np.uint8)).convert("RGB")
    if picture.mode in _TRANSPARENT or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        paper = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        return Image.alpha_composite(paper, picture).convert("RGB")
    if picture.mode not in _PLAIN:
        raise MediaError(f"pictures of the mode {picture.mode} are not supported")
    return picture.convert("RGB")


def _scaled_size(picture: Image.Image, settings: PictureSettings) -> tuple[int, int]:
    """The longer side as long as wanted, the other an even number of pixels in proportion."""
    (width, height), longest = picture.size, settings.longest_edge
    if longest is None:
        return width, height
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    return max(width, 1), max(height, 1)


def _tiled_size(width: int, height: int, tile: int) -> tuple[int, int]:
    """The next larger whole number of tiles in each direction."""

    def whole(pixels: int) -> int:
        return math.ceil(pixels / tile) * tile

    ratio = width / height
    if width >= height:
        width = whole(width)
        return width, whole(int(width / ratio))
    height = whole(height)
    return whole(int(height * ratio)), height


def _resize(picture: Image.Image, size: tuple[int, int], settings: PictureSettings) -> Image.Image:
    return picture if picture.size == size else picture.resize(size, Image.Resampling(settings.resample))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
