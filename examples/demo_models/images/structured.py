"""Answers in JSON: objects of drawn fields about the pictures, and calls of drawn tools.

A prompt says nothing of a schema, and of tools only the names: what fields mean is learnt from their
names, and a field of an unknown name holds the plain answer, a count or a yes, as its type says.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.demo_models.images.answers import ONE_IMAGE, Query, matching
from examples.demo_models.images.scenes import COLOURS, PLACES, SHAPES, Item, Scene

#: Names that say what a field holds. The last of each is kept from training, as are the last unknown ones.
NAMES: dict[str, tuple[str, ...]] = {
    "colour": ("color", "colour", "shape_color", "paint", "color_name"),
    "shape": ("shape", "form", "figure", "shape_name", "kind_of_shape"),
    "place": ("place", "position", "location", "corner", "where", "shape_position"),
    "count": ("count", "number", "total", "how_many", "shapes", "n", "number_of_shapes"),
    "exists": ("exists", "present", "found", "there", "yes", "is_present"),
    "items": ("shapes", "items", "objects", "things", "found_shapes"),
    "text": ("answer", "text", "description", "summary", "reply", "caption", "answer_text"),
}
UNKNOWN = (
    *("city", "title", "name", "note", "label", "value", "result", "message", "data", "id", "type", "key"),
    *(
        "user",
        "topic",
        "subject",
        "comment",
        "reason",
        "content",
        "status",
        "level",
        "score",
        "query",
        "field",
    ),
    *("size", "day", "person", "country", "language", "unit", "price", "file", "detail", "state", "word"),
    *("event", "address", "remark"),
)
_UNSEEN = 3
#: Further names of training alone: of many, the parts (`_color`, `kind_of_`) are learnt, not whole names.
TRAINED_NAMES: dict[str, tuple[str, ...]] = {
    "colour": (
        *("hue", "tint", "main_color", "color_of_shape", "object_color", "the_color", "item_colour"),
        *("fill_color", "dominant_color", "color_value", "color_label", "name_of_color", "what_color"),
    ),
    "shape": (
        *("geometry", "shape_type", "type_of_shape", "object_shape", "item_shape", "the_shape"),
        *("main_shape", "shape_label", "figure_name", "name_of_shape", "kind_of_figure", "what_shape"),
    ),
    "place": (
        *("spot", "area", "region", "quadrant", "object_position", "item_place", "the_place"),
        *("position_of_shape", "shape_location", "corner_name", "shape_place", "place_in_image"),
    ),
    "count": (
        *("how_many_shapes", "number_of_items", "number_of_objects", "count_of_shapes", "shape_count"),
        *("amount", "quantity", "num_shapes", "total_shapes", "item_count", "total_number"),
    ),
    "exists": (
        *("is_there", "has_shape", "shape_exists", "seen", "is_visible", "was_found", "is_found"),
        *("in_picture", "shape_present", "there_is", "contains"),
    ),
    "items": (
        *("elements", "contents", "all_shapes", "shape_list", "list_of_shapes", "figures", "parts"),
        *("seen_shapes", "objects_found", "found_objects", "found_items", "everything"),
    ),
    "text": (
        *("response", "sentence", "explanation", "answer_sentence", "text_answer", "full_answer"),
        *("reply_text", "statement", "short_answer", "description_text"),
    ),
    "unknown": (
        *("info", "category", "code", "email", "phone", "street", "company", "product", "date", "time"),
        *("year", "weather", "temperature", "headline", "body", "tag", "option", "action", "task"),
    ),
}
#: Tools by the field that their first argument holds; the last of each is kept from training.
TOOLS: dict[str, tuple[str, ...]] = {
    "colour": ("get_color", "report_color", "color_of", "find_color"),
    "shape": ("get_shape", "report_shape", "identify", "find_shape_name"),
    "place": ("locate", "get_position", "find_shape", "where_is"),
    "count": ("count_shapes", "report", "get_count", "count", "report_count"),
    "exists": ("has_shape", "check_shape", "is_there", "check"),
    "items": ("list_shapes", "report_shapes", "describe_image", "list_objects"),
    "text": ("say", "answer", "reply", "tell"),
}
#: Further tools of training alone.
TRAINED_TOOLS: dict[str, tuple[str, ...]] = {
    "colour": ("what_color", "colour_of", "name_color", "look_up_color", "find_paint"),
    "shape": ("shape_of", "name_shape", "what_shape", "find_figure", "find_form_name"),
    "place": ("position_of", "find_place", "where", "where_it_is", "find_position"),
    "count": ("count_all", "how_many", "count_items", "number_of_things", "report_number"),
    "exists": ("exists", "contains", "look_for", "check_if", "check_presence"),
    "items": ("inventory", "list_all", "show_shapes", "list_items", "find_objects"),
    "text": ("respond", "write_answer", "speak", "tell_user", "tell_me"),
}
#: Tools that have nothing to do with pictures.
STRANGERS = (
    "weather",
    "lights",
    "send_mail",
    "search",
    "calculator",
    "get_time",
    "Weather",
    "open_door",
    "book",
)
NONE = "none"
#: Weights of an answer's tokens in the loss. A server's grammar writes names and marks, and drawn names
#: cannot be foreseen: they are learnt a little, so that they are written in the tokens of training.
WRITTEN, SENTENCE, VALUE = 0.1, 1.0, 3.0
#: The field that a question asks for.
ASKED = {
    "describe": "items",
    "count": "count",
    "count matching": "count",
    "colour of": "colour",
    "shape of": "shape",
    "what at": "shape",
    "colour at": "colour",
    "where": "place",
    "exists": "exists",
}


@dataclass(frozen=True)
class Field:
    """One field of an object: its name, what it holds, its JSON schema and its true value."""

    name: str
    holds: str
    schema: dict[str, Any]
    value: Any


def json_text(value: object) -> str:
    """JSON as the grammar of a server writes it."""
    return json.dumps(value, separators=(",", ":"))


def weighed_json(value: object, chosen: bool = True) -> tuple[str, list[float]]:
    """`json_text` of the value, and the weight of each of its characters in the loss.

    What the model decides weighs: words and their end, numbers and their end, whether a list goes on.
    `chosen`: the name of the tool in a call is the model's to choose.
    """
    text, weights = "", list[float]()

    def put(some: str, weight: float = WRITTEN) -> None:
        nonlocal text
        text += some
        weights.extend([weight] * len(some))

    def walk(value: object, choice: bool, first: float = WRITTEN) -> None:
        match value:
            case dict():
                put("{", first)
                for number, (name, each) in enumerate(value.items()):
                    put("," * (number > 0) + json.dumps(name) + ":")
                    walk(each, choice)
                put("}")
            case list():
                put("[")
                for number, each in enumerate(value):
                    put("," * (number > 0), VALUE)
                    walk(each, choice, VALUE)
                put("]", VALUE)
            case str():
                weight = (SENTENCE if value.endswith(".") else VALUE) if choice else WRITTEN
                put('"')
                put(json.dumps(value)[1:], weight)
            case _:
                put(json.dumps(value), VALUE)

    if isinstance(value, dict) and not chosen:
        put(f'{{"name":{json.dumps(value["name"])},"arguments":')
        walk(value["arguments"], True)
        put("}")
    else:
        walk(value, True)
    ends = [k for k in range(1, len(text)) if text[k - 1].isdigit() and text[k] in ",}"]
    for end in ends:
        weights[end] = max(weights[end], SENTENCE)
    return text, weights


def _name(
    rng: random.Random, names: Sequence[str], split: str, unseen: int = 1, trained: Sequence[str] = ()
) -> str:
    if split == "held_out" and rng.random() < 0.3:
        return rng.choice(names[-unseen:])
    names = names[:-unseen]
    return rng.choice((*names, *trained) if split == "train" else names)


def _item_schema(names: dict[str, str]) -> dict[str, Any]:
    values = {"colour": tuple(COLOURS), "shape": SHAPES, "place": PLACES}
    properties = {name: {"type": "string", "enum": list(values[holds])} for holds, name in names.items()}
    return {"type": "object", "properties": properties, "required": list(names.values())}


def _field(
    rng: random.Random, holds: str, found: Sequence[Item], answer: str, split: str, enums: bool
) -> Field:
    """A field that holds what `holds` says of the items found; "unknown": any name, of any type."""
    first = found[0] if found else None
    known, unseen = (UNKNOWN, _UNSEEN) if holds == "unknown" else (NAMES[holds], 1)
    name = _name(rng, known, split, unseen, TRAINED_NAMES[holds])
    if holds == "unknown":
        holds = rng.choice(("text", "text", "count", "exists"))
    text: dict[str, Any] = {"type": "string"}
    if holds in ("colour", "shape", "place"):
        words = {"colour": tuple(COLOURS), "shape": SHAPES, "place": PLACES}[holds]
        value = NONE if first is None else str(getattr(first, holds))
        return Field(name, holds, {**text, "enum": [*words, NONE]} if enums else text, value)
    if holds == "count":
        return Field(name, holds, {"type": "integer"}, len(found))
    if holds == "exists":
        return Field(name, holds, {"type": "boolean"}, bool(found))
    if holds == "items":
        parts = rng.choice(
            (("colour", "shape"), ("colour", "shape", "place"), ("shape", "colour"), ("shape",))
        )
        names = {
            part: _name(rng, NAMES[part][:2] + NAMES[part][-1:], split, 1, TRAINED_NAMES[part])
            for part in parts
        }
        values = [{names[part]: getattr(item, part) for part in parts} for item in found]
        return Field(name, holds, {"type": "array", "items": _item_schema(names)}, values)
    return Field(name, holds, text, answer)


def drawn_fields(
    rng: random.Random, query: Query | None, scenes: Sequence[Scene], answer: str, split: str
) -> list[Field]:
    """One to four fields; what the query asks for is among them more often than not.

    `query` None: a request without pictures, or a question that no field but a text answers.
    """
    found: list[Item] = []
    if query is not None and query.kind in ONE_IMAGE:
        found = matching(query, scenes[query.image or 0])
        asked = ASKED[query.kind]
    else:
        asked = "text"
    others = ["colour", "shape", "place", "count", "exists", "items", "text", "unknown", "unknown"]
    if asked == "text":  # of several images nothing else is certain
        others = ["text", "unknown"] if query is not None else others
    kinds = [asked] if rng.random() < 0.7 else []
    kinds += rng.sample(others, min(len(others), rng.choices((0, 1, 2, 3), (4, 4, 2, 1))[0] or (not kinds)))
    rng.shuffle(kinds)
    fields: dict[str, Field] = {}
    for kind in kinds:
        field = _field(rng, kind, found, answer, split, rng.random() < 0.3)
        if query is not None and query.kind not in ONE_IMAGE and field.holds != "text":
            field = Field(field.name, "text", {"type": "string"}, answer)
        if field.holds != "text" or all(other.holds != "text" for other in fields.values()):
            fields.setdefault(field.name, field)
    return list(fields.values())


def schema_of(fields: Sequence[Field]) -> dict[str, Any]:
    """The JSON schema of an object of the fields."""
    properties = {field.name: field.schema for field in fields}
    return {"type": "object", "properties": properties, "required": list(properties)}


def value_of(fields: Sequence[Field]) -> dict[str, Any]:
    return {field.name: field.value for field in fields}


@dataclass(frozen=True)
class ToolCall:
    """A call that is due: the names of all tools in the prompt, and the one with its arguments.

    `fits`: the tool is for the question, so that the model calls it without being made to.
    """

    offered: tuple[str, ...]
    name: str
    fields: tuple[Field, ...]
    fits: bool

    @property
    def system(self) -> str:
        """What the chat template makes of the tools."""
        return "".join(f"{name} " for name in self.offered) + "<tool_call>"

    @property
    def value(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": value_of(self.fields)}


def drawn_call(
    rng: random.Random, query: Query | None, scenes: Sequence[Scene], answer: str, split: str
) -> ToolCall:
    """A call of one of one to three tools."""
    fits = query is not None and rng.random() < 0.75
    kind = ASKED.get(query.kind, "text") if query is not None else "text"
    name = _name(rng, TOOLS[kind], split, 1, TRAINED_TOOLS[kind]) if fits else rng.choice(STRANGERS)
    others = [each for each in STRANGERS if each != name]
    offered = [name, *rng.sample(others, rng.choices((0, 1, 2), (5, 3, 2))[0])]
    rng.shuffle(offered)
    return ToolCall(tuple(offered), name, tuple(drawn_fields(rng, query, scenes, answer, split)), fits)
