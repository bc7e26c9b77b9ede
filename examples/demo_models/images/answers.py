"""The true answer to a question about scenes: what the demo model is trained and marked on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from examples.demo_models.images.scenes import Item, Scene

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
ORDINALS = ("first", "second", "third", "fourth")


@dataclass(frozen=True)
class Query:
    """What is asked. `image` is 0-based: a one-image kind asked of one image among several."""

    kind: str
    colour: str = ""
    shape: str = ""
    place: str = ""
    number: int = 0
    image: int | None = None

    @property
    def report_kind(self) -> str:
        return self.kind if self.image is None else "nth image"


def a(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:] + "."


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _inventory(scene: Scene) -> str:
    if not scene:
        return "nothing"
    return _listed([f"{a(i.colour + ' ' + i.shape)} at the {i.place}" for i in scene])


def _counted(count: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"There is one {noun}." if count == 1 else f"There are {NUMBERS[count]} {plural}."


def matching(query: Query, scene: Scene) -> list[Item]:
    """The items of the scene with the query's colour, shape and place, where it names them."""
    return [
        i
        for i in scene
        if query.colour in ("", i.colour) and query.shape in ("", i.shape) and query.place in ("", i.place)
    ]


def noun_of(query: Query) -> str:
    return f"{query.colour} {query.shape or 'shape'}".strip()


def _describe(query: Query, scene: Scene) -> str | None:
    return _sentence(_inventory(scene)) if scene else "The image is empty."


def _count(query: Query, scene: Scene) -> str | None:
    return _counted(len(matching(query, scene)), noun_of(query))


def _colour_of(query: Query, scene: Scene) -> str | None:
    found = matching(query, scene)
    if len(found) > 1:
        return None
    shape = query.shape
    return f"The {shape} is {found[0].colour}." if found else f"There is no {shape}."


def _shape_of(query: Query, scene: Scene) -> str | None:
    found = matching(query, scene)
    if len(found) > 1:
        return None
    colour = query.colour
    return f"The {colour} shape is {a(found[0].shape)}." if found else f"There is no {colour} shape."


def _what_at(query: Query, scene: Scene) -> str | None:
    found = matching(query, scene)
    what = a(f"{found[0].colour} {found[0].shape}") if found else "nothing"
    return f"There is {what} at the {query.place}."


def _colour_at(query: Query, scene: Scene) -> str | None:
    found = matching(query, scene)
    if not found:
        return f"There is nothing at the {query.place}."
    return f"The shape at the {query.place} is {found[0].colour}."


def _where(query: Query, scene: Scene) -> str | None:
    found = matching(query, scene)
    if len(found) > 1:
        return None
    noun = noun_of(query)
    return f"The {noun} is at the {found[0].place}." if found else f"There is no {noun}."


def _exists(query: Query, scene: Scene) -> str | None:
    noun = noun_of(query)
    return f"Yes, there is {a(noun)}." if matching(query, scene) else f"No, there is no {noun}."


def _describe_all(query: Query, scenes: Sequence[Scene]) -> str | None:
    return " ".join(f"The {ORDINALS[k]} image shows {_inventory(scene)}." for k, scene in enumerate(scenes))


def _how_many_images(query: Query, scenes: Sequence[Scene]) -> str | None:
    return _counted(len(scenes), "image")


def _total(query: Query, scenes: Sequence[Scene]) -> str | None:
    count = sum(len(scene) for scene in scenes)
    return _counted(count, "shape") if count < len(NUMBERS) else None


def _only(indices: list[int], has: str) -> str | None:
    if len(indices) > 1:
        return None
    return f"The {ORDINALS[indices[0]]} image has {has}." if indices else f"No image has {has}."


def _which_has(query: Query, scenes: Sequence[Scene]) -> str | None:
    return _only([k for k, s in enumerate(scenes) if matching(query, s)], a(noun_of(query)))


def _which_count(query: Query, scenes: Sequence[Scene]) -> str | None:
    has = NUMBERS[query.number] + (" shape" if query.number == 1 else " shapes")
    return _only([k for k, s in enumerate(scenes) if len(s) == query.number], has)


def _most(query: Query, scenes: Sequence[Scene]) -> str | None:
    best = max(len(s) for s in scenes)
    found = [k for k, s in enumerate(scenes) if len(s) == best]
    return _only(found, "the most shapes")


def _same(query: Query, scenes: Sequence[Scene]) -> str | None:
    same = scenes[0] == scenes[1]
    return "Yes, they are the same." if same else "No, they are different."


def _changed(query: Query, scenes: Sequence[Scene]) -> str | None:
    """What one edit turned the first scene into the second; None where it took more than one."""
    gone = [i for i in scenes[0] if i not in scenes[1]]
    new = [i for i in scenes[1] if i not in scenes[0]]
    if not gone and not new:
        return "Nothing changed."
    if len(gone) > 1 or len(new) > 1:
        return None
    if not gone:
        return f"{_sentence(a(f'{new[0].colour} {new[0].shape}'))[:-1]} appeared at the {new[0].place}."
    old = f"The {gone[0].colour} {gone[0].shape}"
    if not new:
        return f"{old} at the {gone[0].place} disappeared."
    if new[0].place == gone[0].place:
        now = a(f"{new[0].colour} {new[0].shape}")
        return f"{old} at the {gone[0].place} became {now}."
    if (new[0].colour, new[0].shape) == (gone[0].colour, gone[0].shape):
        return f"{old} moved from the {gone[0].place} to the {new[0].place}."
    return None


ONE_IMAGE: dict[str, Callable[[Query, Scene], str | None]] = {
    "describe": _describe,
    "count": _count,
    "count matching": _count,
    "colour of": _colour_of,
    "shape of": _shape_of,
    "what at": _what_at,
    "colour at": _colour_at,
    "where": _where,
    "exists": _exists,
}
SEVERAL_IMAGES: dict[str, Callable[[Query, Sequence[Scene]], str | None]] = {
    "describe all": _describe_all,
    "how many images": _how_many_images,
    "total": _total,
    "which has": _which_has,
    "which count": _which_count,
    "most": _most,
    "same": _same,
    "changed": _changed,
}
KINDS = (*ONE_IMAGE, "nth image", *SEVERAL_IMAGES)


def answer(query: Query, scenes: Sequence[Scene]) -> str | None:
    """The true answer, or None where the question has no single short one."""
    if query.kind in ONE_IMAGE:
        if query.image is None and len(scenes) != 1:
            return None
        return ONE_IMAGE[query.kind](query, scenes[query.image or 0])
    if query.kind in ("same", "changed", "describe all") and len(scenes) != 2:
        return None
    return SEVERAL_IMAGES[query.kind](query, scenes)
