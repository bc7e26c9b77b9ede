"""The image demo's example pictures and request, as they are drawn and written.

    python -m examples.demo_models.images.example_pictures

Each picture shows at least one combination that training never sees.
"""

from __future__ import annotations

import json
from pathlib import Path

from examples.demo_models.images.inference import MODEL_ID, Request, chat_body, png
from examples.demo_models.images.scenes import RGB, Blob, Item, Picture, draw
from triptych.demo.examples import (
    AFTER_IMAGE,
    CROWDED_IMAGE,
    EXAMPLE_IMAGE,
    EXAMPLE_QUESTION,
    EXAMPLE_REQUEST,
)

_LIGHT: RGB = (240, 240, 240)


def _blob(item: Item, x: float, y: float, radius: float, rgb: RGB) -> tuple[Item, Blob]:
    return item, Blob(item.shape, x, y, radius, rgb)


def _picture(placed: list[tuple[Item, Blob]], background: RGB = _LIGHT) -> Picture:
    items, blobs = zip(*placed, strict=True)
    return Picture(items, (128, 128), background, blobs)


def pictures() -> dict[Path, Picture]:
    """Each example file and the picture in it."""
    circle = _blob(Item("red", "circle", "top left"), 0.26, 0.25, 0.18, (221, 32, 34))
    square = _blob(Item("blue", "square", "bottom right"), 0.74, 0.76, 0.18, (42, 68, 222))
    green = _blob(Item("green", "square", "bottom right"), 0.74, 0.76, 0.18, (32, 164, 62))
    crowd = [
        _blob(Item("orange", "triangle", "top left"), 0.25, 0.26, 0.17, (244, 136, 28)),
        _blob(Item("purple", "square", "top right"), 0.75, 0.24, 0.17, (141, 52, 168)),
        _blob(Item("green", "cross", "bottom left"), 0.26, 0.75, 0.17, (32, 164, 62)),
        _blob(Item("red", "circle", "bottom right"), 0.74, 0.74, 0.17, (221, 32, 34)),
    ]
    return {
        EXAMPLE_IMAGE: _picture([circle, square]),
        AFTER_IMAGE: _picture([circle, green]),
        CROWDED_IMAGE: _picture(crowd, (92, 100, 108)),
    }


def main() -> None:
    for path, picture in pictures().items():
        path.write_bytes(png(draw(picture)))
    body = chat_body(Request((EXAMPLE_IMAGE.read_bytes(),), EXAMPLE_QUESTION), MODEL_ID)
    EXAMPLE_REQUEST.write_text(json.dumps(body, indent=2) + "\n")


if __name__ == "__main__":
    main()
