"""How a question is put: many natural wordings of each kind, so that a user's own works too."""

from __future__ import annotations

import random

from examples.demo_models.images.answers import NUMBERS, ORDINALS, Query, a, noun_of

# {i}: "in the image" or "in the second image"; {img}: "image"; {noun}, {nouns}, {a_noun}: what is
# looked for; {place}; {colour}: British or American; {n}: a number word with its noun.
_WORDINGS: dict[str, tuple[str, ...]] = {
    "describe": (
        "What is {i}?",
        "What is {i}?",
        "What's {i}?",
        "What do you see {i}?",
        "What can you see {i}?",
        "Describe {the}.",
        "Describe what is {i}.",
        "What does {the} show?",
        "What is shown {i}?",
        "What do you see?",
        "Which shapes are {i}?",
        "What shapes are {i}?",
        "List the shapes {i}.",
        "Tell me what is {i}.",
    ),
    "count": (
        "How many shapes are there{in}?",
        "How many shapes are {i}?",
        "How many shapes do you see{in}?",
        "How many shapes does {the} have?",
        "Count the shapes{in}.",
        "How many objects are there{in}?",
        "What is the number of shapes{in}?",
    ),
    "count matching": (
        "How many {nouns} are there{in}?",
        "How many {nouns} are {i}?",
        "How many {nouns} do you see{in}?",
        "Count the {nouns}{in}.",
        "What is the number of {nouns}{in}?",
    ),
    "colour of": (
        "What {colour} is the {noun}{in}?",
        "What {colour} is the {noun}{in}?",
        "Which {colour} is the {noun}{in}?",
        "What is the {colour} of the {noun}{in}?",
        "What {colour} does the {noun} have{in}?",
        "Tell me the {colour} of the {noun}{in}.",
    ),
    "shape of": (
        "Which shape is {colour_word}{in}?",
        "What shape is {colour_word}{in}?",
        "What shape is the {colour_word} one{in}?",
        "What is the {colour_word} shape{in}?",
        "What is {colour_word}{in}?",
    ),
    "what at": (
        "What is at the {place}{in}?",
        "What is at the {place} of {the}?",
        "What is in the {place}{in}?",
        "What's at the {place}{in}?",
        "What do you see at the {place}{in}?",
        "What shape is at the {place}{in}?",
        "Which shape is at the {place}{in}?",
        "Is there anything at the {place}{in}?",
    ),
    "colour at": (
        "What {colour} is the shape at the {place}{in}?",
        "Which {colour} is the shape at the {place}{in}?",
        "What {colour} is at the {place}{in}?",
        "What is the {colour} of the shape at the {place}{in}?",
        "Which {colour} is at the {place}{in}?",
    ),
    "where": (
        "Where is the {noun}{in}?",
        "Where is the {noun}{in}?",
        "Where's the {noun}{in}?",
        "Where do you see the {noun}{in}?",
        "In which corner is the {noun}{in}?",
        "What is the position of the {noun}{in}?",
        "Where can I find the {noun}{in}?",
    ),
    "exists": (
        "Is there {a_noun}{in}?",
        "Is there {a_noun} {i}?",
        "Do you see {a_noun}{in}?",
        "Does {the} have {a_noun}?",
        "Does {the} show {a_noun}?",
        "Can you see {a_noun}{in}?",
    ),
    "describe all": (
        "What is in the {img}s?",
        "Describe the {img}s.",
        "Describe both {img}s.",
        "Describe the two {img}s.",
        "What do the {img}s show?",
        "What is in each {img}?",
        "Describe each {img}.",
        "What do you see in the {img}s?",
        "What do you see?",
    ),
    "how many images": (
        "How many {img}s are there?",
        "How many {img}s do you see?",
        "How many {img}s did I send?",
        "Count the {img}s.",
    ),
    "total": (
        "How many shapes are there in all?",
        "How many shapes are there?",
        "How many shapes are there in total?",
        "How many shapes are there in all the {img}s?",
        "How many shapes are there in the {img}s together?",
        "How many shapes are in all {img}s together?",
        "Count all the shapes in the {img}s.",
        "What is the total number of shapes?",
    ),
    "which has": (
        "Which {img} has {a_noun}?",
        "Which {img} has the {noun}?",
        "Which {img} shows {a_noun}?",
        "Which {img} shows the {noun}?",
        "Which {img} contains {a_noun}?",
        "Which {img} contains the {noun}?",
        "In which {img} is the {noun}?",
        "In which {img} is there {a_noun}?",
        "Which of the {img}s has {a_noun}?",
        "What {img} has {a_noun}?",
        "Where do you see {a_noun}, in which {img}?",
    ),
    "which count": (
        "Which {img} has {n}?",
        "Which {img} shows {n}?",
        "In which {img} are there {n}?",
        "Which of the {img}s has {n}?",
        "Which {img} contains {n}?",
    ),
    "most": (
        "Which {img} has the most shapes?",
        "Which {img} shows the most shapes?",
        "Which of the {img}s has the most shapes?",
        "Which {img} has more shapes?",
        "In which {img} are there the most shapes?",
        "Which {img} contains the most shapes?",
    ),
    "same": (
        "Are the two {img}s the same?",
        "Are the {img}s the same?",
        "Are these {img}s the same?",
        "Are both {img}s the same?",
        "Do the two {img}s show the same thing?",
        "Do the {img}s show the same?",
        "Do both {img}s show the same thing?",
        "Is the second {img} the same as the first?",
        "Are they the same?",
    ),
    "changed": (
        "What changed?",
        "What has changed?",
        "What changed between the two {img}s?",
        "What changed between the {img}s?",
        "What has changed from the first {img} to the second?",
        "What is the difference between the two {img}s?",
        "What is the difference between the {img}s?",
        "What is different in the second {img}?",
        "How do the {img}s differ?",
        "What is different?",
        "Compare the two {img}s.",
        "Compare the {img}s.",
    ),
}
_DIGIT_ORDINALS = ("1st", "2nd", "3rd", "4th")
_IMAGE_WORDS = ("image",) * 6 + ("picture",) * 3 + ("photo",)


def _place(rng: random.Random, place: str) -> str:
    vertical, horizontal = place.split()
    choice = rng.random()
    if choice < 0.65:
        return place
    if choice < 0.75:
        return f"{vertical}-{horizontal}"
    if choice < 0.88:
        return place + " corner"
    return f"{'upper' if vertical == 'top' else 'lower'} {horizontal}"


def _the_image(rng: random.Random, query: Query, img: str) -> str:
    if query.image is None:
        return rng.choice((f"the {img}", f"the {img}", f"the {img}", f"this {img}"))
    choice = rng.random()
    if choice < 0.65:
        return f"the {ORDINALS[query.image]} {img}"
    if choice < 0.8:
        return f"the {_DIGIT_ORDINALS[query.image]} {img}"
    if choice < 0.93:
        return f"{img} {query.image + 1}"
    return f"{img} {NUMBERS[query.image + 1]}"


def _polish(rng: random.Random, text: str) -> str:
    """Politeness, a small first letter, a missing mark at the end: as people write."""
    choice = rng.random()
    if choice < 0.04:
        text = "Please tell me: " + text[0].lower() + text[1:]
    elif choice < 0.08:
        text = text[:-1] + ", please" + text[-1]
    elif choice < 0.1 and text.endswith("."):
        text = "Please " + text[0].lower() + text[1:]
    if rng.random() < 0.15:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.12:
        text = text[:-1]
    return text


def phrase(query: Query, rng: random.Random) -> str:
    """One wording of the question."""
    img = rng.choice(_IMAGE_WORDS)
    the = _the_image(rng, query, img)
    inside = "on" if img == "photo" and rng.random() < 0.3 else "in"
    said = query.image is not None or rng.random() < 0.4
    noun = noun_of(query)
    number = NUMBERS[query.number] if rng.random() < 0.8 or not query.number else str(query.number)
    text = rng.choice(_WORDINGS[query.kind]).format_map(
        {
            "img": img,
            "the": the,
            "i": f"{inside} {the}",
            "in": f" {inside} {the}" if said else "",
            "noun": noun,
            "nouns": noun + ("es" if noun.endswith("s") else "s"),
            "a_noun": a(noun),
            "place": _place(rng, query.place) if query.place else "",
            "colour": rng.choice(("colour", "color")),
            "colour_word": query.colour,
            "n": number + (" shape" if query.number == 1 else " shapes"),
        }
    )
    return _polish(rng, text)
