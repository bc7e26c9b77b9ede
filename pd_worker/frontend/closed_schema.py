"""JSON schemas that end: objects have the written names only, and numbers, strings and lists a bound.

A weak model invents names, digits, letters and items for as long as it may. Where a schema says itself what
more an object may have, or how long a value may be, it stays as it is.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

MAX_STRING = 8192
#: The largest that fits 64 bits and is exact as a float, as which parsers read it: 19 digits.
MAX_INTEGER = (1 << 63) - (1 << 10)
#: What a number is a multiple of: digits after the point are bounded by nothing else that the parser takes,
#: and it takes no smaller one. Powers of ten are written out.
NUMBER_STEP = 1e-9
_STEP_DIGITS = 9
MAX_ITEMS = 4096
#: Schemas and names that are looked at for one schema: copies of what references lead to multiply.
_MAX_VISITS = 50_000

_BRANCHES = ("anyOf", "oneOf")
_SAYS_MORE = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
#: Conditions of which it is not known when they hold, and references that only whole documents resolve.
_UNKNOWN = (
    *("not", "if", "then", "else", "dependentSchemas", "dependencies"),
    *("$dynamicRef", "$recursiveRef"),
)
_DEFINITIONS = ("$defs", "definitions")
_AT_THE_ROOT = re.compile(r"#|#/(\$defs|definitions)/[^/]+")


class _AsWritten(Exception):
    """The schema is none that can be closed."""


@dataclass(slots=True)
class _Facts:
    """What schemas that hold of one value say together."""

    names: dict[str, None] = field(default_factory=dict)
    #: `properties` are written.
    named: bool = False
    says_more: bool = False
    unknown: bool = False
    pinned: bool = False
    types: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)
    least_properties: float = 0
    least_length: float = 0
    least_items: float = 0
    #: A number's own bounds are between two steps.
    fine: bool = False

    @property
    def bare(self) -> bool:
        """Whether nothing is said but, at most, that the value is an object."""
        return not (
            self.names or self.named or self.says_more or self.unknown or self.pinned or self.words
        ) and (self.types <= {"object"})

    def add(self, schema: Mapping[str, Any]) -> None:
        """Takes in what a schema says by itself, its subschemas apart."""
        names = schema.get("properties")
        if isinstance(names, dict):
            self.named = True
            self.names.update(dict.fromkeys(names))
        if isinstance(required := schema.get("required"), list):
            self.names.update(dict.fromkeys(name for name in required if isinstance(name, str)))
        types = schema.get("type")
        types = types if isinstance(types, list) else [types]
        self.types |= {name for name in types if isinstance(name, str)}
        self.says_more |= any(key in schema for key in _SAYS_MORE)
        self.unknown |= any(key in schema for key in _UNKNOWN)
        self.pinned |= "enum" in schema or "const" in schema
        self.words |= {word for word in _BOUNDS if word in schema}
        self.least_properties = max(self.least_properties, _number(schema.get("minProperties")))
        self.least_length = max(self.least_length, _number(schema.get("minLength")))
        self.least_items = max(self.least_items, _number(schema.get("minItems")))
        bounds = [_number(schema.get(word)) for word in (*_LOWER, *_UPPER)]
        self.fine |= any(round(bound, _STEP_DIGITS) != bound for bound in bounds)

    def __or__(self, other: _Facts) -> _Facts:
        return _Facts(
            {**self.names, **other.names},
            self.named or other.named,
            self.says_more or other.says_more,
            self.unknown or other.unknown,
            self.pinned or other.pinned,
            self.types | other.types,
            self.words | other.words,
            max(self.least_properties, other.least_properties),
            max(self.least_length, other.least_length),
            max(self.least_items, other.least_items),
            self.fine or other.fine,
        )


_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_LISTS = ("maxItems", "minItems", "items", "prefixItems")
_BOUNDS = ("maxLength", "minLength", "pattern", "format", "multipleOf", *_LISTS, *_LOWER, *_UPPER)


def closed_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with closed objects and bounded values; itself where it is none that can be closed."""
    try:
        return _Closing(schema).run()
    except _AsWritten:
        return schema


class _Closing:
    """One document on its way to a closed one.

    A schema that is part of another one stays as wide as it is written; the whole of them is closed. What a
    reference leads to is closed where it stands, and copied where it is a part.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._visits = 0
        #: Names of copies in `$defs`, by reference and whether they are parts.
        self._copies: dict[tuple[str, bool], str] = {}
        self._waiting: deque[tuple[str, Any, bool]] = deque()

    def run(self) -> dict[str, Any]:
        outside = {key: value for key, value in self._root.items() if key not in _DEFINITIONS}
        made: dict[str, Any] = self._closed(outside)
        for key in _DEFINITIONS:
            if isinstance(inner := self._root.get(key), dict):
                made[key] = {name: self._closed(value) for name, value in inner.items()}
        copies = {}
        while self._waiting:
            name, target, is_part = self._waiting.popleft()
            copies[name] = self._part(target) if is_part else self._closed(target)
        if copies:
            made["$defs"] = {**(made.get("$defs") or {}), **copies}
        return made

    def _closed(self, schema: Any, above: _Facts | None = None) -> Any:
        """The schema as one of a whole value; `above` holds of the value too."""
        if not isinstance(schema, dict):
            return schema
        above = above or _Facts()
        branches = [key for key in _BRANCHES if isinstance(schema.get(key), list)]
        parts = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
        count = len(parts) + ("$ref" in schema)
        own = _Facts()
        own.add(schema)
        if branches:
            made = self._part({key: value for key, value in schema.items() if key not in branches})
            references = [{"$ref": schema["$ref"]}] if "$ref" in schema else []
            base = above | own | self._facts([*parts, *references])
            for key in branches:
                beside = base | self._facts(
                    part for other in branches if other != key for part in schema[other]
                )
                self._visit(len(beside.names) * len(schema[key]))
                made[key] = [self._closed(part, beside) for part in schema[key]]
            return made
        if count == 1 and own.bare and above.bare:
            made = self._part({key: value for key, value in schema.items() if key not in ("allOf", "$ref")})
            if parts:
                return {**made, "allOf": [self._closed(parts[0])]}
            return {**made, "$ref": self._reference(schema["$ref"], is_part=False)}
        facts = above | (self._facts([schema]) if count else own)
        self._visit(len(facts.names))
        return _bounded(self._part(schema), facts)

    def _part(self, schema: Any) -> Any:
        """The schema as wide as it is written, with closed values inside."""
        self._visit()
        if not isinstance(schema, dict):
            return schema
        return {key: self._keyword(key, value) for key, value in schema.items()}

    def _keyword(self, key: str, value: Any) -> Any:
        match key, value:
            case (("properties" | "patternProperties"), dict()):
                return {name: self._closed(inner) for name, inner in value.items()}
            case (("items" | "additionalProperties" | "additionalItems"), dict()):
                return self._closed(value)
            case (("items" | "prefixItems"), list()):
                return [self._closed(inner) for inner in value]
            case (("allOf" | "anyOf" | "oneOf"), list()):
                return [self._part(inner) for inner in value]
            case "$ref", str():
                return self._reference(value, is_part=True)
            case (("$id" | "$anchor" | "$dynamicAnchor"), _) if value is not self._root.get(key):
                # References count from here, or lead here by name: copies would have that name too.
                raise _AsWritten
        return value

    def _reference(self, reference: Any, *, is_part: bool) -> Any:
        if not isinstance(reference, str) or not is_part and _AT_THE_ROOT.fullmatch(reference):
            return reference
        at = (reference, is_part)
        if at not in self._copies:
            target = self._target(reference)
            if target is None:
                return reference
            taken = self._root.get("$defs")
            name = f"{'part' if is_part else 'closed'}{len(self._copies)}"
            while isinstance(taken, dict) and name in taken:
                name += "_"
            self._copies[at] = name
            self._waiting.append((name, target, is_part))
        return f"#/$defs/{self._copies[at]}"

    def _target(self, reference: str) -> Any:
        """What a reference into this document leads to; None for another one."""
        if reference == "#":
            return self._root
        if not reference.startswith("#/"):
            return None
        value: Any = self._root
        for word in unquote(reference[2:]).split("/"):
            name = word.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict):
                value = value.get(name)
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                return None
        return value

    def _facts(self, schemas: Iterable[Any]) -> _Facts:
        """What these schemas say together, with their parts, branches and references."""
        facts, waiting, followed = _Facts(), list(schemas), set()
        while waiting:
            self._visit()
            schema = waiting.pop()
            if not isinstance(schema, dict):
                continue
            facts.add(schema)
            for key in ("allOf", *_BRANCHES):
                if isinstance(schema.get(key), list):
                    waiting += schema[key]
            reference = schema.get("$ref")
            if isinstance(reference, str) and reference not in followed:
                followed.add(reference)
                target = self._target(reference)
                facts.unknown |= target is None
                waiting.append(target)
        return facts

    def _visit(self, count: int = 1) -> None:
        self._visits += count
        if self._visits > _MAX_VISITS:
            raise _AsWritten


def _bounded(made: dict[str, Any], facts: _Facts) -> dict[str, Any]:
    """The schema with the bounds that none of `facts` has."""
    if facts.pinned or facts.unknown:
        return made
    if facts.named and not facts.says_more and facts.least_properties <= len(facts.names):
        own = made.get("properties") or {}
        others: dict[str, Any] = {name: {} for name in facts.names if name not in own}
        made = {**made, "properties": {**own, **others}, "additionalProperties": False}
    if "string" in facts.types and "maxLength" not in facts.words and facts.least_length <= MAX_STRING:
        made["maxLength"] = MAX_STRING
    endless = "array" in facts.types and "maxItems" not in facts.words and made.get("items") is not False
    if endless and facts.least_items <= MAX_ITEMS:
        made["maxItems"] = MAX_ITEMS
    if "number" in facts.types and "multipleOf" not in facts.words and not facts.fine:
        made["multipleOf"] = NUMBER_STEP
    if not facts.types.isdisjoint(("integer", "number")):
        if facts.words.isdisjoint(_LOWER):
            made["minimum"] = -MAX_INTEGER
        if facts.words.isdisjoint(_UPPER):
            made["maximum"] = MAX_INTEGER
    return made


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else 0
