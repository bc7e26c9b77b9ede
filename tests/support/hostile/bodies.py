"""Request bodies made from their types: the smallest valid one, with a value of any size in one place."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec.inspect as types

from triptych.proxy.call.tools import ToolBody
from triptych.proxy.openai.completions.request import CompletionBody, Prompts
from triptych.proxy.openai.responses.request import FlatTool, InputItem, ResponsesBody
from triptych.proxy.openai.retrieval.embeddings import EmbeddingBody
from triptych.proxy.openai.retrieval.pooling import PoolingBody

#: What fields hold that are converted after their body, by the body's name; "" is any body's.
LATE: Mapping[tuple[str, str], Any] = {
    (ResponsesBody.__name__, "input"): str | list[InputItem],
    (ResponsesBody.__name__, "tools"): list[FlatTool],
    ("", "tools"): list[ToolBody],
    (CompletionBody.__name__, "prompt"): Prompts,
    (EmbeddingBody.__name__, "input"): Prompts,
    (PoolingBody.__name__, "input"): Prompts,
}
FILE = "http://example.com/a"
#: What stands for a type where the smallest value is not valid, or leaves the part out that is looked at.
SMALLEST: dict[str, Any] = {
    "MessageBody": {"role": "assistant", "content": "x"},
    "Base64Source": {"type": "base64", "media_type": "image/png", "data": "QUFB"},
    "FunctionBody": {"name": "f"},
    "FunctionCall": {"name": "f"},
    "FunctionName": {"name": "f"},
    "FlatChoice": {"type": "function", "name": "f"},
    "CallItem": {"arguments": "{}"},
    "NamedSchema": {"schema": {}},
    "FlatSchema": {"schema": {}},
    "ImageUrl": {"url": FILE},
    "MediaUrl": {"url": FILE},
    "ImageBody": {"type": "image", "image": FILE},
    "MediaFile": {"data": "QUFB"},
    "InputImage": {"type": "input_image", "image_url": FILE},
    "InputVideo": {"type": "input_video", "video_url": FILE},
    "ContentBody": {"text": "x"},
    "PromptBody": {"prompt": "x"},
}
TOOL = {"type": "function", "function": {"name": "f"}}
#: What stands beside a field of a body, so that its value is what counts; None leaves a field out.
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("CompletionBody", ""): {"prompt": "x"},
    ("CompletionBody", "encoder_prompt"): {"prompt": None},
    ("CompletionBody", "decoder_prompt"): {"prompt": None, "encoder_prompt": "x"},
    ("CompletionBody", "mm_processor_kwargs"): {"multi_modal_data": {"image": FILE}},
    ("EmbeddingBody", ""): {"input": "x"},
    ("EmbeddingBody", "messages"): {"input": None},
    ("EmbeddingBody", "chat_template_kwargs"): {
        "input": None,
        "messages": [{"role": "user", "content": "x"}],
    },
    ("PoolingBody", ""): {"input": "x"},
    ("PoolingBody", "messages"): {"input": None},
    ("TokenizeBody", ""): {"messages": [{"role": "user", "content": "x"}]},
    ("TokenizeBody", "prompt"): {"messages": None},
    ("ChatBody", "tool_choice"): {"tools": [TOOL]},
    ("ResponsesBody", "tool_choice"): {"tools": [{"type": "function", "name": "f"}]},
    ("MessagesBody", "tool_choice"): {"tools": [{"name": "f", "input_schema": {}}]},
    ("CountTokensBody", "tool_choice"): {"tools": [{"name": "f", "input_schema": {}}]},
}
#: Objects with one of several fields.
ONE_OF = frozenset({"ContentBody", "MediaFile", "PromptBody"})
#: Texts that hold JSON.
IN_JSON = frozenset({"arguments", "guided_json"})
#: Files and where they are: media, which have limits of their own.
MEDIA = frozenset({"url", "data", "image", "image_url", "video_url", "audio_url", "file_id"})
#: A call's result, and the turn with the call before it.
RESULT = "tool_result"
CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}
#: Values that any JSON has; of more it has one long text.
MANY = 1 << 18
Steps = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Place:
    """A part of a body that may have any size: a "list", a "dict", a "str", or "any" JSON."""

    kind: str
    steps: Steps
    #: The type of what it holds, of a list or a dict.
    inner: Any = None
    #: Most entries or characters, where its type says so.
    most: int | None = None

    @property
    def path(self) -> str:
        steps = (f".{value}" if step == "field" else "[]" for step, value in self.steps if step != "alt")
        return "".join(steps).removeprefix(".")

    @property
    def of(self) -> str:
        """What it holds, for people."""
        bare = _bare(self.inner)
        return f"{self.kind} of {bare.cls.__name__}" if isinstance(bare, types.StructType) else self.kind


#: Looks up the annotations of every type that a body may hold: once for all its places.
_info = functools.cache(types.type_info)


def places(body: type) -> Iterator[Place]:
    yield from _places(_info(body), (), body.__name__)


def _places(kind: Any, steps: Steps, body: str) -> Iterator[Place]:
    if isinstance(kind, types.Metadata):
        yield from _places(kind.type, steps, body)
    elif isinstance(kind, types.UnionType):
        for at, member in enumerate(kind.types):
            yield from _places(member, (*steps, ("alt", at)), body)
    elif isinstance(kind, types.StructType):
        for field in kind.fields:
            if field.encode_name not in MEDIA:
                yield from _places(_type_of(field, kind, body), (*steps, ("field", field.encode_name)), body)
    elif isinstance(kind, types.ListType):
        for inner in _alternatives(kind.item_type):
            yield Place("list", steps, inner, kind.max_length)
        yield from _places(kind.item_type, (*steps, ("item", None)), body)
    elif isinstance(kind, types.DictType):
        yield Place("dict", steps, kind.value_type, kind.max_length)
        yield from _places(kind.value_type, (*steps, ("value", None)), body)
    elif isinstance(kind, types.StrType):
        yield Place("str", steps, None, kind.max_length)
    elif isinstance(kind, types.AnyType | types.CustomType):
        yield Place("any", steps)


def _alternatives(kind: Any) -> list[Any]:
    """What an entry may be, each kind of objects by itself."""
    members = _bare(kind).types if isinstance(_bare(kind), types.UnionType) else [kind]
    structs = [member for member in members if isinstance(_bare(member), types.StructType)]
    return structs if len(structs) == len(members) else [kind, *structs]


def _type_of(field: Any, struct: Any, body: str) -> Any:
    """The field's type, or the one that its value is converted to later."""
    late = LATE.get((struct.cls.__name__, field.encode_name))
    late = late or (LATE.get(("", field.encode_name)) if struct.cls.__name__ == body else None)
    given = _listed(field.type)
    if late is None or (given is not None and isinstance(_bare(given.item_type), types.StructType)):
        return field.type
    return _limited(_info(late), given)


def _bare(kind: Any) -> Any:
    return _bare(kind.type) if isinstance(kind, types.Metadata) else kind


def _listed(kind: Any) -> Any:
    """The list among what a field takes."""
    kind = _bare(kind)
    if isinstance(kind, types.UnionType):
        return next(filter(None, map(_listed, kind.types)), None)
    return kind if isinstance(kind, types.ListType) else None


def _limited(kind: Any, given: Any) -> Any:
    """`kind` with the limits of the list `given`, which comes first."""
    if given is not None and isinstance(kind, types.UnionType):
        return types.UnionType(tuple(_limited(member, given) for member in kind.types))
    if given is not None and isinstance(kind, types.ListType):
        return types.ListType(kind.item_type, given.min_length, given.max_length)
    return kind


def smallest(kind: Any) -> Any:
    """The smallest value of a type that means something."""
    kind = _bare(kind)
    if isinstance(kind, types.StructType):
        made = {} if kind.tag_field is None else {kind.tag_field: kind.tag}
        required = {field.encode_name: smallest(field.type) for field in kind.fields if field.required}
        return {**made, **required, **SMALLEST.get(kind.cls.__name__, {})}
    if isinstance(kind, types.UnionType):
        return smallest(next(member for member in kind.types if not isinstance(member, types.NoneType)))
    if isinstance(kind, types.ListType):
        return [smallest(kind.item_type)]
    if isinstance(kind, types.DictType):
        return {}
    if isinstance(kind, types.LiteralType):
        return kind.values[0]
    if isinstance(kind, types.IntType | types.FloatType):
        return max(kind.ge or 0, 1)
    return False if isinstance(kind, types.BoolType) else "x"


def body_with(body: type, place: Place, size: int) -> dict[str, Any]:
    """A body with `size` entries, or characters, at the place."""
    last = place.steps[-1][1]
    if place.kind == "list":
        value: Any = [smallest(place.inner)] * size
    elif place.kind == "dict" and (place.most or size <= MANY):
        value = dict.fromkeys(map(str, range(size)), smallest(place.inner))
    elif place.kind == "str":
        value = f'{{"a": "{"x" * size}"}}' if last in IN_JSON else "x" * size
    else:
        value = {"enum": [0] * size if size <= MANY else "x" * size}
    made: dict[str, Any] = _with(_info(body), place.steps, value, body.__name__)
    first = place.steps[0][1]
    beside = BESIDE.get((body.__name__, ""), {}) | BESIDE.get((body.__name__, first), {})
    return {name: value for name, value in {**beside, **made}.items() if value is not None or name == first}


def _with(kind: Any, steps: Steps, value: Any, body: str) -> Any:
    kind = _bare(kind)
    if not steps:
        return value
    (step, which), rest = steps[0], steps[1:]
    if step == "alt":
        return _with(kind.types[which], rest, value, body)
    if step == "item":
        made = _with(kind.item_type, rest, value, body)
        # A result belongs to a call before it.
        inner = made.get("content") if isinstance(made, dict) else None
        result = isinstance(inner, list) and isinstance(inner[0], dict) and inner[0].get("type") == RESULT
        reasoning = isinstance(made, dict) and made.get("type") == "reasoning"
        return [CALLED, made] if result else [made, {"role": "user", "content": "x"}] if reasoning else [made]
    if step == "value":
        return {"1": _with(kind.value_type, rest, value, body)}
    field = next(field for field in kind.fields if field.encode_name == which)
    made = {} if kind.cls.__name__ in ONE_OF and which != "format" else smallest(kind)
    return {**made, which: _with(_type_of(field, kind, body), rest, value, body)}
