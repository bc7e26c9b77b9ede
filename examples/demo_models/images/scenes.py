"""Scenes of coloured shapes in four places, and the pictures drawn of them (PIL and numpy only).

A scene says what is there; a picture adds how it is drawn (size, background, jitter). One
combination of colour, shape and place in eight is held out: training never sees it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

RGB = tuple[int, int, int]

COLOURS: dict[str, RGB] = {
    "red": (220, 30, 30),
    "green": (30, 165, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 215, 40),
    "purple": (140, 50, 170),
    "orange": (245, 135, 25),
    "black": (15, 15, 15),
    "white": (250, 250, 250),
}
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = ("top left", "top right", "bottom left", "bottom right")
BACKGROUNDS: tuple[RGB, ...] = (
    (128, 128, 128),
    (200, 200, 190),
    (90, 100, 110),
    (225, 225, 225),
    (240, 240, 240),
    (255, 255, 255),
    (70, 70, 70),
    (205, 215, 230),
    (230, 220, 205),
    (170, 185, 175),
)
SIZES = ((96, 96), (128, 96), (96, 128), (128, 128))  # (width, height) in pixels
_SHAPE_COUNTS = (0, 1, 2, 3, 4)
_SHAPE_COUNT_WEIGHTS = (3, 22, 30, 26, 19)


@dataclass(frozen=True)
class Item:
    """One shape of a scene; a scene has at most one per place."""

    colour: str
    shape: str
    place: str


Scene = tuple[Item, ...]  # in the order of PLACES


def held_out(item: Item) -> bool:
    """Whether the combination is kept from training (16 of 128; every pair in it is trained)."""
    c, s, p = list(COLOURS).index(item.colour), SHAPES.index(item.shape), PLACES.index(item.place)
    return p == (c + s) % 4 and (c // 4 + s) % 2 == 0


def allowed(item: Item, split: str) -> bool:
    """Whether `item` may be in a scene of the split ("train" or "held_out")."""
    return split == "held_out" or not held_out(item)


def in_order(items: list[Item]) -> Scene:
    return tuple(sorted(items, key=lambda item: PLACES.index(item.place)))


def random_item(rng: random.Random, place: str, split: str) -> Item:
    while True:
        item = Item(rng.choice(list(COLOURS)), rng.choice(SHAPES), place)
        if allowed(item, split):
            return item


def random_scene(rng: random.Random, split: str) -> Scene:
    """A scene of 0-4 items; one of the held-out split has at least one held-out item."""
    while True:
        count = rng.choices(_SHAPE_COUNTS, _SHAPE_COUNT_WEIGHTS)[0]
        if split == "held_out":
            count = max(count, 1)
        places = rng.sample(PLACES, count)
        items = [random_item(rng, place, split) for place in places]
        if split == "train" or any(held_out(item) for item in items):
            return in_order(items)


def _edited_item(rng: random.Random, old: Item, split: str) -> Item:
    """`old` with another colour or another shape."""
    while True:
        if rng.random() < 0.5:
            new = Item(rng.choice(list(COLOURS)), old.shape, old.place)
        else:
            new = Item(old.colour, rng.choice(SHAPES), old.place)
        if new != old and allowed(new, split):
            return new


def edit_scene(rng: random.Random, scene: Scene, split: str) -> Scene:
    """`scene` with one change: a shape recoloured, reshaped, added, removed or moved."""
    items = list(scene)
    free = [place for place in PLACES if place not in {item.place for item in items}]
    choices = ["edit", "edit", "remove"] if items else []
    choices += ["add"] if free else []
    choices += ["move"] if free and items else []
    choice = rng.choice(choices)
    if choice == "add":
        return in_order([*items, random_item(rng, rng.choice(free), split)])
    old = items.pop(rng.randrange(len(items)))
    if choice == "remove":
        return in_order(items)
    if choice == "move":
        spots = [Item(old.colour, old.shape, place) for place in free]
        spots = [item for item in spots if allowed(item, split)]
        if spots:
            return in_order([*items, rng.choice(spots)])
    return in_order([*items, _edited_item(rng, old, split)])


@dataclass(frozen=True)
class Blob:
    """A shape as drawn: centre and radius in parts of the width/height and of the shorter side."""

    shape: str
    x: float
    y: float
    radius: float
    rgb: RGB


@dataclass(frozen=True)
class Picture:
    """How a scene is drawn. `size` is (width, height) in pixels before `scale`."""

    scene: Scene
    size: tuple[int, int]
    background: RGB
    blobs: tuple[Blob, ...]
    scale: int = 1


def _contrast(a: RGB, b: RGB) -> int:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True))


def _near(rng: random.Random, rgb: RGB, spread: int) -> RGB:
    r, g, b = (min(255, max(0, v + rng.randint(-spread, spread))) for v in rgb)
    return (r, g, b)


def picture_of(rng: random.Random, scene: Scene, size: tuple[int, int] | None = None) -> Picture:
    """Chooses size, background, and each shape's jitter; every shape stands out from the ground."""
    size = size or rng.choice(SIZES)
    colours = [COLOURS[item.colour] for item in scene]
    grounds = [b for b in BACKGROUNDS if all(_contrast(b, c) > 130 for c in colours)]
    background = _near(rng, rng.choice(grounds or list(BACKGROUNDS[:1])), 6)
    short = min(size)
    blobs = []
    for item, rgb in zip(scene, colours, strict=True):
        column, row = PLACES.index(item.place) % 2, PLACES.index(item.place) // 2
        radius = rng.uniform(0.13, 0.21)
        slack = 0.245 - radius  # the shape stays inside its quarter
        x = (0.25 + column / 2) + rng.uniform(-slack, slack) * short / size[0]
        y = (0.25 + row / 2) + rng.uniform(-slack, slack) * short / size[1]
        blobs.append(Blob(item.shape, x, y, radius, _near(rng, rgb, 10)))
    # The image processor brings a picture four times as large down to these sizes, save the least.
    scale = 4 if rng.random() < 0.3 and size != min(SIZES) else 1
    return Picture(scene, size, background, tuple(blobs), scale)


def draw(picture: Picture) -> Image.Image:
    """The picture as an RGB image of `size` times `scale` pixels."""
    width, height = (side * picture.scale for side in picture.size)
    image = Image.new("RGB", (width, height), picture.background)
    pen = ImageDraw.Draw(image)
    for blob in picture.blobs:
        x, y, r = blob.x * width, blob.y * height, blob.radius * min(width, height)
        if blob.shape == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=blob.rgb)
        elif blob.shape == "square":
            pen.rectangle((x - r * 0.9, y - r * 0.9, x + r * 0.9, y + r * 0.9), fill=blob.rgb)
        elif blob.shape == "triangle":
            pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=blob.rgb)
        else:
            w = r * 0.33
            pen.rectangle((x - r, y - w, x + r, y + w), fill=blob.rgb)
            pen.rectangle((x - w, y - r, x + w, y + r), fill=blob.rgb)
    return image
