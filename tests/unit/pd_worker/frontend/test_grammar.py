"""Outputs held to a form: whatever a sampler picks among the allowed tokens fits it."""

from __future__ import annotations

import functools
import json
import random
import re

import pytest

from support.data.trained import tokenizer
from triptych.base.errors import InvalidRequest
from triptych.base.types import OutputFormat
from triptych.pd_worker.frontend.grammar import GrammarCompiler, GrammarState

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "town": {"enum": ["Zürich", "東京", 'a "quoted" one', "🙂"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{4}$"}, "floor": {"type": "null"}},
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "town", "tags", "home"],
    "additionalProperties": False,
}
CHOICES = ("yes", "no", "ye", "größe\\ 你好", 'say "no"\n', "\x01", "🙂")


@functools.cache
def compiler(style: str = "qwen") -> GrammarCompiler:
    made = tokenizer(style)
    return GrammarCompiler(made.backend_tokenizer, (made.eos_token_id,))


def schema(value: object) -> OutputFormat:
    return OutputFormat("json_schema", json.dumps(value))


def write(state: GrammarState, seed: int, style: str = "qwen", limit: int = 2000) -> tuple[str, list[int]]:
    """A text that the form allows, by uniformly drawn tokens; ends at the first end that is allowed."""
    made, draw, ids = tokenizer(style), random.Random(seed), []
    while len(ids) < limit:
        allowed = state.allowed(ids)
        assert allowed is not None, state.error
        if allowed[made.eos_token_id]:
            return made.backend_tokenizer.decode(ids, skip_special_tokens=False), ids
        ids.append(draw.choice(allowed.nonzero()[0].tolist()))
    raise AssertionError("the form had no end")


@pytest.mark.parametrize("style", ["qwen", "llava"])
@pytest.mark.parametrize("seed", range(12))
def test_a_schemas_output_parses_and_fits(style, seed):
    text, _ = write(compiler(style).state(schema(PERSON)), seed, style)
    value = json.loads(text)
    assert list(value) == ["name", "age", "town", "tags", "home"]
    assert len(value["name"]) <= 12
    assert 0 <= value["age"] <= 150
    assert value["town"] in PERSON["properties"]["town"]["enum"]
    assert all(isinstance(tag, bool) for tag in value["tags"])
    assert 1 <= len(value["tags"]) <= 3
    assert re.fullmatch("[0-9]{4}", value["home"]["zip"])


@pytest.mark.parametrize("seed", range(6))
def test_a_choice_is_one_of_the_texts(seed):
    text, _ = write(compiler().state(OutputFormat("choices", choices=CHOICES)), seed)
    assert text in CHOICES


@pytest.mark.parametrize("pattern", ["[a-c]{3}-[0-9]+", "^[a-c]{3}-[0-9]+$"])
@pytest.mark.parametrize("seed", range(4))
def test_a_regex_matches_the_whole_output(pattern, seed):
    text, _ = write(compiler().state(OutputFormat("regex", pattern)), seed)
    assert re.fullmatch("[a-c]{3}-[0-9]+", text)


def test_an_object_begins_as_one_and_ends_only_when_it_is_closed():
    made, state = tokenizer("qwen"), compiler().state(OutputFormat("json_object"))
    ids = made('{"a":[1,"é🙂"]', add_special_tokens=False)["input_ids"]
    for count in range(len(ids) + 1):
        assert not state.allowed(ids[:count])[made.eos_token_id]
    closed = [*ids, *made("}", add_special_tokens=False)["input_ids"]]
    assert state.allowed(closed)[made.eos_token_id]


def test_special_tokens_are_never_part_of_a_string():
    made, state = tokenizer("qwen"), compiler().state(OutputFormat("json_object"))
    allowed = state.allowed(made('{"a', add_special_tokens=False)["input_ids"])
    assert not allowed[list(made.added_tokens_decoder)].any()


def test_a_state_rebuilt_from_the_output_continues_alike():
    whole, ids = write(compiler().state(schema(PERSON)), 3)
    assert len(ids) > 10
    for cut in (1, len(ids) // 2, len(ids) - 1):
        state = compiler().state(schema(PERSON))
        straight = compiler().state(schema(PERSON))
        for count in range(cut):
            straight.allowed(ids[:count])
        assert (state.allowed(ids[:cut]) == straight.allowed(ids[:cut])).all()


def test_states_of_one_form_do_not_touch_each_other():
    first, second = (compiler().state(OutputFormat("choices", choices=("aa", "bb"))) for _ in range(2))
    made = tokenizer("qwen")
    assert first.follow([made.convert_tokens_to_ids("a")])
    assert second.follow([made.convert_tokens_to_ids("b")])
    assert first.error is second.error is None


def test_output_that_does_not_fit_is_an_error_and_allows_nothing_more():
    state = compiler().state(OutputFormat("json_object"))
    assert not state.follow([tokenizer("qwen").convert_tokens_to_ids("a")])
    assert state.error.param == "response_format"
    assert state.allowed([tokenizer("qwen").convert_tokens_to_ids("a")]) is None


def test_a_keyword_that_the_parser_lacks_is_named_with_where_the_others_are():
    words = "response_format: not is not supported in a schema: docs/api.md#structured-output lists what is"
    with pytest.raises(InvalidRequest, match=words):
        compiler().state(schema({"not": {"type": "string"}}))


@pytest.mark.parametrize(
    "form",
    [
        OutputFormat("regex", "ab(["),
        OutputFormat("json_schema", '{"properties": {"a": {"type": "string", "pattern": "ab(["}}}'),
    ],
)
def test_a_regular_expression_that_cannot_be_read_is_shown_with_what_is_wrong(form):
    with pytest.raises(InvalidRequest) as refused:
        compiler().state(form)
    assert "ab([" in str(refused.value)
    assert str(refused.value).endswith("unclosed character class")


def test_a_schema_that_needs_itself_is_refused_in_words():
    with pytest.raises(InvalidRequest, match="without an end"):
        compiler().state(schema({"$ref": "#"}))


def test_a_model_without_an_end_token_has_no_forms():
    made = GrammarCompiler(tokenizer("qwen").backend_tokenizer, ())
    with pytest.raises(InvalidRequest, match="end-of-sequence"):
        made.state(OutputFormat("json_object"))


def nested(levels: int) -> str:
    return '{"type":"object","properties":{"a":' * levels + '{"type":"string"}' + "}}" * levels


def alternatives(count: int) -> dict:
    parts = [{"type": "object", "properties": {f"p{i}_{j}": {}}} for i in range(count) for j in range(3)]
    return {"allOf": [{"anyOf": parts[3 * i : 3 * i + 3]} for i in range(count)]}


HOSTILE = {
    "no JSON": OutputFormat("json_schema", "{"),
    "no object": OutputFormat("json_schema", "5"),
    "empty": OutputFormat("json_schema", ""),
    "too long": OutputFormat("json_schema", json.dumps({"enum": ["x" * 70_000]})),
    "deep": OutputFormat("json_schema", nested(100)),
    "very deep": OutputFormat("json_schema", "[" * 30_000),
    "endless reference": schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "foreign reference": schema({"$ref": "http://127.0.0.1/secret"}),
    "file reference": schema({"$ref": "file:///etc/passwd"}),
    "multiplied alternatives": schema(alternatives(12)),
    "not": schema({"not": {"type": "string"}}),
    "uniqueItems": schema({"type": "array", "uniqueItems": True}),
    "own settings": schema({"x-guidance": {"lenient": True}, "not": {}}),
    "false": schema({"type": "string", "enum": [1]}),
    "look-around": OutputFormat("regex", "(?=a)b"),
    "back-reference": OutputFormat("regex", r"(a)\1"),
    "open group": OutputFormat("regex", "(" * 5000 + "a"),
    "nested groups": OutputFormat("regex", "(" * 5000 + "a" + ")" * 5000),
    "no choices": OutputFormat("choices"),
    "an empty choice": OutputFormat("choices", choices=("a", "")),
    "many choices": OutputFormat("choices", choices=tuple(map(str, range(2000)))),
    "another kind": OutputFormat("lark", "start: /a/"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_form_that_is_too_much_or_unknown_is_refused(name):
    with pytest.raises(InvalidRequest, match="response_format") as caught:
        compiler().state(HOSTILE[name])
    assert caught.value.param == "response_format"
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    "form",
    [
        OutputFormat("regex", "(a|b)*a(a|b){24}"),
        OutputFormat("regex", "((a{1,100}){1,100}){1,100}"),
        OutputFormat("regex", r"(\p{L}{1,200}){1,200}"),
        OutputFormat("regex", "a{1000000}"),
        schema({"type": "string", "pattern": "^(x+x+)+y$"}),
        schema({"type": "array", "items": {"type": "string"}, "minItems": 100_000}),
        schema({"type": "object", "properties": {f"p{i}": {} for i in range(1500)}}),
        schema({"anyOf": [{"type": "object", "properties": {f"k{i}": {}}} for i in range(500)]}),
    ],
)
def test_a_costly_form_is_worked_on_within_limits(form):
    # The pytest timeout is the bound; a state that gives up says so.
    draw, ids = random.Random(1), []
    try:
        state = compiler().state(form)
    except InvalidRequest:
        return
    for _ in range(30):
        allowed = state.allowed(ids)
        if allowed is None:
            assert state.error.param == "response_format"
            return
        ids.append(draw.choice(allowed.nonzero()[0].tolist()))
        if ids[-1] == tokenizer("qwen").eos_token_id:
            return


@pytest.mark.parametrize("form", [schema(PERSON), OutputFormat("json_object")], ids=["schema", "object"])
def test_json_is_compact_so_that_no_model_fills_its_answer_with_blanks(form):
    state, made, text = compiler().state(form), tokenizer("qwen"), ""
    for piece in ("{", '"name":')[: 2 if form.kind == "json_schema" else 1]:
        text += piece
        allowed = state.allowed(made.backend_tokenizer.encode(text, add_special_tokens=False).ids)
        assert allowed is not None, state.error
        next_texts = [made.backend_tokenizer.decode([token]) for token in allowed.nonzero()[0].tolist()]
        assert not [shown for shown in next_texts if shown != shown.lstrip()]


#: As libraries write it: nothing says that there is no more.
OPEN_ENDED = {
    "$defs": {
        "Part": {
            "type": "object",
            "properties": {"kind": {"enum": ["a", "b"]}, "size": {"type": "integer"}},
            "required": ["kind"],
        }
    },
    "type": "object",
    "properties": {
        "count": {"type": "integer"},
        "part": {"$ref": "#/$defs/Part", "description": "one"},
        "both": {
            "allOf": [
                {"$ref": "#/$defs/Part"},
                {"type": "object", "properties": {"more": {"type": "boolean"}}},
            ]
        },
    },
    "required": ["count", "part"],
}


@pytest.mark.parametrize("seed", range(12))
def test_an_output_under_an_open_ended_schema_ends_with_its_last_brace(seed):
    text, _ = write(compiler().state(schema(OPEN_ENDED)), seed, limit=200)
    value = json.loads(text)
    assert text.endswith("}")
    assert value.keys() <= {"count", "part", "both"}
    assert value["part"].keys() <= {"kind", "size"}
    assert value.get("both", {}).keys() <= {"kind", "size", "more"}
    assert abs(value["count"]) < 1 << 63


@pytest.mark.parametrize(("closes", "as_written"), [(False, False), (True, True), (True, False)])
def test_more_names_come_only_where_the_schema_is_held_to_as_it_is_written(closes, as_written):
    made = tokenizer("qwen")
    grammar = GrammarCompiler(made.backend_tokenizer, (made.eos_token_id,), closes=closes)
    form = OutputFormat("json_schema", json.dumps(OPEN_ENDED), open=as_written)
    ids = made('{"count":1,"part":{"kind":"a"},"x":1}', add_special_tokens=False)["input_ids"]
    state = grammar.state(form)
    assert state.follow(ids) is (as_written or not closes)
    assert (json.loads(state.output_format.text) == OPEN_ENDED) is (as_written or not closes)


def test_bounds_that_the_parser_does_not_take_leave_a_schema_as_it_is_written():
    # Texts of this pattern are longer than the bound, which leaves none.
    value = {"type": "string", "pattern": "^a{9000}$"}
    form = schema({"type": "object", "properties": {"a": value}, "required": ["a"]})
    state = compiler().state(form)
    assert state.output_format == form
    made = tokenizer("qwen")
    assert state.follow(made('{"a":"aa', add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("kind", ["number", ["integer", "number"], ["number", "null"]])
@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("3", True),
        ("-0.5", True),
        ("1.123456789", True),
        ("1.1234567891", False),
        ("1." + "0" * 10, False),
        ("9" * 18 + ".5", True),
        ("9" * 20, False),
        ("1e400", False),
    ],
)
def test_a_number_has_an_end_before_and_behind_its_point(kind, text, fits):
    state = compiler().state(
        schema({"type": "object", "properties": {"a": {"type": kind}}, "required": ["a"]})
    )
    ids = tokenizer("qwen")(f'{{"a":{text}}}', add_special_tokens=False)["input_ids"]
    assert state.follow(ids) is fits


@pytest.mark.parametrize(("items", "fits"), [(4096, True), (4097, False)])
@pytest.mark.parametrize("words", [{}, {"items": {"type": "null"}}, {"prefixItems": [{"type": "null"}]}])
def test_a_list_has_an_end(words, items, fits):
    state = compiler().state(schema({"type": "array", **words}))
    ids = tokenizer("qwen")(f"[{','.join(['null'] * items)}]", add_special_tokens=False)["input_ids"]
    assert state.follow(ids) is fits
