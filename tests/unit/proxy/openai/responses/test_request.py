from __future__ import annotations

import json
from typing import Any

import pytest

from triptych.base.errors import InvalidRequest
from triptych.base.request import TextPart
from triptych.proxy.call.tools import CallForm
from triptych.proxy.openai.responses.request import ResponsesRequest, parse_responses

PICTURE = "data:image/png;base64,iVBORw0KGgo="
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def _parsed(**body: Any) -> ResponsesRequest:
    return parse_responses(json.dumps(body).encode(), "r1", max_images=2, timeout=9.0)


def test_a_text_with_instructions_is_a_conversation_of_two():
    call = _parsed(input="hello", instructions="be short", max_output_tokens=5).call
    assert [(m.role, m.content) for m in call.messages] == [("system", "be short"), ("user", "hello")]
    assert call.sampling.max_tokens == 5


def test_pictures_keep_the_names_of_the_clients_fields():
    content = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": PICTURE}]
    request = _parsed(instructions="x", input=[{"role": "user", "content": content}])
    text, image = request.call.messages[1].content
    assert text == TextPart("see")
    error = InvalidRequest(f"{image.param}: broken", param=image.param)
    assert request.names.translated(error).param == "input[0].content[1].image_url"


def test_an_earlier_answer_with_its_calls_and_their_outputs_goes_back():
    items = [
        {"role": "user", "content": "weather?"},
        {"type": "reasoning", "summary": []},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look"}, {"type": "output_text", "text": " it up"}],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "wet"}]},
    ]
    user, assistant, first, second = _parsed(input=items, tools=[TOOL]).call.messages
    assert (user.role, assistant.content) == ("user", "I look it up")
    assert [call.id for call in assistant.tool_calls] == ["c1", "c2"]
    assert (first.role, first.content, first.tool_call_id) == ("tool", "sunny", "c1")
    assert second.content == "wet"


def test_a_calls_output_may_have_pictures_that_keep_their_names():
    output = [{"type": "input_text", "text": "shot"}, {"type": "input_image", "image_url": PICTURE}]
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": output},
    ]
    request = _parsed(input=items)
    turn = request.call.messages[2]
    assert (turn.role, turn.tool_call_id, turn.content[0]) == ("tool", "c1", TextPart("shot"))
    for named, field in (
        (turn.content[1].param, "input[2].output[1].image_url"),
        ("messages[2].content", "input[2].output"),
    ):
        error = InvalidRequest(f"{named}: broken", param=named)
        assert request.names.translated(error).param == field


def test_tools_and_forms_are_those_of_the_chat_api():
    request = _parsed(input="x", tools=[TOOL], tool_choice={"type": "function", "name": "f"})
    assert request.options.tools.form is CallForm.JSON
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    found = _parsed(input="x", text=form).call.sampling.output_format
    assert found is not None and json.loads(found.text) == schema
    assert (
        _parsed(input="x", text={"format": {"type": "text"}, "verbosity": "low"}).call.sampling.output_format
        is None
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [], "instructions": "x"}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": []}]}]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,x"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        (
            {
                "instructions": "x",
                "input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}],
            },
            "input[0].tool_calls[0].function.arguments",
        ),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "max_tokens": 5}, "max_tokens"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "conversation": {"id": "c"}}, "conversation"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "text": {"format": 5}}, "text.format"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
    ],
)
def test_what_is_not_served_is_refused_by_the_clients_name_for_it(body: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as refused:
        _parsed(**body)
    assert refused.value.param == param
    assert "messages" not in refused.value.message
    assert "max_completion_tokens" not in refused.value.message
