"""Tool calls in the forms of all model families, however the text is cut into pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.tool_calls import joined
from triptych.proxy.call.tool_formats import FORMATS, Piece, make_parser
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


#: What cuts, nests and breaks calls.
BITS = [*'<[{ \nx"\\}]),:1', "\\u00e9", "true", "<tool_call>", '{"name": "f", "arguments": {"a":']


def parsed(name: str, *texts: str, parallel: bool = True) -> list[object]:
    """What comes of the pieces: neighbouring content joined, calls as a name and arguments."""
    return joined(pieces_of(name, *texts, parallel=parallel))


def pieces_of(name: str, *texts: str, parallel: bool = True) -> list[Piece]:
    parser = make_parser(CallForm.TAGGED, parallel=parallel, tool_format=name, schemas=SCHEMAS)
    return [*(piece for text in texts for piece in parser.feed(text)), *parser.finish()]


def loaded(parts: list[object]) -> list[object]:
    return [(part[0], json.loads(part[1])) if isinstance(part, tuple) else part for part in parts]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_and_content_come_in_order(name, text, expected):
    assert loaded(parsed(name, text)) == expected
    assert parsed(name, *text) == parsed(name, text), "letter by letter"


def test_every_format_has_its_cases():
    assert {name for name, _, _ in CASES} == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=80)
@given(
    st.lists(st.sampled_from([*(text for _, text, _ in CASES), *BITS])),
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


HEAD = '{"name": "look", "arguments": '
#: Format, pieces of an output, and what comes of each; at last, what its end brings.
STEPS = [
    (
        "hermes",
        [
            ("<tool_call>" + HEAD, []),
            ('{"at": "s', ["look", '{"at": "s']),
            ("k\\", ["k"]),
            ('ny", "times": 1', ['\\ny", "times": ']),
            ("2}}", ["12}"]),
            ("</tool_call>", []),
        ],
    ),
    (
        "llama3_json",
        [
            ('{"parameters": {"at": 1}, ', []),
            ('"name": "look"}', ["look", '{"at": 1}']),
            ('; {"name": "now"', []),
            ("}", ["now", "{}"]),
        ],
    ),
    ("mistral", [("[TOOL_CALLS]look", []), ('[ARGS]{"at"', ["look", '{"at"']), (": 1}", [": 1}"])]),
    (
        "qwen3_coder",
        [
            ("<tool_call>\n<function=look", []),
            (">\n<parameter=at>\n1", ["look"]),
            ("2\n</parameter>\n<parameter=times>\n3\n", ['{"at": "12"']),
            ("</parameter>\n</function>", [', "times": 3}']),
        ],
    ),
    (
        "glm45",
        [
            ("<tool_call>look\n<arg_key>at</arg_key>", ["look"]),
            ("<arg_value>12</arg_value>", ['{"at": "12"']),
            ("</tool_call>", ["}"]),
        ],
    ),
    (
        "gemma4",
        [
            ("<|tool_call>call:look{at:[1", ["look"]),
            ("],times:3", ['{"at": [1]']),
            ("}", [', "times": 3}']),
        ],
    ),
    (
        "pythonic",
        [
            ("[look(at='a', ", ["look", '{"at": "a"']),
            ("times=3", []),
            (")", [', "times": 3}']),
            ("]", []),
        ],
    ),
]


@pytest.mark.parametrize(("name", "steps"), STEPS)
def test_arguments_come_as_soon_as_they_are_certain(name, steps):
    parser = make_parser(CallForm.TAGGED, parallel=True, tool_format=name, schemas=SCHEMAS)
    for text, expected in steps:
        assert [getattr(piece, "name", None) or piece.text for piece in parser.feed(text)] == expected, text
    assert parser.finish() == []


#: Calls that end too early, or go on as none, and what of them has been read by then.
BROKEN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1', [("f", '{"a": [1')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> x', [("f", '{"a": 1}'), "x"]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": no}}</tool_call>',
        [("f", '{"a": '), "no}}</tool_call>"],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b\nc"}}', [("f", '{"a": "b\\nc"}')]),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter><parameter=b>2", [("f", '{"a": 1')]),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter>", [("f", '{"a": 1}')]),
    ("glm45", "<tool_call>f", ["<tool_call>f"]),
    (
        "glm45",
        "<tool_call>f<arg_key>a</arg_key>1</tool_call>",
        [("f", ""), "a</arg_key>1</tool_call>"],
    ),
    ("gemma4", "<|tool_call>call:f{a:1,b:no}", [("f", '{"a": 1'), ",b:no}"]),
    ("mistral", '[TOOL_CALLS][{"name": "f"}, {"x": 1}]', [("f", "{}"), ', {"x": 1}]']),
    ("pythonic", "[f(a=1, b=g())]", [("f", '{"a": 1'), ", b=g())]"]),
    ("pythonic", "[f(a='x", ["[f(a='x"]),
    ("pythonic", "[f(a='\\ud83d')]", ["[f(a='\\ud83d')]"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\u00', [("f", '{"a": "\\u00')]),
    ("hermes", '<tool_call>{"name": "f\\u00', ['<tool_call>{"name": "f\\u00']),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\u00x"}}', [("f", '{"a": "'), '\\u00x"}}']),
    ("gemma4", '<|tool_call>call:f{a:"\\u00', [("f", "")]),
]


@pytest.mark.parametrize(("name", "text", "expected"), BROKEN)
def test_a_call_that_breaks_off_keeps_what_was_read_of_it(name, text, expected):
    assert parsed(name, text) == expected == parsed(name, *text)


def test_deep_arguments_end_a_call_and_not_the_parser():
    text = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100_000
    (call, rest) = parsed("hermes", text)
    assert call[0] == "f" and rest.startswith("[") and len(call[1] + rest) == 100_000 + len('{"a": ')


LONG = "line\n" * 20_000
#: One call each, and what stands between several.
LONG_CALLS = {
    "hermes": ('<tool_call>{"name": "f", "arguments": {"a": "VALUE"}}</tool_call>', ""),
    "qwen3_coder": ("<tool_call><function=f><parameter=a>VALUE.</parameter></function></tool_call>", ""),
    "glm45": ("<tool_call>f<arg_key>a</arg_key><arg_value>VALUE</arg_value></tool_call>", ""),
    "gemma4": ('<|tool_call>call:f{a:<|"|>VALUE<|"|>}<tool_call|>', ""),
    "mistral": ('[TOOL_CALLS]f[ARGS]{"a": "VALUE"}', ""),
    "llama3_json": ('{"name": "f", "parameters": {"a": "VALUE"}}', ";"),
}


@pytest.mark.parametrize("name", LONG_CALLS)
def test_a_call_of_100_000_characters_and_1000_calls_are_read_in_pieces(name):
    call, between = LONG_CALLS[name]
    long_call = call.replace("VALUE", LONG)
    pieces = [long_call[at : at + 7] for at in range(0, len(long_call), 7)]
    [(_, arguments)] = parsed(name, *pieces)
    assert json.loads(arguments)["a"].removesuffix(".") == LONG
    several = between.join([call.replace("VALUE", "x")] * 1000)
    assert [part[0] for part in parsed(name, several)] == ["f"] * 1000
