"""Schemas that end: objects have the written names only, numbers, strings and lists a bound."""

from __future__ import annotations

import copy
import json

import pytest

from triptych.pd_worker.frontend import closed_schema as module
from triptych.pd_worker.frontend.closed_schema import (
    MAX_INTEGER,
    MAX_ITEMS,
    MAX_STRING,
    NUMBER_STEP,
    closed_schema,
)

INTEGER = {"type": "integer", "minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}
NUMBER = {**INTEGER, "type": "number", "multipleOf": NUMBER_STEP}
STRING = {"type": "string", "maxLength": MAX_STRING}
LIST = {"type": "array", "maxItems": MAX_ITEMS}
CLOSED = {"additionalProperties": False}


def named(**properties):
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (named(a={"type": "integer"}), {**named(a=INTEGER), **CLOSED}),
        ({"properties": {"a": {"type": "string"}}}, {"properties": {"a": STRING}, **CLOSED}),
        (named(), {**named(), **CLOSED}),
        (named(a=named(b={"type": "null"})), {**named(a={**named(b={"type": "null"}), **CLOSED}), **CLOSED}),
        (
            {"type": "array", "items": {"type": "array", "items": named(a=True)}},
            {**LIST, "items": {**LIST, "items": {**named(a=True), **CLOSED}}},
        ),
        ({"type": "array"}, LIST),
        ({"type": "array", "minItems": MAX_ITEMS}, {**LIST, "minItems": MAX_ITEMS}),
        ({"type": "array", "prefixItems": [{}]}, {**LIST, "prefixItems": [{}]}),
        ({"type": "number"}, NUMBER),
        ({"type": ["integer", "number"]}, {**NUMBER, "type": ["integer", "number"]}),
        ({"type": "number", "minimum": 0.5}, {**NUMBER, "minimum": 0.5}),
        ({"type": "number", "multipleOf": 0.01}, {**NUMBER, "multipleOf": 0.01}),
        (
            {"type": "number", "exclusiveMinimum": 0, "maximum": 1e-12},
            {"type": "number", "exclusiveMinimum": 0, "maximum": 1e-12},
        ),
        ({"prefixItems": [named(a={})]}, {"prefixItems": [{**named(a={}), **CLOSED}]}),
        ({"type": ["string", "null"]}, {"type": ["string", "null"], "maxLength": MAX_STRING}),
        ({"type": "integer", "minimum": 0}, {"type": "integer", "minimum": 0, "maximum": MAX_INTEGER}),
        (
            {"type": "integer", "exclusiveMaximum": 5},
            {"type": "integer", "exclusiveMaximum": 5, "minimum": -MAX_INTEGER},
        ),
        (
            {**named(a={}), "required": ["a", "b"]},
            {**named(a={}, b={}), "required": ["a", "b"], **CLOSED},
        ),
        (
            {**named(a={}), "additionalProperties": {"type": "string"}},
            {**named(a={}), "additionalProperties": STRING},
        ),
        (
            {"type": "object", "additionalProperties": named(a={})},
            {"type": "object", "additionalProperties": {**named(a={}), **CLOSED}},
        ),
    ],
)
def test_objects_are_closed_and_values_bounded(given, expected):
    assert closed_schema(given) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {**named(a=True), "additionalProperties": True},
        {**named(a=True), "additionalProperties": False},
        {**named(a=True), "patternProperties": {"^x": {"type": "null"}}},
        {**named(a=True), "unevaluatedProperties": False},
        {**named(a=True), "minProperties": 2},
        {**named(a=True), "not": {"required": ["a"]}},
        {"enum": [{"a": 1, "b": 2}], **named(a=True)},
        {"const": "x" * 9000, "type": "string"},
        {"type": "string", "maxLength": 10_000},
        {"type": "string", "minLength": 9000},
        {"type": "integer", "minimum": 0, "maximum": 5},
        {"type": "array", "items": False},
        {"type": "array", "maxItems": 10_000},
        {"type": "array", "minItems": 10_000},
        {"default": named(a={"type": "integer"}), "examples": [named(a={"type": "string"})]},
        {"allOf": [named(a=True), {"$ref": "http://elsewhere"}]},
        {"allOf": [named(a=True), {"properties": {"b": True}, "additionalProperties": True}]},
        {"properties": {"a": {"$id": "http://a", "$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "string"}}},
        {"type": 5, "properties": 3, "required": "a", "allOf": {}, "anyOf": 7, "$ref": 9, "minLength": "x"},
    ],
)
def test_what_says_more_itself_or_is_none_of_these_stays(schema):
    assert closed_schema(schema) == schema


def test_names_of_all_parts_count():
    made = closed_schema({"allOf": [named(a={"type": "integer"}), {"properties": {"b": {"type": "string"}}}]})
    assert made == {
        "allOf": [named(a=INTEGER), {"properties": {"b": STRING}}],
        "properties": {"a": {}, "b": {}} if next(iter(made["properties"])) == "a" else {"b": {}, "a": {}},
        **CLOSED,
    }


def test_a_bound_in_one_part_is_one_of_the_whole():
    schema = {"allOf": [{"type": "string"}, {"maxLength": 9000}]}
    assert closed_schema(schema) == schema
    made = closed_schema({"allOf": [{"type": "integer"}, {"minimum": 3}]})
    assert made == {"allOf": [{"type": "integer"}, {"minimum": 3}], "maximum": MAX_INTEGER}


def test_each_of_several_kinds_is_closed_for_itself():
    made = closed_schema(
        {"anyOf": [named(a=True), {**named(b=True), "additionalProperties": True}, {"type": "null"}]}
    )
    assert made == {
        "anyOf": [
            {**named(a=True), **CLOSED},
            {**named(b=True), "additionalProperties": True},
            {"type": "null"},
        ]
    }


def test_names_beside_alternatives_are_names_of_each():
    made = closed_schema(
        {**named(a=True), "oneOf": [{"properties": {"b": True}}, {"properties": {"c": True}}]}
    )
    assert made == {
        **named(a=True),
        "oneOf": [
            {"properties": {"b": True, "a": {}}, **CLOSED},
            {"properties": {"c": True, "a": {}}, **CLOSED},
        ],
    }


def test_a_reference_leads_to_a_closed_schema():
    node = {**named(value={"type": "integer"}, next={"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]})}
    made = closed_schema({"$ref": "#/$defs/Node", "$defs": {"Node": node}})
    assert made["$ref"] == "#/$defs/Node"
    assert made["$defs"]["Node"] == {
        **named(value=INTEGER, next={"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}),
        **CLOSED,
    }


def test_words_beside_a_reference_that_say_nothing_leave_it_one():
    made = closed_schema(
        {
            **named(
                a={"$ref": "#/$defs/A", "description": "x"},
                b={"allOf": [{"$ref": "#/$defs/A"}], "default": 1},
            ),
            "$defs": {"A": named(c=True)},
        }
    )
    assert made["properties"]["a"] == {"$ref": "#/$defs/A", "description": "x"}
    assert made["properties"]["b"] == {"allOf": [{"$ref": "#/$defs/A"}], "default": 1}
    assert made["$defs"] == {"A": {**named(c=True), **CLOSED}}


def test_a_definition_that_is_a_part_here_and_whole_there_is_both():
    made = closed_schema(
        {
            **named(
                whole={"$ref": "#/definitions/A"},
                more={"allOf": [{"$ref": "#/definitions/A"}], "properties": {"b": True}},
            ),
            "definitions": {"A": named(a=True)},
        }
    )
    assert made["definitions"]["A"] == {**named(a=True), **CLOSED}
    assert made["properties"]["whole"] == {"$ref": "#/definitions/A"}
    more = made["properties"]["more"]
    assert more["properties"] == {"b": True, "a": {}}
    assert more["additionalProperties"] is False
    (part,) = more["allOf"]
    assert made["$defs"] == {part["$ref"].removeprefix("#/$defs/"): named(a=True)}


def test_what_a_reference_finds_outside_definitions_is_closed_too():
    made = closed_schema(
        {
            **named(a={"$ref": "#/own/a~1b"}),
            "own": {"a/b": named(c={"type": "string"})},
            "$defs": {"closed0": 1},
        }
    )
    name = made["properties"]["a"]["$ref"].removeprefix("#/$defs/")
    assert name != "closed0"
    assert made["$defs"][name] == {**named(c=STRING), **CLOSED}


def test_the_given_schema_is_not_changed():
    schema = {
        **named(a={"allOf": [{"$ref": "#/$defs/A"}, named(b={"type": "string"})]}),
        "$defs": {"A": named()},
    }
    before = copy.deepcopy(schema)
    closed_schema(schema)
    assert schema == before


def doubled(levels: int) -> dict:
    """Each part refers twice to the next one."""
    parts = {
        f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"$ref": f"#/$defs/a{i + 1}"}]}
        for i in range(levels)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**parts, f"a{levels}": named(x=True)}}


def paths(levels: int) -> dict:
    """References into each level of one deep schema, each a copy of what is below it."""
    inner: dict = {f"p{i}": {"type": "string"} for i in range(900)}
    for _ in range(levels):
        inner = {"a": {"properties": inner}}
    refs = {f"r{i}": {"$ref": "#/properties/a" + "/properties/a" * i} for i in range(levels)}
    return {"properties": {**inner, **refs}}


HOSTILE = {
    "a loop": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "a loop of parts": {"allOf": [{"$ref": "#"}, {"$ref": "#"}], "properties": {"a": {"$ref": "#"}}},
    "a loop of kinds": {"anyOf": [{"$ref": "#"}, named(a=True)], "properties": {"b": True}},
    "doubled parts": doubled(400),
    "a long chain": {
        "allOf": [{"$ref": "#/$defs/a0"}, named(y=True)],
        "$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}, {}]} for i in range(900)},
    },
    "paths": paths(60),
    "many": {"anyOf": [named(**{f"k{i}": {}}) for i in range(2000)], "oneOf": [{}] * 2000},
    "names": {**named(**{f"p{i}": True for i in range(2000)}), "anyOf": [{"type": "object"}] * 2000},
    "both": {"anyOf": [{"allOf": [{"$ref": "#"}] * 500}] * 100, "oneOf": [{"$ref": "#"}] * 500},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_costs_no_more_than_its_bound(name):
    closing = module._Closing(HOSTILE[name])
    try:
        closing.run()
    except module._AsWritten:
        assert closed_schema(HOSTILE[name]) is HOSTILE[name]
    # What one step may add is bounded by the text of the schema.
    assert closing._visits <= module._MAX_VISITS + (4 << 20)


def test_a_schema_of_the_largest_size_is_closed():
    wide = {"type": "object", "properties": {f"property{i:04}": {"type": "string"} for i in range(2000)}}
    assert len(json.dumps(wide)) > 60_000
    assert closed_schema(wide)["properties"]["property1999"] == STRING
