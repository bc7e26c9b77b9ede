"""Tool calls in the forms of all model families, however the text is cut into pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.proxy.call.tool_formats import FORMATS, CallText
from triptych.proxy.call.tool_parsers import Piece, make_parser
from triptych.proxy.call.tools import CallForm

SCHEMAS = {
    "look": {"properties": {"at": {"type": "string"}, "times": {"type": "integer"}, "deep": {}}},
    "now": {},
}
LOOK = ("look", {"at": "12", "times": 3, "deep": {"a": [1, None, "é"]}})
NOW = ("now", {})
CODER = """<tool_call>
<function=look>
<parameter=at>
12
</parameter>
<parameter=times>
3
</parameter>
<parameter=deep>
{"a": [1, null, "é"]}
</parameter>
</function>
</tool_call>"""
GLM = """<tool_call>look
<arg_key>at</arg_key>
<arg_value>12</arg_value>
<arg_key>times</arg_key>
<arg_value>3</arg_value>
<arg_key>deep</arg_key>
<arg_value>{"a": [1, null, "é"]}</arg_value>
</tool_call>"""
GEMMA = '<|tool_call>call:look{at:<|"|>12<|"|>,times:3,deep:{a:[1,null,<|"|>é<|"|>]}}<tool_call|>'
ARGUMENTS = '{"at": "12", "times": 3, "deep": {"a": [1, null, "é"]}}'
HERMES = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
#: Format, output, and what comes of it.
CASES = [
    ("hermes", f"I look.\n{HERMES}", ["I look.", LOOK]),
    ("qwen3_coder", f"I look.\n{CODER}\n{CODER}", ["I look.", LOOK, LOOK]),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", [NOW]),
    ("qwen3_coder", "<tool_call>\n{}\n</tool_call>", ["<tool_call>\n{}\n</tool_call>"]),
    ("glm45", f"I look.\n{GLM}", ["I look.", LOOK]),
    ("glm45", "<tool_call>now\n</tool_call>", [NOW]),
    ("glm45", "<tool_call>not a name</tool_call>", ["<tool_call>not a name</tool_call>"]),
    ("gemma4", f"I look.{GEMMA}{GEMMA}", ["I look.", LOOK, LOOK]),
    ("gemma4", "<|tool_call>call:now{}<tool_call|>", [NOW]),
    (
        "gemma4",
        '<|tool_call>call:look{at:<|"|>a: {"b"}, <x><|"|>}<tool_call|>',
        [("look", {"at": 'a: {"b"}, <x>'})],
    ),
    ("gemma4", "<|tool_call>look{}<tool_call|>", ["<|tool_call>look{}<tool_call|>"]),
    ("mistral", f"I look. [TOOL_CALLS]look[ARGS]{ARGUMENTS}", ["I look.", LOOK]),
    ("mistral", f"[TOOL_CALLS]look{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}", [LOOK, NOW]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "look", "arguments": {ARGUMENTS}}}]', [LOOK]),
    ("mistral", "[TOOL_CALLS]look", ["[TOOL_CALLS]look"]),
    ("mistral", "a [TOOL] b", ["a [TOOL] b"]),
    ("llama3_json", f'{{"name": "look", "parameters": {ARGUMENTS}}}', [LOOK]),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "now"}}; {{"name": "look", "parameters": {ARGUMENTS}}}',
        [NOW, LOOK],
    ),
    ("llama3_json", '{"colour": "red"}', ['{"colour": "red"}']),
    ("llama3_json", 'It is {"name": "now"}.', ['It is {"name": "now"}.']),
    ("pythonic", "[look(at='12', times=3, deep={'a': [1, None, 'é']}), now()]", [LOOK, NOW]),
    ("pythonic", "[look(at=open('x'))]", ["[look(at=open('x'))]"]),
    ("pythonic", "[1, 2]", ["[1, 2]"]),
    ("pythonic", "[look(1)]", ["[look(1)]"]),
    ("pythonic", "[f(a=1e999)]", ["[f(a=1e999)]"]),
    ("pythonic", "[" * 4000, ["[" * 4000]),
]


def parsed(name: str, *texts: str, parallel: bool = True) -> list[object]:
    """What comes of the pieces: neighbouring content joined, calls as a name and arguments."""
    parser = make_parser(CallForm.TAGGED, parallel=parallel, tool_format=name, schemas=SCHEMAS)
    pieces: list[Piece] = [*(piece for text in texts for piece in parser.feed(text)), *parser.finish()]
    joined: list[object] = []
    for piece in pieces:
        if isinstance(piece, CallText):
            joined.append((piece.name, json.loads(piece.arguments)))
        elif joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_and_content_come_in_order(name, text, expected):
    assert parsed(name, text) == expected
    assert parsed(name, *text) == expected, "letter by letter"


def test_every_format_has_its_cases():
    assert {name for name, _, _ in CASES} == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=80)
@given(
    st.lists(
        st.sampled_from([*(text for _, text, _ in CASES), "<", "[", "{", " ", "\n", "x", '"', "\\", "}"])
    ),
    st.data(),
)
def test_no_output_fails_and_the_cuts_change_nothing(name, texts, data):
    text = "".join(texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(name, *pieces) == parsed(name, text)


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_is_the_limit_where_calls_are_not_parallel(name):
    for format_name, text, expected in CASES:
        if format_name == name and len([call for call in expected if isinstance(call, tuple)]) > 1:
            calls = [call for call in parsed(name, text, parallel=False) if isinstance(call, tuple)]
            assert len(calls) == 1
