"""Bodies of the chat API: content, sampling, forms, tools."""

from __future__ import annotations

import base64
import json
from typing import Any

import jsonschema
import pytest

from support.hostile.malformed import (
    HELLO,
    MALFORMED,
    PNG,
    URL,
    chosen,
    tool,
    with_part,
    with_url,
    with_value,
)
from triptych.base.errors import InvalidRequest
from triptych.base.request import TextPart
from triptych.base.types import OutputFormat
from triptych.proxy.call.chat import ChatCall, ChatMessage
from triptych.proxy.call.tools import CallForm
from triptych.proxy.media.source import FileUrl, ImagePart
from triptych.proxy.openai.chat.request import ChatReplyOptions, parse_body
from triptych.proxy.splitter import pd_messages


def parse(body: Any) -> tuple[ChatCall, ChatReplyOptions]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_body(raw, "r", max_images=2, timeout=10.0)


@pytest.mark.parametrize(("body", "param"), [case[1:] for case in MALFORMED], ids=[c[0] for c in MALFORMED])
def test_a_malformed_request_is_a_400_that_names_its_field(body: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(body)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param.split(".")[-1].split("[")[0] in caught.value.message or param == "body"


def test_web_and_file_urls_are_kept_for_the_loader() -> None:
    call, _ = parse(with_url("https://example.com/a.png?x=1#y"))
    source = call.items()[0].source
    assert str(source.url) == "https://example.com/a.png?x=1"
    call, _ = parse(with_url("file:///tmp/a%20b.png"))
    assert call.items()[0].source == FileUrl("/tmp/a b.png")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": "x"}] * 4097, "messages"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}] * 4097}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}] * 2048}] * 2, "messages"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 2048}] * 2, "messages"),
    ],
)
def test_messages_parts_and_calls_are_counted(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest, match="at most 4096.*: (join texts|send less)") as caught:
        parse({"messages": messages})
    assert caught.value.param == param


def test_deep_nesting_is_an_error_and_no_crash() -> None:
    with pytest.raises(InvalidRequest):
        parse(b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def test_unknown_fields_do_not_fail() -> None:
    call, _ = parse(with_value(brand_new={"x": 1}, user="u", model="m"))
    assert call.model == "m"


def test_text_and_images_keep_their_order() -> None:
    part = {"type": "image_url", "image_url": {"url": PNG, "detail": "high"}, "uuid": "mine"}
    call, _ = parse(with_part(part))
    content = call.messages[0].content
    assert content == (TextPart("x"), ImagePart(base64.b64encode(b"picture").decode(), URL))


def test_values_of_the_sampler_are_taken_over() -> None:
    body = with_value(
        max_tokens=9,
        max_completion_tokens=7,
        min_tokens=2,
        temperature=0,
        top_p=1,
        top_k=-1,
        seed=-1,
        stop="end",
        ignore_eos=True,
    )
    sampling = parse(body)[0].sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (7, 2, 0)
    assert (sampling.top_p, sampling.top_k, sampling.seed) == (1, 0, (1 << 64) - 1)
    assert (sampling.stop, sampling.ignore_eos) == (("end",), True)


def test_a_seed_is_drawn_when_none_is_given() -> None:
    seeds = {parse(with_value())[0].sampling.seed for _ in range(5)}
    assert len(seeds) == 5


def test_bad_words_and_the_stop_text_in_the_answer_are_taken_over() -> None:
    sampling = parse(with_value(bad_words=["sea", " of"], include_stop_str_in_output=True))[0].sampling
    assert (sampling.bad_words, sampling.include_stop_str_in_output) == (("sea", " of"), True)
    with pytest.raises(InvalidRequest) as caught:
        parse(with_value(bad_words=["sea", ""]))
    assert caught.value.param == "bad_words[1]"


def form_of(**values: Any) -> OutputFormat | None:
    return parse(with_value(**values))[0].sampling.output_format


def message(**fields: Any) -> ChatMessage:
    return parse({"messages": [*HELLO, fields]})[0].messages[-1]


def test_penalties_bias_and_log_probabilities_are_taken_over() -> None:
    call, options = parse(
        with_value(
            presence_penalty=1,
            frequency_penalty=-2,
            repetition_penalty=1.25,
            min_p=0.5,
            logit_bias={"3": -100, "7": 0.5},
            logprobs=True,
            top_logprobs=2,
            n=3,
        )
    )
    sampling = call.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -2)
    assert (sampling.repetition_penalty, sampling.min_p) == (1.25, 0.5)
    assert sampling.logit_bias == ((3, -100.0), (7, 0.5))
    assert (sampling.logprobs, call.n, options.n, options.logprobs) == (2, 3, 3, True)
    assert not options.plain


def test_log_probabilities_without_a_number_are_those_of_the_chosen_tokens() -> None:
    assert parse(with_value(logprobs=True))[0].sampling.logprobs == 0
    assert parse(with_value(logprobs=False, top_logprobs=0))[0].sampling.logprobs is None


def test_a_plain_request_takes_the_short_way() -> None:
    assert parse(with_value(stream=True, return_token_ids=True, n=1))[1].plain


@pytest.mark.parametrize(
    ("values", "form"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, OutputFormat("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": 1}}}},
            OutputFormat("json_schema", '{"a":1}'),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"a": 1}, "strict": False},
                }
            },
            OutputFormat("json_schema", '{"a":1}', open=True),
        ),
        ({"guided_json": {"a": 1}}, OutputFormat("json_schema", '{"a":1}')),
        ({"guided_json": '{"a": 1}'}, OutputFormat("json_schema", '{"a":1}')),
        ({"guided_regex": "a+"}, OutputFormat("regex", "a+")),
        ({"guided_choice": ["b", "a", "b"]}, OutputFormat("choices", choices=("b", "a"))),
        ({"structured_outputs": {"choice": ["a"]}}, OutputFormat("choices", choices=("a",))),
        ({"structured_outputs": {"json": {"a": 1}}}, OutputFormat("json_schema", '{"a":1}')),
        ({"structured_outputs": {"json_object": True}}, OutputFormat("json_object")),
        ({"structured_outputs": {"regex": "x", "json": None}}, OutputFormat("regex", "x")),
    ],
)
def test_a_form_is_known_in_every_spelling(values: dict[str, Any], form: OutputFormat | None) -> None:
    assert form_of(**values) == form


@pytest.mark.parametrize(
    "values",
    [
        {
            "user": "u",
            "metadata": {"a": "b"},
            "store": True,
            "service_tier": "auto",
            "reasoning_effort": "low",
        },
        {"functions": [], "function_call": None, "best_of": 1, "echo": False, "modalities": ["text"]},
        {"skip_special_tokens": True, "use_beam_search": False, "tools": [], "tool_choice": "auto"},
    ],
)
def test_fields_that_change_nothing_or_are_off_do_not_fail(values: dict[str, Any]) -> None:
    assert parse(with_value(**values))[0].template.tools == b""


def test_tools_go_to_the_template_as_they_came() -> None:
    tools = [tool("f", a=str), {**tool("g"), "extra": 1}]
    call, options = parse(with_value(tools=tools))
    assert json.loads(call.template.tools) == tools
    assert (options.tools.form, call.sampling.output_format) == (CallForm.TAGGED, None)


@pytest.mark.parametrize(("strict", "as_written"), [(None, False), (True, False), (False, True)])
def test_a_forced_call_is_open_only_where_its_tool_is_not_strict(
    strict: bool | None, as_written: bool
) -> None:
    function = {"name": "f", "parameters": {"type": "object"}, "strict": strict}
    tools = [{"type": "function", "function": function}, tool("g")]
    form = form_of(tools=tools, tool_choice="required")
    assert form is not None
    assert form.open is as_written
    taken = json.loads(form.text)["$defs"]["tool0"]
    # A function that names no arguments takes none.
    assert taken == ({"type": "object"} if as_written else {"type": "object", "properties": {}})
    other = form_of(tools=tools, tool_choice=chosen("g"))
    assert other is not None
    assert not other.open


def test_no_tools_are_sent_where_none_may_be_called() -> None:
    call, options = parse(with_value(tools=[tool("f")], tool_choice="none"))
    assert (call.template.tools, options.tools.form) == (b"", CallForm.NONE)


def test_allowed_tools_limit_the_choice() -> None:
    allowed = {"mode": "auto", "tools": [chosen("g")]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    call, _ = parse(with_value(tools=[tool("f"), tool("g")], tool_choice=choice))
    assert [item["function"]["name"] for item in json.loads(call.template.tools)] == ["g"]


def forced_schema(**values: Any) -> dict[str, Any]:
    call, options = parse(with_value(**values))
    assert options.tools.form is CallForm.JSON
    schema: dict[str, Any] = json.loads(call.sampling.output_format.text)
    return schema


def test_a_required_call_is_a_list_of_calls_of_any_tool() -> None:
    schema = forced_schema(tools=[tool("f", a=str), tool("g")], tool_choice="required")
    jsonschema.validate([{"name": "f", "arguments": {"a": "x"}}, {"name": "g", "arguments": {}}], schema)
    for wrong in ([], [{"name": "h", "arguments": {}}], [{"name": "f", "arguments": {"a": 1}}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


@pytest.mark.parametrize(
    "values", [{"tool_choice": chosen("g")}, {"tool_choice": "required", "parallel_tool_calls": False}]
)
def test_a_single_forced_call_is_one_object(values: dict[str, Any]) -> None:
    schema = forced_schema(tools=[tool("f"), tool("g", a=str)], **values)
    jsonschema.validate({"name": "g", "arguments": {"a": "x"}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{"name": "g", "arguments": {"a": "x"}}], schema)


def test_references_of_parameters_still_lead_where_they_led() -> None:
    tree = tool("grow")
    tree["function"]["parameters"] = {
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/node"}, "self": {"$ref": "#"}},
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"child": {"$ref": "#/$defs/node"}},
                "additionalProperties": False,
            }
        },
    }
    schema = forced_schema(tools=[tool("f"), tree], tool_choice=chosen("grow"))
    jsonschema.validate({"name": "grow", "arguments": {"root": {"child": {}}, "self": {}}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"name": "grow", "arguments": {"root": {"child": {"x": 1}}}}, schema)


def test_tools_nested_without_end_are_an_error_and_no_crash() -> None:
    deep = b'{"a":' * 5000 + b"1" + b"}" * 5000
    raw = b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required", "tools": [%s]}'
    function = b'{"type": "function", "function": {"name": "f", "parameters": %s}}' % deep
    for depth in (5000, 700, 450):
        small = function.replace(deep, b'{"a":' * depth + b"1" + b"}" * depth)
        with pytest.raises(InvalidRequest):
            parse_body(raw % small, "r", max_images=1, timeout=1.0)


def test_an_assistants_message_may_hold_calls_and_no_content() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, null]}'}}
    made = message(role="assistant", content=None, tool_calls=[call])
    assert made.content == ""
    (sent,) = json.loads(pd_messages([made]))
    assert sent["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": [1, None]}}


@pytest.mark.parametrize("role", ["tool", "function"])
def test_a_tools_answer_keeps_its_name_and_the_calls_id(role: str) -> None:
    answer = message(role=role, content="blue", name="look", tool_call_id="c1")
    (sent,) = json.loads(pd_messages([answer]))
    assert sent == {"role": "tool", "content": "blue", "name": "look", "tool_call_id": "c1"}
