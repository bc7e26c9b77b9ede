"""A text that no PD worker takes is refused by its length, and one that may fit never is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from triptych.base.errors import ContextTooLong
from triptych.base.request import MAX_CHARS_PER_TOKEN, FunctionCall, MessageToolCall, TextPart
from triptych.base.types import SamplingParams
from triptych.proxy.call.chat import ChatCall, ChatMessage
from triptych.proxy.call.prompt_length import check_prompt_length
from triptych.proxy.call.validation import name_prompt

LONGEST = 100 * MAX_CHARS_PER_TOKEN
FIRST = ChatCall("r", "m", (), SamplingParams(), 10.0)


def refused(call: ChatCall, limits: Sequence[int] = (50, 100)) -> str | None:
    """The field that the refusal names."""
    try:
        check_prompt_length(call, limits)
    except ContextTooLong as error:
        assert "100 tokens" in error.message and error.param in error.message
        return error.param
    return None


def chat(*messages: ChatMessage) -> ChatCall:
    return replace(FIRST, messages=messages)


@pytest.mark.parametrize("characters", [LONGEST, LONGEST + 1])
def test_the_longest_limit_of_the_workers_decides_to_the_character(characters: int) -> None:
    named = "messages" if characters > LONGEST else None
    parts = (TextPart("x" * 10), TextPart("x" * (characters - 20)))
    assert refused(chat(ChatMessage("user", "x" * characters))) == named
    assert refused(chat(ChatMessage("system", "x" * 10), ChatMessage("user", parts))) == named
    prompt = replace(FIRST, prompt="x" * characters, prompt_param="inputs[3]")
    assert refused(prompt) == ("inputs[3]" if named else None)
    document = replace(chat(ChatMessage("user", "x" * characters)), prompt_param="documents[3]")
    assert refused(document) == ("documents[3]" if named else None)


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_a_workers_complaint_about_the_text_is_in_the_name_of_the_clients_field(field: str) -> None:
    error = ContextTooLong(f"{field}: too long", param=field)
    assert name_prompt(error, "documents[3]").param == "documents[3]"
    assert name_prompt(error, "prompt") is error
    assert name_prompt(error, field) is error


@pytest.mark.parametrize(
    "answer",
    [
        ChatMessage("assistant", "x", reasoning="x" * (LONGEST + 1)),
        ChatMessage("assistant", f"<think>{'x' * LONGEST}</think>x"),
        ChatMessage("assistant", (TextPart("x" * (LONGEST + 1)),)),
        ChatMessage("assistant", "", tool_calls=(MessageToolCall(FunctionCall("f", "x" * (LONGEST + 1))),)),
        ChatMessage("assistant", "", tool_calls=(MessageToolCall(FunctionCall("f", {"a": "x" * LONGEST})),)),
    ],
    ids=["reasoning", "thoughts in the content", "in parts", "arguments as a text", "arguments"],
)
def test_what_a_template_may_leave_out_does_not_count(answer: ChatMessage) -> None:
    assert refused(chat(answer, ChatMessage("user", "x" * LONGEST))) is None
    assert refused(chat(answer, ChatMessage("user", "x" * (LONGEST + 1)))) == "messages"
    assert refused(chat(answer, ChatMessage("tool", "x" * (LONGEST + 1)))) == "messages"


@pytest.mark.parametrize("limits", [(), (0,), (100, 0)])
def test_where_a_worker_names_no_limit_its_own_refusal_counts(limits: Sequence[int]) -> None:
    assert refused(chat(ChatMessage("user", "x" * (LONGEST + 1))), limits) is None
