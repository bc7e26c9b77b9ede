"""Calls of functions that are `strict`: held to their schemas from the marker on, in text that is free."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from tokenizers import AddedToken

from support.data.trained import tokenizer
from triptych.base.errors import InvalidRequest
from triptych.base.types import OutputFormat
from triptych.pd_worker.frontend.call_grammar import strict_calls
from triptych.pd_worker.frontend.grammar import GrammarCompiler

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}


def tool(name: str, parameters: Any = CITY, strict: bool | None = True) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


TOOLS = [tool("weather", {**CITY, "required": ["city"]}), tool("free", strict=None), tool("none", None)]


@functools.cache
def compiler(marker: str = "", *, closes: bool = True) -> GrammarCompiler:
    """`marker`: how the tokenizer has `<tool_call>`: as text, or as an added token, special or not."""
    made = tokenizer("qwen")
    backend = type(made.backend_tokenizer).from_str(made.backend_tokenizer.to_str())
    if marker:
        added = [AddedToken(f"<{end}tool_call>", special=marker == "special") for end in ("", "/")]
        backend.add_tokens(added)
    return GrammarCompiler(backend, (made.eos_token_id,), closes=closes)


def form(*tools: dict[str, Any]) -> OutputFormat:
    found = strict_calls(tools or TOOLS, "hermes")
    assert found is not None
    return found


def taken(text: str, made: GrammarCompiler, output_format: OutputFormat) -> tuple[str, bool]:
    """How far the text is allowed token by token, and whether it may end there."""
    ids = made._backend.encode(text, add_special_tokens=False).ids
    state = made.state(output_format)
    for at, token in enumerate(ids):
        allowed = state.allowed(ids[:at])
        assert allowed is not None, state.error
        if not allowed[token]:
            return made._backend.decode(ids[:at], skip_special_tokens=False), False
    allowed = state.allowed(ids)
    return text, allowed is not None and bool(allowed[list(made._eos)].all())


def call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("marker", ["", "added", "special"])
def test_a_call_has_arguments_of_its_schema_and_text_is_free(marker: str) -> None:
    made = compiler(marker)
    for text in (
        "",
        "Hello, <tool> and {braces}",
        call("weather", '{"city": "Rome", "days": 3}'),
        call("weather", '{"city":"Rome"}'),
        "I look.\n" + call("weather", '{"city": "Rome"}') + "\n" + call("free", '{"a": [1, {"b": null}]}'),
        call("none", "{}") + "\nDone.",
    ):
        assert taken(text, made, form()) == (text, True), text
    for text, upto in (
        (call("weather", '{"town": "Rome"}'), '"arguments": {"'),
        (call("weather", '{"city": 3}'), '"city": '),
        (call("weather", "{}"), '"arguments": {'),
        (call("weather", '{"city": "Rome", "country": "I"}'), '"city": "Rome"'),
        (call("wether", "{}"), '"we'),
        (call("none", '{"a": 1}'), '"arguments": {'),
        ("<tool_call>\nweather", "<tool_call>\n"),
    ):
        end, complete = taken(text, made, form())
        assert len(end) < len(text) and not complete, text
        assert upto.startswith(end[-4:]) or upto[:-3] in end, (end, upto)


def test_the_marker_in_letters_is_no_text_beside_a_token_of_it() -> None:
    made = compiler("special")
    ids = [made._backend.encode(letter, add_special_tokens=False).ids[0] for letter in "<tool_call>"]
    allowed = made.state(form()).allowed(ids[:-1])
    assert allowed is not None and not allowed[ids[-1]] and allowed[ids[0]]


def test_an_output_does_not_end_within_a_call() -> None:
    begun = call("weather", '{"city": "Rome"}')[:-20]
    assert taken(begun, compiler(), form()) == (begun, False)


def test_a_schema_stays_open_where_the_worker_leaves_it_open() -> None:
    more = call("weather", '{"city": "Rome", "country": "I"}')
    assert taken(more, compiler(closes=False), form()) == (more, True)


def test_a_schema_with_references_of_its_own_is_resolved_from_its_own_root() -> None:
    schema = {
        "$defs": {"c": {"enum": ["Rome"]}},
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/c"}},
    }
    text = call("weather", '{"city": "Rome"}')
    assert taken(text, compiler(), form(tool("weather", schema))) == (text, True)
    assert not taken(call("weather", '{"city": "Oslo"}'), compiler(), form(tool("weather", schema)))[1]


def test_nothing_is_held_where_no_function_asks_or_calls_are_written_otherwise() -> None:
    assert strict_calls([tool("a", strict=None), tool("b", strict=False)], "hermes") is None
    assert strict_calls(TOOLS, "qwen3_coder") is strict_calls(TOOLS, "") is strict_calls([], "hermes") is None


def test_a_schema_that_the_parser_lacks_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not is not supported in a schema"):
        compiler().state(form(tool("weather", {"not": {}})))
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        compiler().state(form(tool("weather", [1])))


def test_of_large_schemas_that_are_refused_none_is_read_a_second_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which function it is would take as much work again for each of them."""
    read: list[int] = []
    matcher_of = GrammarCompiler._matcher_of

    def counted(made: GrammarCompiler, schemas: dict[str, Any]) -> Any:
        read.append(len(schemas))
        return matcher_of(made, schemas)

    monkeypatch.setattr(GrammarCompiler, "_matcher_of", counted)
    lacks = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for size, tries in ((1, [2, 1, 1]), (1 << 14, [2])):
        read.clear()
        wide = {"type": "object", "properties": {"b": {"const": "x" * size}}}
        with pytest.raises(InvalidRequest):
            compiler().state(form(tool("wide", wide), tool("lacks", lacks)))
        assert read == tries


def test_its_cost_grows_with_neither_the_text_nor_the_tools() -> None:
    """A mask of free text, and a hundred functions: no limit of the parser is met."""
    many = form(*(tool(f"function_{index}") for index in range(128)))
    text = "word " * 200 + call("function_77", json.dumps({"city": "Rome", "days": 2}))
    assert taken(text, compiler(), many) == (text, True)
