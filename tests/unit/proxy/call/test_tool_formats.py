"""Tool calls in the forms of all model families, however the text is cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.pd_worker.frontend.chat_template import ChatTemplate, find_tool_format
from triptych.proxy.call.call_text import CallArguments, CallStart
from triptych.proxy.call.tool_formats import FORMATS, MAX_BLANKS, Piece, make_parser
from triptych.proxy.call.tools import CallForm


def joined(pieces: Iterable[Piece]) -> list[object]:
    """Neighbouring content and a call's arguments are each one string."""
    parts: list[object] = []
    for piece in pieces:
        last = parts[-1] if parts else None
        if isinstance(piece, CallStart):
            parts.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            assert isinstance(last, tuple), "arguments follow their call's start"
            parts[-1] = (last[0], last[1] + piece.text)
        elif isinstance(last, str):
            parts[-1] = last + piece
        else:
            parts.append(piece)
    return parts


SCHEMAS = {
    "look": {
        "properties": {name: {"type": "string"} for name in ("at", "town", "code", "text", "a")}
        | {"times": {"type": "integer"}, "deep": {}}
    },
    "now": {},
}
#: How each family's template writes one call, of `f.name` and `f.arguments`; and what stands between calls.
SHAPES = {
    "hermes": (
        '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>',
        "\n",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
        "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
        "\n",
    ),
    "glm45": (
        "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>",
        "\n",
    ),
    "mistral": ("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}", ""),
    "gemma4": (
        '{%- macro value(v) -%}{%- if v is string -%}<|"|>{{ v }}<|"|>{%- elif v is mapping -%}'
        "{ {%- for k, w in v.items() -%}{{ k }}:{{ value(w) }}{{ ',' if not loop.last }}{%- endfor -%} }"
        "{%- elif v is sequence -%}[{%- for w in v -%}{{ value(w) }}{{ ',' if not loop.last }}{%- endfor -%}]"
        "{%- else -%}{{ v | tojson }}{%- endif -%}{%- endmacro -%}"
        "<|tool_call>call:{{ f.name }}{{ value(f.arguments) }}<tool_call|>",
        "",
    ),
    "llama3_json": ('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', "; "),
}
ARGUMENTS = [
    {},
    {"town": "Zürich"},
    {"code": "a\nb <tag> \"q\" 'p' \\n {x} [y]", "count": 3, "exact": -1.5e-3},
    {"deep": {"list": [1, "two", None, True, {"k": []}], "s": ""}, "flag": False},
    {"text": "line\r\n\ttab 你好 👩‍👩‍👧 </", "none": None},
]
LOOK = ("look", {"at": "12", "times": 3, "deep": {"a": [1, None, "é"]}})
NOW = ("now", {})
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
SKY = ("look", {"at": "sky"})
NAMELESS = '<tool_call>{"name": "a}</tool_call>'
#: Outputs in which no call of Hermes is.
NO_CALLS = [
    "hello\n",
    "<tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>\nnot JSON\n</tool_call>",
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arg',
    '<tool_call>{"name": "f}</tool_call> and more',
    "<tool_call>\\",
    "<tool_cal",
    " </tool_call> ",
    "a < b",
]
SPELLED = '{"at": "12", "times": 3, "deep": {"a": [1, null, "é"]}}'
#: Format, output, and what comes of it.
CASES = [
    *(("hermes", text, [text]) for text in NO_CALLS),
    ("hermes", f"{CALL}\n{CALL}", [SKY, SKY]),
    ("hermes", f"{CALL}\nDone. ", [SKY, "Done. "]),
    ("hermes", f"a {CALL} b {CALL} c", ["a", SKY, "b", SKY, "c"]),
    ("hermes", CALL.removesuffix("</tool_call>"), [SKY]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', [NOW]),
    ("hermes", '<tool_call>{"arguments": {}, "name": "now"}</tool_call>', [NOW]),
    ("hermes", f"<tool_call>oops{CALL}", ["<tool_call>oops", SKY]),
    ("hermes", f"{NAMELESS}\n{CALL}", [NAMELESS, SKY]),
    ("hermes", CALL.replace("sky", r"one \" , }"), [("look", {"at": 'one " , }'})]),
    ("hermes", CALL.replace("sky", "say </tool_call> \\\\"), [("look", {"at": "say </tool_call> \\"})]),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", [NOW]),
    ("qwen3_coder", "<tool_call>\n{}\n</tool_call>", ["<tool_call>\n{}\n</tool_call>"]),
    ("glm45", "<tool_call>now\n</tool_call>", [NOW]),
    ("glm45", "<tool_call>not a name</tool_call>", ["<tool_call>not a name</tool_call>"]),
    ("gemma4", "<|tool_call>call:now{}<tool_call|>", [NOW]),
    (
        "gemma4",
        '<|tool_call>call:look{at:<|"|>a: {"b"}, <x><|"|>}<tool_call|>',
        [("look", {"at": 'a: {"b"}, <x>'})],
    ),
    (
        "gemma4",
        r'<|tool_call>call:look{at:"one \" , }",times:2}<tool_call|>',
        [("look", {"at": 'one " , }', "times": 2})],
    ),
    ("gemma4", "<|tool_call>look{}<tool_call|>", ["<|tool_call>look{}<tool_call|>"]),
    ("mistral", f"[TOOL_CALLS]look{SPELLED}[TOOL_CALLS]now[ARGS]{{}}", [LOOK, NOW]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "look", "arguments": {SPELLED}}}]', [LOOK]),
    ("mistral", r'[TOOL_CALLS]look{"at": "one \" , }"}', [("look", {"at": 'one " , }'})]),
    ("mistral", "[TOOL_CALLS]look", ["[TOOL_CALLS]look"]),
    ("mistral", "a [TOOL] b", ["a [TOOL] b"]),
    ("llama3_json", f'{{"name": "look", "parameters": {SPELLED}}}', [LOOK]),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "now"}}; {{"name": "look", "parameters": {SPELLED}}}',
        [NOW, LOOK],
    ),
    ("llama3_json", r'{"name": "look", "parameters": {"at": "one \" , }"}}', [("look", {"at": 'one " , }'})]),
    ("llama3_json", '{"colour": "red"}', ['{"colour": "red"}']),
    ("llama3_json", 'It is {"name": "now"}.', ['It is {"name": "now"}.']),
    ("pythonic", "[look(at='12', times=3, deep={'a': [1, None, 'é']}), now()]", [LOOK, NOW]),
    ("pythonic", r"[look(at='it\'s, ok', times=2)]", [("look", {"at": "it's, ok", "times": 2})]),
    ("pythonic", r"""[look(at="a\"),(", times=2)]""", [("look", {"at": 'a"),(', "times": 2})]),
    ("pythonic", r"[look(at='one \\', times=2)]", [("look", {"at": "one \\", "times": 2})]),
    ("pythonic", "[look(at='''it's, ok''', times=2)]", [("look", {"at": "it's, ok", "times": 2})]),
    ("pythonic", "[look(at=open('x'))]", ["[look(at=open('x'))]"]),
    ("pythonic", "[1, 2]", ["[1, 2]"]),
    ("pythonic", "[look(1)]", ["[look(1)]"]),
    ("pythonic", "[f(a=1e999)]", ["[f(a=1e999)]"]),
    ("pythonic", "[" * 4000, ["[" * 4000]),
]


def written(name: str, calls: list[dict[str, object]]) -> str:
    if name == "pythonic":
        # Its templates show the form in words alone.
        texts = [f"look({', '.join(f'{k}={v!r}' for k, v in call.items())})" for call in calls]
        return f"[{', '.join(texts)}]"
    shape, between = SHAPES[name]
    template = ChatTemplate("{% set f = messages[0].tool_calls[0].function %}" + shape)
    return between.join(
        template.render(
            [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "look", "arguments": call}}],
                }
            ]
        )
        for call in calls
    )


#: What cuts, nests and breaks calls.
BITS = [*'<[{ \nx"\\}]),:1', " " * 70, "\\u00e9", "true", "<tool_call>", '{"name": "f", "arguments": {"a":']


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
@given(st.lists(st.sampled_from([*(text for _, text, _ in CASES), *BITS])), st.data(), st.booleans())
def test_no_output_fails_and_the_cuts_change_nothing(name, texts, data, parallel):
    text = "".join(texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(name, *pieces, parallel=parallel) == parsed(name, text, parallel=parallel)


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
        [("<|tool_call>call:look{at:[1", ["look"]), ("],times:3", ['{"at": [1]']), ("}", [', "times": 3}'])],
    ),
    (
        "pythonic",
        [("[look(at='a', ", ["look", '{"at": "a"']), ("times=3", []), (")", [', "times": 3}']), ("]", [])],
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
    ("glm45", "<tool_call>f<arg_key>a</arg_key>1</tool_call>", [("f", ""), "a</arg_key>1</tool_call>"]),
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


@pytest.mark.parametrize("name", SHAPES)
def test_a_call_of_100_000_characters_and_1000_calls_are_read_in_pieces(name):
    long_call = written(name, [{"a": LONG}])
    pieces = [long_call[at : at + 7] for at in range(0, len(long_call), 7)]
    assert loaded(parsed(name, *pieces)) == [("look", {"a": LONG})]
    several = SHAPES[name][1].join([written(name, [{"a": "x"}])] * 1000)
    assert [part[0] for part in parsed(name, several)] == ["look"] * 1000


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_familys_template_writes_its_parser_reads(name):
    for calls in [*([arguments] for arguments in ARGUMENTS), ARGUMENTS]:
        text, expected = written(name, calls), [("look", call) for call in calls]
        if name not in ("llama3_json", "pythonic"):  # whose calls begin the output
            text, expected = f"I look.\n{text}", ["I look.", *expected]
        for size in (1, 3, len(text)):
            assert (
                loaded(parsed(name, *(text[at : at + size] for at in range(0, len(text), size)))) == expected
            )


@pytest.mark.parametrize("name", SHAPES)
def test_a_template_of_that_shape_names_its_format(name):
    assert find_tool_format("auto", "{% for m in messages %}{% endfor %}" + SHAPES[name][0]) == name


def test_the_call_behind_the_only_one_stays_text():
    assert parsed("hermes", f"{CALL}\n{CALL}", parallel=False)[1] == CALL


@pytest.mark.parametrize("name", FORMATS)
def test_a_long_run_of_white_space_is_not_held_back(name: str) -> None:
    parser = make_parser(CallForm.TAGGED, parallel=True, tool_format=name)
    shown = [piece for _ in range(100) for piece in parser.feed(" " * 10)]
    assert "".join(map(str, shown)) == " " * (1000 - MAX_BLANKS)


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.first])
def test_a_call_behind_much_white_space_is_one(name: str) -> None:
    text = " " * 1000 + written(name, [{"a": "x"}])
    for pieces in ([text], list(text)):
        assert loaded(parsed(name, *pieces)) == [" " * (1000 - MAX_BLANKS), ("look", {"a": "x"})]


def test_content_is_sent_as_soon_as_it_cannot_begin_a_tool_call() -> None:
    parser = make_parser(CallForm.TAGGED, parallel=True)
    assert parser.feed("one <") == ["one"]
    assert parser.feed("tool") == []
    assert parser.feed("s> two") == [" <tools> two"]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ('{"name": "look", "arguments": {"at": "sky"}}', [SKY]),
        ('[{"name": "look", "arguments": {"at": "sky"}}, {"name": "now", "arguments": {}}]', [SKY, NOW]),
        ('{"name": "look", "argum', ['{"name": "look", "argum']),
        ('[{"name": "look", "arguments": 3}]', ['[{"name": "look", "arguments": 3}]']),
        ("", []),
        ("[]\n", ["[]\n"]),
    ],
)
def test_a_forced_call_is_read_from_the_whole_output(text: str, pieces: list[object]) -> None:
    parser = make_parser(CallForm.JSON, parallel=True)
    assert loaded(joined([*parser.feed(text), *parser.finish()])) == pieces


@given(st.lists(st.sampled_from([CALL, *BITS, "</tool_call>", "}}", "a<"]), max_size=12))
@settings(max_examples=300, deadline=None)
def test_no_character_but_the_white_space_around_calls_is_lost(fragments: list[str]) -> None:
    text = "".join(fragments)
    shown = "".join(part if isinstance(part, str) else "".join(part) for part in parsed("hermes", text))
    rest = iter("".join(text.split()))
    # A bare line end in a call's string is escaped.
    seen = "".join(shown.split()) if "\n" not in text else "".join(shown.replace("\\n", "").split())
    assert all(char in rest for char in seen), "what is shown is in the text, in order"
    if not any(isinstance(part, tuple) for part in parsed("hermes", text)):
        assert shown == text
