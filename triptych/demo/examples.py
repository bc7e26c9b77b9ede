"""Pictures, questions and a request to try the image demo with, none of them in its training data."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_name("examples")
EXAMPLE_IMAGE = FOLDER / "two_shapes.png"
EXAMPLE_REQUEST = FOLDER / "request.json"
EXAMPLE_QUESTION = "What is in the image?"
EXPECTED_ANSWER = "A red circle at the top left and a blue square at the bottom right."

AFTER_IMAGE = FOLDER / "two_shapes_changed.png"
CROWDED_IMAGE = FOLDER / "four_shapes.png"
#: Questions with their pictures and true answers, for a reader and for the tests.
QUESTIONS: tuple[tuple[tuple[Path, ...], str, str], ...] = (
    ((EXAMPLE_IMAGE,), EXAMPLE_QUESTION, EXPECTED_ANSWER),
    ((EXAMPLE_IMAGE,), "What is at the top left?", "There is a red circle at the top left."),
    ((CROWDED_IMAGE,), "How many shapes are there?", "There are four shapes."),
    (
        (EXAMPLE_IMAGE, AFTER_IMAGE),
        "What is in the second image?",
        "A red circle at the top left and a green square at the bottom right.",
    ),
    (
        (EXAMPLE_IMAGE, CROWDED_IMAGE),
        "Which image has the most shapes?",
        "The second image has the most shapes.",
    ),
)
