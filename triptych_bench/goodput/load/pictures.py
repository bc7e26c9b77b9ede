"""What the pictures of a load show, drawn by their seeds: noise, waves, photographs, pages, screens."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from triptych.base.errors import ConfigError
from triptych_bench.goodput.load.words import WORDS
from triptych_bench.goodput.load.workload import Picture

#: Photographs that the package scikit-image brings along.
PHOTOGRAPHS = (
    *("astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg", "ihc.png"),
    *("motorcycle_left.png", "retina.jpg", "rocket.jpg"),
)
#: Screens that `screenshots` shows with small changes.
SCREENS = 8


def draw(picture: Picture) -> Image.Image:
    """The picture in RGB: equal values give equal pixels. ConfigError where photographs are not installed."""
    return CONTENTS[picture.content](picture)


def _noise(picture: Picture) -> Image.Image:
    """Every pixel by chance, as vLLM's random-mm has it."""
    rng = np.random.default_rng(picture.seed)
    return Image.fromarray(rng.integers(0, 256, (picture.height, picture.width, 3), np.uint8))


def _waves(picture: Picture) -> Image.Image:
    """Smooth colours, in small files."""
    rng = np.random.default_rng(picture.seed)
    y, x = np.mgrid[0 : picture.height, 0 : picture.width]
    pace = rng.uniform(0.01, 0.2, (3, 2))
    phase = rng.uniform(0, 6.28, 3)
    waves = [127 + 127 * np.sin(a * x + b * y + p) for (a, b), p in zip(pace, phase, strict=True)]
    return Image.fromarray(np.stack(waves, -1).astype(np.uint8))


def _photograph(picture: Picture) -> Image.Image:
    """A part of a real photograph, scaled, mirrored and with its hues turned."""
    rng = random.Random(f"photograph-{picture.seed}")
    source = _source(rng.choice(PHOTOGRAPHS))
    ratio = picture.width / picture.height
    share = rng.uniform(0.4, 1.0)
    width = min(source.width, source.height * ratio) * share
    height = width / ratio
    left, top = rng.uniform(0, source.width - width), rng.uniform(0, source.height - height)
    size = picture.width, picture.height
    part = source.resize(size, Image.Resampling.BICUBIC, (left, top, left + width, top + height))
    if rng.random() < 0.5:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    hue, *others = part.convert("HSV").split()
    turned = np.asarray(hue) + np.uint8(rng.randrange(256))
    return Image.merge("HSV", (Image.fromarray(turned), *others)).convert("RGB")


@functools.cache
def _source(name: str) -> Image.Image:
    package = find_spec("skimage")
    if package is None or package.origin is None:
        raise ConfigError("--image-content photos needs photographs: pip install 'triptych-bench[photos]'")
    with Image.open(Path(package.origin).parent / "data" / name) as image:
        return image.convert("RGB")


def _document(picture: Picture) -> Image.Image:
    """A printed page of words: black on white, in paragraphs under a heading."""
    rng = random.Random(f"page-{picture.seed}")
    page = Image.new("RGB", (picture.width, picture.height), "white")
    pen, size = ImageDraw.Draw(page), max(8, picture.height // 60)
    margin = picture.width // 12
    y = _lines(pen, (margin, margin), picture.width - 2 * margin, 2 * size, rng.choices(WORDS, k=4))
    while y < picture.height - margin:
        paragraph = rng.choices(WORDS, k=rng.randint(30, 90))
        y = size + _lines(
            pen, (margin, y), picture.width - 2 * margin, size, paragraph, picture.height - margin
        )
    return page


def _screenshot(picture: Picture) -> Image.Image:
    """One of a few windows with a list and a pane, and a line and a pointer that are this picture's own."""
    rng = random.Random(f"change-{picture.seed}")
    screen = _screen(rng.randrange(SCREENS), picture.width, picture.height).copy()
    pen, size = ImageDraw.Draw(screen), max(8, picture.height // 50)
    x, y = picture.width // 4 + size, rng.randrange(picture.height // 10, picture.height)
    pen.rectangle((x, y, picture.width, y + 2 * size), fill="#fff7d6")
    _lines(pen, (x, y), picture.width - x, size, rng.choices(WORDS, k=6))
    x, y = rng.randrange(picture.width), rng.randrange(picture.height)
    pen.polygon(((x, y), (x + size, y + size), (x, y + size * 3 // 2)), fill="black")
    return screen


@functools.lru_cache(4 * SCREENS)
def _screen(number: int, width: int, height: int) -> Image.Image:
    rng = random.Random(f"screen-{number}")
    screen = Image.new("RGB", (width, height), "#f4f5f7")
    pen, size = ImageDraw.Draw(screen), max(8, height // 50)
    pen.rectangle((0, 0, width, 2 * size), fill=f"hsl({rng.randrange(360)}, 45%, 40%)")
    pen.rectangle((0, 2 * size, width // 4, height), fill="#e3e6ea")
    for left, right in ((size, width // 4), (width // 4 + size, width)):
        y = 3 * size
        while y < height:
            y = size + _lines(pen, (left, y), right - left - size, size, rng.choices(WORDS, k=12), height)
    return screen


def _lines(
    pen: ImageDraw.ImageDraw,
    at: tuple[int, int],
    width: int,
    size: int,
    words: list[str],
    end: int = 1 << 20,
) -> int:
    """Writes `words` in lines of `width` pixels from `at` down to `end`; returns the next line's y."""
    font = ImageFont.load_default(size)
    (x, y), line = at, ""
    for word in words:
        if line and pen.textlength(f"{line} {word}", font) > width:
            pen.text((x, y), line, "black", font)
            y, line = y + size * 5 // 4, ""
            if y >= end:
                return y
        line = f"{line} {word}".strip()
    pen.text((x, y), line, "black", font)
    return y + size * 5 // 4


CONTENTS: dict[str, Callable[[Picture], Image.Image]] = {
    "noise": _noise,
    "waves": _waves,
    "photos": _photograph,
    "documents": _document,
    "screenshots": _screenshot,
}
