"""What one call's client gets over gRPC: text, calls that are whole, and the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from triptych.base.delta import Delta
from triptych.base.types import FinishReason, Usage
from triptych.protos import proxy_pb2
from triptych.protos.pd_pb2 import Admitted
from triptych.proxy.call.chat import Done, Timings
from triptych.proxy.call.tool_formats import FORMATS
from triptych.proxy.call.tools import CallForm, ToolUse
from triptych.proxy.grpc.server import _Events

#: One call as each format has it, with a text behind it where the format takes one.
CALLS = {
    "hermes": '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>',
    "qwen3_coder": "<tool_call><function=look><parameter=at>1</parameter></function></tool_call>",
    "glm45": "<tool_call>look<arg_key>at</arg_key><arg_value>1</arg_value></tool_call>",
    "gemma4": "<|tool_call>call:look{at:1}<tool_call|>",
    "mistral": '[TOOL_CALLS]look{"at": 1}',
    "llama3_json": '{"name": "look", "parameters": {"at": 1}}',
    "pythonic": "[look(at=1)]",
    "lfm2": "<|tool_call_start|>[look(at=1)]<|tool_call_end|>",
    "ernie45": '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    '{"at": 1}<|tool_call_end|><|tool_calls_section_end|>',
    "cohere_command3": '<|START_ACTION|>[{"tool_name": "look", "parameters": {"at": 1}}]<|END_ACTION|>',
    "nemotron_json": '<TOOLCALL>[{"name": "look", "arguments": {"at": 1}}]</TOOLCALL>',
    "hunyuan_a13b": '<tool_calls>[{"name": "look", "arguments": {"at": 1}}]</tool_calls>',
    "hy_v3": "<tool_calls><tool_call>look<tool_sep><arg_key>at</arg_key><arg_value>1</arg_value></tool_call>"
    "</tool_calls>",
    "minimax_m2": '<minimax:tool_call><invoke name="look"><parameter name="at">1</parameter></invoke>'
    "</minimax:tool_call>",
    "minimax_m3": ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="look">]<]minimax[>[<at>1'
    "]<]minimax[>[</at>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
    "step3": "<\uff5ctool_calls_begin\uff5c><\uff5ctool_call_begin\uff5c>function<\uff5ctool_sep\uff5c>"
    '<steptml:invoke name="look"><steptml:parameter name="at">1</steptml:parameter></steptml:invoke>'
    "<\uff5ctool_call_end\uff5c><\uff5ctool_calls_end\uff5c>",
}
BEHIND = " Now, what do I see? A lake, and a boat."


def events_of(
    tool_format: str, texts: Iterable[str], form: CallForm = CallForm.TAGGED
) -> list[proxy_pb2.ChatEvent]:
    """All events of an output that comes in these pieces."""
    events = _Events(False, ToolUse(form=form), 1)
    outputs = [
        Admitted(prompt_token_ids=(1,), tool_format=tool_format),
        *(Delta(text, (5,)) for text in texts),
    ]
    found = [events.of(output) for output in (*outputs, Done(FinishReason.STOP, Usage(1, 1), Timings()))]
    return [event for event in found if event is not None]


def calls_of(events: Sequence[proxy_pb2.ChatEvent]) -> list[tuple[int, str, str]]:
    return [(call.index, call.name, call.arguments) for event in events for call in event.tool_calls]


def test_every_format_has_a_call_here() -> None:
    assert CALLS.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_call_before_text_is_sent_once(name: str, size: int) -> None:
    text = CALLS[name] + BEHIND
    events = events_of(name, [text[at : at + size] for at in range(0, len(text), size)])
    assert calls_of(events) == [(0, "look", '{"at": 1}')]
    assert "".join(event.text for event in events).strip() == BEHIND.strip()
    assert events[-1].finish.reason == "tool_calls"


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if not form.first])
def test_calls_between_texts_are_sent_once_each_in_order(name: str) -> None:
    texts = ["I look. ", CALLS[name], " And ", "again: ", CALLS[name], " Done", "."]
    events = events_of(name, texts)
    assert calls_of(events) == [(0, "look", '{"at": 1}'), (1, "look", '{"at": 1}')]
    text = "".join(event.text for event in events)
    assert text == "I look.And again:Done.", "white space around calls is theirs"


def test_what_a_model_has_begun_and_not_ended_as_a_call_is_text_at_the_end() -> None:
    events = events_of("hermes", ["I ", "<tool_cal"])
    assert "".join(event.text for event in events) == "I <tool_cal"
    assert calls_of(events) == [] and events[-1].finish.reason == "stop"
