"""Pictures drawn from numbers, as JPEG files."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

from triptych.goodput.load.workload import Picture

#: JPEG quality of PIL's default, which `vllm bench serve` sends too.
QUALITY = 75


def draw(picture: Picture) -> Image.Image:
    """`noise`: every pixel by chance, as vLLM's random-mm has it; `waves`: smooth, with small files."""
    rng = np.random.default_rng(picture.seed)
    if picture.content == "noise":
        pixels = rng.integers(0, 256, (picture.height, picture.width, 3), np.uint8)
    else:
        y, x = np.mgrid[0 : picture.height, 0 : picture.width]
        pace = rng.uniform(0.01, 0.2, (3, 2))
        phase = rng.uniform(0, 6.28, 3)
        waves = [127 + 127 * np.sin(a * x + b * y + p) for (a, b), p in zip(pace, phase, strict=True)]
        pixels = np.stack(waves, -1).astype(np.uint8)
    return Image.fromarray(pixels)


def jpeg(picture: Picture) -> bytes:
    """The file's bytes."""
    buffer = io.BytesIO()
    draw(picture).save(buffer, format="JPEG", quality=QUALITY)
    return buffer.getvalue()


def data_url(picture: Picture) -> bytes:
    """The file as a data: URL, ready to stand in JSON."""
    return b"data:image/jpeg;base64," + base64.b64encode(jpeg(picture))
