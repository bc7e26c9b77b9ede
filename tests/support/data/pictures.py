"""Pictures that differ from each other everywhere, in any size."""

from __future__ import annotations

import numpy as np
from PIL import Image


def picture(seed: int, width: int = 64, height: int = 64) -> Image.Image:
    """Waves of colour, RGB: another seed gives another picture."""
    waves = np.random.default_rng(seed).uniform(0.02, 0.25, (3, 3))
    y, x = np.mgrid[0:height, 0:width]
    channels = [127.5 + 127.5 * np.sin(a * x + b * y + 20 * c) for a, b, c in waves]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8), "RGB")
