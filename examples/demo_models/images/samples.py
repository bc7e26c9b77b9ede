"""Seeded samples: pictures, and questions about them with true answers, of either split."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from examples.demo_models.images.answers import ONE_IMAGE, SEVERAL_IMAGES, Query, answer
from examples.demo_models.images.scenes import (
    COLOURS,
    PLACES,
    SHAPES,
    SIZES,
    Item,
    Picture,
    Scene,
    edit_scene,
    held_out,
    picture_of,
    random_scene,
)
from examples.demo_models.images.wording import phrase

_ONE_WEIGHTS = {
    "describe": 6.0,
    "count": 1.5,
    "count matching": 2.0,
    "colour of": 1.5,
    "shape of": 1.0,
    "what at": 1.5,
    "colour at": 1.0,
    "where": 1.5,
    "exists": 1.5,
}
_SEVERAL_WEIGHTS = {
    "describe all": 2.0,
    "how many images": 0.2,
    "total": 1.2,
    "which has": 2.5,
    "which count": 0.8,
    "most": 0.8,
    "same": 1.8,
    "changed": 3.5,
}
_NTH_WEIGHT = 4.0
SMALL_TALK = (
    ("Hello", "Hello! Ask me about the shapes in an image."),
    ("Hello!", "Hello! Ask me about the shapes in an image."),
    ("Hi", "Hello! Ask me about the shapes in an image."),
    ("Who are you?", "I am a small demo model. Ask me about the shapes in an image."),
    ("What can you do?", "I can tell you which shapes are in an image."),
)
NO_IMAGE = "There is no image."


@dataclass(frozen=True)
class Turn:
    query: Query
    question: str
    answer: str


@dataclass(frozen=True)
class Sample:
    """Pictures and independent questions about them (each asked alone, unless chained)."""

    pictures: tuple[Picture, ...]
    turns: tuple[Turn, ...]

    @property
    def scenes(self) -> tuple[Scene, ...]:
        return tuple(picture.scene for picture in self.pictures)


def _target(rng: random.Random, scenes: Sequence[Scene], split: str) -> Item | None:
    """An item to ask about: of a held-out scene, mostly a held-out item."""
    items = [item for scene in scenes for item in scene]
    unseen = [item for item in items if held_out(item)]
    if split == "held_out" and unseen and rng.random() < 0.8:
        items = unseen
    return rng.choice(items) if items else None


def _random_query(
    rng: random.Random, kind: str, scenes: Sequence[Scene], image: int | None, split: str
) -> Query:
    item = _target(rng, scenes, split)
    if item is None or rng.random() < 0.2:  # something that may not be there
        item = Item(rng.choice(list(COLOURS)), rng.choice(SHAPES), rng.choice(PLACES))
    colour, shape, place, number = "", "", "", 0
    if kind in ("where", "exists", "which has"):
        colour, shape = rng.choice(((item.colour, item.shape),) * 3 + (("", item.shape),))
    elif kind == "count matching":
        pair = (item.colour, item.shape)
        colour, shape = rng.choice(((item.colour, ""), ("", item.shape), pair))
    elif kind == "colour of":
        shape = item.shape
    elif kind == "shape of":
        colour = item.colour
    elif kind in ("what at", "colour at"):
        place = item.place
    elif kind == "which count":
        number = len(rng.choice(scenes)) if rng.random() < 0.85 else rng.randint(0, 4)
    return Query(kind, colour, shape, place, number, image)


def random_turn(rng: random.Random, scenes: Sequence[Scene], split: str, kind: str | None = None) -> Turn:
    """A question with one true answer, of `kind` ("nth image" for one of several) or a drawn one."""
    for _ in range(200):
        image = None
        drawn = kind
        if len(scenes) > 1 and drawn is None:
            kinds = {**_SEVERAL_WEIGHTS, "nth image": _NTH_WEIGHT}
            drawn = rng.choices(list(kinds), list(kinds.values()))[0]
        if drawn == "nth image":
            image = rng.randrange(len(scenes))
        if drawn is None or drawn == "nth image":
            drawn = rng.choices(list(_ONE_WEIGHTS), list(_ONE_WEIGHTS.values()))[0]
        asked = scenes if image is None else (scenes[image],)
        query = _random_query(rng, drawn, asked, image, split)
        truth = answer(query, scenes)
        if truth is not None:
            return Turn(query, phrase(query, rng), truth)
    raise ValueError(f"no question of kind {kind} about {scenes}")


def _related_scenes(rng: random.Random, count: int, split: str, edited: float) -> list[Scene]:
    """`count` scenes; two are, with the chance `edited`, one scene and an edit (or copy) of it."""
    scenes = [random_scene(rng, split) for _ in range(count)]
    if count == 2 and rng.random() < edited:
        scenes[1] = scenes[0] if rng.random() < 0.3 else edit_scene(rng, scenes[0], split)
    return scenes


def _pictures(rng: random.Random, scenes: Sequence[Scene]) -> tuple[Picture, ...]:
    """Pictures of one size more often than not; a scene repeated is at times the same picture."""
    size = rng.choice(SIZES) if rng.random() < 0.7 else None
    pictures: list[Picture] = []
    for scene in scenes:
        again = [picture for picture in pictures if picture.scene == scene]
        pictures.append(again[0] if again and rng.random() < 0.3 else picture_of(rng, scene, size))
    return tuple(pictures)


def random_sample(rng: random.Random, split: str, images: int, turns: int) -> Sample:
    """A sample of `images` pictures and `turns` questions of drawn kinds."""
    scenes = _related_scenes(rng, images, split, 0.65)
    asked = tuple(random_turn(rng, scenes, split) for _ in range(turns))
    return Sample(_pictures(rng, scenes), asked)


def sample_of_kind(rng: random.Random, split: str, kind: str) -> Sample:
    """A sample with one question of the given kind of report."""
    images, edited = 1, 0.0
    if kind in ("same", "changed"):
        images, edited = 2, 1.0 if kind == "changed" else 0.8
    elif kind == "describe all":
        images = 2
    elif kind not in ONE_IMAGE:
        images = rng.choices((2, 3, 4), (5, 3, 2))[0]
    while True:
        scenes = _related_scenes(rng, images, split, edited)
        try:
            turn = random_turn(rng, scenes, split, kind)
        except ValueError:  # such as "which has the most" of scenes with equally many
            continue
        return Sample(_pictures(rng, scenes), (turn,))


def other_pictures(rng: random.Random, sample: Sample, split: str) -> tuple[Picture, ...]:
    """Other pictures for which the sample's first question has another true answer.

    None where there are none, as for the image without shapes among those of a split with shapes.
    """
    turn = sample.turns[0]
    edited = 0.8 if turn.query.kind in ("same", "changed") else 0.0
    for _ in range(300):
        scenes = _related_scenes(rng, len(sample.pictures), split, edited)
        truth = answer(turn.query, scenes)
        if truth is not None and truth != turn.answer:
            return tuple(
                picture_of(rng, scene, old.size) for scene, old in zip(scenes, sample.pictures, strict=True)
            )
    return ()


def swappable(sample: Sample) -> bool:
    """Whether the answer depends on what the pictures show."""
    return sample.turns[0].query.kind != "how many images"


assert set(_ONE_WEIGHTS) == set(ONE_IMAGE) and set(_SEVERAL_WEIGHTS) == set(SEVERAL_IMAGES)
