"""A text that no PD worker takes is refused by its length, and one that may fit never is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from support.hostile.operations import operations
from triptych.base.errors import ContextTooLong
from triptych.base.request import MAX_CHARS_PER_TOKEN, FunctionCall, MessageToolCall, TextPart
from triptych.base.types import SamplingParams
from triptych.proxy.call.chat import ChatCall, ChatMessage
from triptych.proxy.call.prompt_length import check_prompt_length

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


def called(arguments: str | dict[str, object]) -> ChatMessage:
    return ChatMessage("assistant", "", tool_calls=(MessageToolCall(FunctionCall("f", arguments)),))


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("as_text", [False, True])
def test_the_arguments_of_earlier_tool_calls_count(calls: int, as_text: bool) -> None:
    value = "x" * (LONGEST // calls)
    arguments: str | dict[str, object] = f'{{"a":"{value}"}}' if as_text else {"a": value}
    assert refused(chat(*[called(arguments)] * calls)) == "messages"
    shorter = "x" * (LONGEST // calls - 20)
    arguments = f'{{"a":"{shorter}"}}' if as_text else {"a": shorter}
    assert refused(chat(*[called(arguments)] * calls)) is None


@pytest.mark.parametrize("arguments", [{"a": '"' * 1000}, {"a": "\x01" * 1000}, {"a": "é" * 1000}])
def test_arguments_count_no_more_than_the_shortest_way_to_write_them(arguments: dict[str, object]) -> None:
    spaced = json.dumps(arguments, indent=400)
    for written in (arguments, spaced, json.dumps(arguments)):
        assert FunctionCall("", written).characters <= 1000 + len('{"a":""}')


def test_counting_a_call_visits_no_value_of_it() -> None:
    short, long = (FunctionCall("f", {"a": list(range(values))}) for values in (1000, 2000))
    assert operations(lambda: long.characters) == operations(lambda: short.characters)


def test_what_a_template_may_leave_out_does_not_count() -> None:
    thought = ChatMessage("assistant", "x", reasoning="x" * (LONGEST + 1))
    assert refused(chat(thought, ChatMessage("user", "x"))) is None


@pytest.mark.parametrize("limits", [(), (0,), (100, 0)])
def test_where_a_worker_names_no_limit_its_own_refusal_counts(limits: Sequence[int]) -> None:
    assert refused(chat(ChatMessage("user", "x" * (LONGEST + 1))), limits) is None
