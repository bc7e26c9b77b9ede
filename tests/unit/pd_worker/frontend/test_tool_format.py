"""A checkpoint's tool format: found in its template, with its tokens and the ids that templates need."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from triptych.base.errors import ConfigError
from triptych.base.request import FunctionCall, Message, MessageToolCall
from triptych.pd_worker.frontend import reasoning, tool_format
from triptych.pd_worker.frontend.reasoning import find_reasoning
from triptych.pd_worker.frontend.tokenization import MarkerDecoder
from triptych.pd_worker.frontend.tool_format import find_tool_format, output_markers, with_native_ids
from triptych.proxy.call.tool_formats import FORMATS

TAUGHT = {
    "hermes": "return a json object within <tool_call></tool_call> XML tags, answers in <tool_response>",
    "qwen3_coder": "<tool_call>\\n<function=example_function_name>\\n<parameter=a>",
    "glm45": "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>",
    "mistral": "{{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' }}",
    "llama3_json": """{{- '{"name": "' + tool_call.name + '", "parameters": ' }}""",
    "pythonic": "[func_name1(params_name1=params_value1)]",
    "gemma4": "{{ '<|tool_call>call:' + function['name'] }}",
    "kimi_k2": "<|tool_calls_section_begin|>{% for c in calls %}<|tool_call_begin|>{{ c['id'] }}",
    "minimax_m2": "{%- set begin = '<minimax:tool_call>' %}<response>{{ m.content }}</response>",
    "minimax_m3": "{%- set mark = ']<]minimax[>[' %}{{ mark ~ '<tool_call>' }}",
    "step3": "<\uff5ctool_calls_begin\uff5c>function<steptml:invoke name=",
    "lfm2": "{%- set system = system + 'List of tools: [' %}",
    "cohere_command3": "<|START_ACTION|>[{% for c in calls %}<|START_RESPONSE|>",
    "nemotron_json": "{{- '<TOOLCALL>[' -}}",
    "ernie45": "<response>\\n{{ m.content }}\\n</response>{% if m.tool_calls %}<tool_call>",
    "hunyuan_a13b": "<tool_calls>[{{ c | tojson }}]</tool_calls>",
    "hy_v3": "{{ '<tool_call{}>'.format(mark) }}{{ '<tool_sep{}>'.format(mark) }}<arg_key>",
}


@pytest.mark.parametrize(("name", "template"), TAUGHT.items())
def test_a_template_teaches_its_format(name, template):
    assert find_tool_format("auto", template) == name
    assert find_tool_format(name, "") == name


def test_the_proxy_knows_every_format_by_the_same_name():
    assert tool_format._FORMATS.keys() == FORMATS.keys() == TAUGHT.keys()


def test_other_names_of_vllms_parsers_mean_the_same_format():
    assert find_tool_format("step3p5", "") == find_tool_format("qwen3_xml", "") == "qwen3_coder"
    assert set(tool_format._ALIASES.values()) <= FORMATS.keys()
    assert set(reasoning._ALIASES.values()) <= reasoning.PARSERS.keys()


def test_a_template_without_tools_teaches_none():
    assert find_tool_format("auto", "{{ messages }}") == ""


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="hermes"):
        find_tool_format("xml", "")


#: Of each format: tokens that stay in the text, and those that are left out.
TOKENS = {
    "gemma4": (["<|tool_call>", "<tool_call|>", '<|"|>'], []),
    "qwen3_coder": (["<tool_call>", "</tool_call>"], []),
    "glm45": (["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"], []),
    "mistral": (["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"], []),
    "llama3_json": (["<|python_tag|>"], []),
    "kimi_k2": (["<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"], []),
    "minimax_m2": (["<minimax:tool_call>", "</minimax:tool_call>"], []),
    "minimax_m3": (["]<]minimax[>[", "<tool_call>"], []),
    "step3": (["<\uff5ctool_calls_begin\uff5c>", "<\uff5ctool_sep\uff5c>"], []),
    "lfm2": (["<|tool_call_start|>", "<|tool_call_end|>"], []),
    "cohere_command3": (["<|START_ACTION|>", "<|END_ACTION|>"], ["<|START_RESPONSE|>", "<|END_TEXT|>"]),
    "nemotron_json": (["<TOOLCALL>", "</TOOLCALL>"], []),
    "ernie45": (["<tool_call>"], ["<response>", "</response>"]),
    "hunyuan_a13b": (["<tool_calls>"], []),
    "hy_v3": (["<tool_calls:opensource>", "<tool_sep:opensource>", "</arg_value:opensource>"], []),
}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("name", "tokens"), TOKENS.items())
def test_tokens_of_calls_stay_in_the_text_and_those_around_an_answer_do_not(name, tokens, special):
    marks, around = tokens
    tokenizer = Tokenizer(BPE({"x": 0}, []))
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<tools>", special=True)])
    tokenizer.add_tokens([AddedToken(token, special=special) for token in (*marks, *around)])
    kept, dropped = output_markers(name, None, tokenizer)
    assert kept == ({tokenizer.token_to_id(mark) for mark in marks} if special else set())
    assert dropped == {tokenizer.token_to_id(token) for token in around}
    written = [*around[:1], "x", *marks, "<|end|>", "x", *around[1:], "<tools>"]
    ids = [tokenizer.token_to_id(token) for token in written]
    text = MarkerDecoder(tokenizer, kept, dropped).decode(ids)
    assert "".join(text.split()) == "".join(["x", *marks, "x"])


def test_without_a_format_no_token_is_left_out():
    tokenizer = Tokenizer(BPE({"x": 0}, []))
    tokenizer.add_tokens(["<response>", "<tool_call>"])
    assert output_markers("", None, tokenizer) == (frozenset(), frozenset())


@pytest.mark.parametrize("name", ["minimax_m3", "cohere_command3"])
def test_a_template_with_the_familys_markers_reasons(name):
    markers = reasoning.PARSERS[name]
    tokenizer = Tokenizer(BPE({"x": 0}, []))
    tokenizer.add_tokens([markers.start, markers.end, "<think>", "</think>"])
    found = find_reasoning("auto", f"{{{{ m }}}}{markers.start}{markers.end}", tokenizer)
    assert found is not None and found.markers == markers


def call(name: str, id: str) -> MessageToolCall:
    return MessageToolCall(FunctionCall(name, "{}"), id=id)


TURNS = [
    Message("user", "hi"),
    Message("assistant", tool_calls=[call("look", "call_a"), call("now", "abcdefghi")]),
    Message("tool", "b", tool_call_id="abcdefghi"),
    Message("tool", "a", tool_call_id="call_a"),
    Message("assistant", tool_calls=[call("look", "call_a")]),
    Message("tool", "c", tool_call_id="call_a"),
    Message("tool", "d", tool_call_id="unknown"),
]


@pytest.mark.parametrize(
    ("name", "ids", "answered"),
    [
        (
            "kimi_k2",
            ["functions.look:0", "functions.now:1", "functions.look:2"],
            ["functions.now:1", "functions.look:0", "functions.look:2", "unknown"],
        ),
        (
            "mistral",
            ["000000000", "abcdefghi", "000000002"],
            ["abcdefghi", "000000000", "000000002", "unknown"],
        ),
        ("hermes", ["call_a", "abcdefghi", "call_a"], ["abcdefghi", "call_a", "call_a", "unknown"]),
    ],
)
def test_calls_and_their_answers_have_the_ids_that_the_familys_template_needs(name, ids, answered):
    messages = with_native_ids(name, TURNS)
    assert [call.id for message in messages for call in message.tool_calls or ()] == ids
    assert [message.tool_call_id for message in messages if message.role == "tool"] == answered
    assert [message.content for message in messages] == [message.content for message in TURNS]
