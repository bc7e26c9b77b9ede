"""Scenes, questions and answers: held-out combinations, true answers, seeded samples."""

import itertools
import random

import pytest

from examples.demo_models.images.answers import KINDS, Query, answer
from examples.demo_models.images.samples import other_pictures, random_sample, sample_of_kind, swappable
from examples.demo_models.images.scenes import (
    COLOURS,
    PLACES,
    SHAPES,
    SIZES,
    Item,
    draw,
    edit_scene,
    held_out,
    picture_of,
    random_scene,
)

RED_CIRCLE = Item("red", "circle", "top left")
BLUE_SQUARE = Item("blue", "square", "bottom right")
ALL_ITEMS = [Item(*parts) for parts in itertools.product(COLOURS, SHAPES, PLACES)]


def test_one_combination_in_eight_is_held_out_and_every_pair_in_it_is_trained() -> None:
    trained = [item for item in ALL_ITEMS if not held_out(item)]
    assert len(trained) == 128 - 16
    assert {(i.colour, i.shape) for i in trained} == set(itertools.product(COLOURS, SHAPES))
    assert {(i.colour, i.place) for i in trained} == set(itertools.product(COLOURS, PLACES))
    assert {(i.shape, i.place) for i in trained} == set(itertools.product(SHAPES, PLACES))


def test_training_samples_never_show_a_held_out_combination() -> None:
    rng = random.Random(3)
    for _ in range(300):
        sample = random_sample(rng, "train", rng.choice((1, 2, 3, 4)), 1)
        assert not any(held_out(item) for scene in sample.scenes for item in scene)


def test_held_out_scenes_show_at_least_one_held_out_combination() -> None:
    rng = random.Random(4)
    assert all(any(map(held_out, random_scene(rng, "held_out"))) for _ in range(200))


def test_the_same_seed_gives_the_same_sample() -> None:
    assert random_sample(random.Random(5), "train", 2, 4) == random_sample(random.Random(5), "train", 2, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_question_has_samples_with_their_true_answers(kind: str) -> None:
    rng = random.Random(6)
    for _ in range(10):
        sample = sample_of_kind(rng, "held_out", kind)
        turn = sample.turns[0]
        assert turn.query.report_kind == kind
        assert turn.answer == answer(turn.query, sample.scenes)
        assert "{" not in turn.question and "  " not in turn.question
        if swappable(sample):
            other = other_pictures(rng, sample, "held_out")
            scenes = [picture.scene for picture in other]
            assert not scenes or answer(turn.query, scenes) != turn.answer


@pytest.mark.parametrize(
    ("query", "truth"),
    [
        (Query("describe"), "A red circle at the top left and a blue square at the bottom right."),
        (Query("count"), "There are two shapes."),
        (Query("count matching", shape="cross"), "There are no crosses."),
        (Query("colour of", shape="circle"), "The circle is red."),
        (Query("shape of", colour="blue"), "The blue shape is a square."),
        (Query("what at", place="top right"), "There is nothing at the top right."),
        (Query("colour at", place="top left"), "The shape at the top left is red."),
        (Query("where", "blue", "square"), "The blue square is at the bottom right."),
        (Query("exists", "orange", "cross"), "No, there is no orange cross."),
    ],
)
def test_answers_about_one_image_are_true(query: Query, truth: str) -> None:
    assert answer(query, [(RED_CIRCLE, BLUE_SQUARE)]) == truth


@pytest.mark.parametrize(
    ("query", "truth"),
    [
        (Query("total"), "There are three shapes."),
        (Query("which has", "blue", "square"), "The second image has a blue square."),
        (Query("which has", "red", "circle"), None),  # both have one
        (Query("most"), "The second image has the most shapes."),
        (Query("same"), "No, they are different."),
        (Query("changed"), "A blue square appeared at the bottom right."),
        (Query("describe", image=0), "A red circle at the top left."),
        (Query("count"), None),  # of which image?
    ],
)
def test_answers_about_two_images_are_true(query: Query, truth: str | None) -> None:
    assert answer(query, [(RED_CIRCLE,), (RED_CIRCLE, BLUE_SQUARE)]) == truth


def test_an_edit_changes_the_scene_in_a_way_that_can_be_told() -> None:
    rng = random.Random(7)
    for _ in range(200):
        scene = random_scene(rng, "train")
        told = answer(Query("changed"), [scene, edit_scene(rng, scene, "train")])
        assert told is not None and told != "Nothing changed."


@pytest.mark.parametrize("size", SIZES)
def test_a_shape_is_drawn_in_its_colour_at_its_place(size: tuple[int, int]) -> None:
    picture = picture_of(random.Random(8), (RED_CIRCLE, BLUE_SQUARE), size)
    image = draw(picture).resize(size)
    for blob in picture.blobs:
        centre = (int(blob.x * size[0]), int(blob.y * size[1]))
        assert image.getpixel(centre) == blob.rgb
    assert image.getpixel((size[0] * 3 // 4, size[1] // 4)) == picture.background
