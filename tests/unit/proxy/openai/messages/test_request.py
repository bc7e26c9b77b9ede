from __future__ import annotations

import json
from typing import Any

import pytest

from triptych.base.errors import InvalidRequest
from triptych.base.request import TextPart
from triptych.proxy.call.tools import CallForm
from triptych.proxy.media.source import ImagePart
from triptych.proxy.openai.messages.request import MessagesRequest, parse_count_tokens, parse_messages

PIXEL = "iVBORw0KGgo="
BASE64 = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
URL = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
TOOL = {"name": "f", "description": "looks", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def result(content: Any, call: str = "c1") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": content}


def parsed(*messages: Any, **body: Any) -> MessagesRequest:
    body = {"messages": messages or [{"role": "user", "content": "x"}], "max_tokens": 5, **body}
    return parse_messages(json.dumps(body).encode(), "r1", max_images=4, timeout=9.0)


def refused(*messages: Any, **body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        parsed(*messages, **body)
    assert error.value.param and error.value.param in error.value.message
    return error.value


def test_system_texts_and_pictures_become_messages():
    call = parsed(
        user(text("see"), BASE64, URL),
        system=[text("be short"), text("be kind")],
        stop_sequences=["END"],
        temperature=0.5,
        top_k=3,
    ).call
    system, asked = call.messages
    assert (system.role, system.content) == ("system", "be short\n\nbe kind")
    assert asked.content[0] == TextPart("see")
    assert [type(part) for part in asked.content[1:]] == [ImagePart, ImagePart]
    sampling = call.sampling
    assert (sampling.max_tokens, sampling.stop, sampling.temperature, sampling.top_k) == (5, ("END",), 0.5, 3)


def test_calls_and_their_results_are_messages_in_order():
    turns = parsed(
        {"role": "user", "content": "weather?"},
        assistant({"type": "thinking", "thinking": "hm", "signature": "s"}, text("I look"), USE),
        user(result("sunny"), text("and now?")),
    ).call.messages
    assert [turn.role for turn in turns] == ["user", "assistant", "tool", "user"]
    assert (turns[1].content, turns[1].reasoning) == ("I look", "hm")
    assert [(call.id, call.function.arguments) for call in turns[1].tool_calls] == [("c1", {"a": 1})]
    assert (turns[2].content, turns[2].tool_call_id, turns[3].content) == ("sunny", "c1", "and now?")


def test_a_result_may_have_pictures():
    turn = parsed(user(text("x")), assistant(USE), user(result([text("shot"), URL]))).call.messages[2]
    assert turn.role == "tool"
    assert [type(part) for part in turn.content] == [TextPart, ImagePart]


def test_an_error_about_a_result_names_it():
    request = parsed(user(text("x")), assistant(USE), user(result([text("shot"), URL])))
    error = InvalidRequest("messages[2].content: no images", param="messages[2].content")
    assert request.names.translated(error).param == "messages[2].content[0].content"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([user(text("a")), user(result("x"))], "messages[1].content[0].tool_use_id"),
        (
            [user(text("a")), assistant(USE), user(text("b"), result("x", "c2"))],
            "messages[2].content[1].tool_use_id",
        ),
        ([user()], "messages[0].content"),
        ([user({"type": "document"})], "messages[0].content[0].type"),
        ([user(text("a"), {"type": "text"})], "messages[0].content[1].text"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([user(USE)], "messages[0].tool_calls"),
        (
            [
                user(text("a")),
                assistant(USE),
                user(result([text("b"), {**URL, "source": {"type": "url", "url": "x:"}}])),
            ],
            "messages[2].content[0].content[1].source.url",
        ),
        (
            [user(text("a"), {**BASE64, "source": {**BASE64["source"], "media_type": "text/plain"}})],
            "messages[0].content[1].source.media_type",
        ),
        (
            [user({**BASE64, "source": {"type": "file", "file_id": "f"}})],
            "messages[0].content[0].source.type",
        ),
    ],
)
def test_what_is_wrong_is_named_by_the_clients_field(messages, param):
    assert refused(*messages, system="s").param == param


def test_an_input_that_is_nested_too_deeply_is_named():
    deep: Any = {}
    for _ in range(100):
        deep = {"a": deep}
    assert refused(user(text("a")), assistant({**USE, "input": deep})).param == "messages[1].content[0].input"


def test_tools_and_choices_are_those_of_the_chat_api():
    options = parsed(tools=[TOOL]).options.tools
    assert options.form is CallForm.TAGGED
    [tool] = json.loads(options.tools)
    assert tool["function"] == {"name": "f", "description": "looks", "parameters": {"type": "object"}}
    [strict] = json.loads(parsed(tools=[TOOL | {"strict": True}]).options.tools.tools)
    assert strict["function"] == {**tool["function"], "strict": True}
    forced = parsed(tools=[TOOL], tool_choice={"type": "tool", "name": "f"}).options.tools
    assert (forced.form, forced.parallel) == (CallForm.JSON, True)
    one = parsed(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert one.options.tools.parallel is False
    assert parsed(tools=[TOOL], tool_choice={"type": "none"}).options.tools.form is CallForm.NONE
    assert parsed(tools=[TOOL], tool_choice={"type": "any"}).options.tools.form is CallForm.JSON


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_field_out_of_its_values_is_named(body, param):
    assert refused(**body).param == param


def test_thinking_and_effort_are_variables_of_the_template():
    def variables(**body: Any) -> dict[str, Any]:
        return json.loads(parsed(**body).call.template.variables or b"{}")

    assert variables() == {}
    assert variables(thinking={"type": "enabled", "budget_tokens": 9}) == {
        "enable_thinking": True,
        "thinking": True,
    }
    off = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    assert variables(thinking={"type": "disabled"}) == off
    assert variables(output_config={"effort": "high"})["reasoning_effort"] == "high"
    assert parsed(thinking={"type": "enabled", "budget_tokens": 9}).call.sampling.thinking_token_budget == 9


def test_a_schema_is_the_answers_form():
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert parsed(output_config={"format": form}).call.sampling.output_format.kind == "json_schema"


def test_the_begin_of_an_answer_is_gone_on_with():
    assert parsed(user(text("a")), assistant(text("It is"))).call.template.continue_final_message is True
    assert parsed(user(text("a"))).call.template.continue_final_message is False


def test_counting_needs_no_max_tokens():
    raw = json.dumps({"messages": [user(text("a"))], "system": "s"}).encode()
    assert [turn.role for turn in parse_count_tokens(raw, "r1", max_images=1).call.messages] == [
        "system",
        "user",
    ]
