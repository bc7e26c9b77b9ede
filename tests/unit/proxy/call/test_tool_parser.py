from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.tool_calls import joined
from triptych.proxy.call.tool_formats import MAX_BLANKS, make_parser
from triptych.proxy.call.tools import CallForm

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
LOOK = ("look", '{"at": "sky"}')


def parsed(*texts: str, form: CallForm = CallForm.TAGGED, parallel: bool = True) -> list[object]:
    """What comes of the pieces of text, joined."""
    parser = make_parser(form, parallel=parallel)
    return joined([*(piece for text in texts for piece in parser.feed(text)), *parser.finish()])


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("hello\n", ["hello\n"]),
        (CALL, [LOOK]),
        (f"I look.\n{CALL}", ["I look.", LOOK]),
        (f"{CALL}\n{CALL}", [LOOK, LOOK]),
        (f"{CALL}\nDone. ", [LOOK, "Done. "]),
        (f"a {CALL} b {CALL} c", ["a", LOOK, "b", LOOK, "c"]),
        (CALL.removesuffix("</tool_call>"), [LOOK]),
        ('<tool_call>{"name": "now"}</tool_call>', [("now", "{}")]),
        ('<tool_call>{"arguments": {}, "name": "now"}</tool_call>', [("now", "{}")]),
    ],
)
def test_calls_and_content_come_in_order(text: str, pieces: list[object]) -> None:
    assert parsed(text) == pieces


@pytest.mark.parametrize(
    "text",
    [
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
    ],
)
def test_what_is_no_call_stays_text_to_the_last_character(text: str) -> None:
    assert parsed(text) == [text]


def test_a_broken_call_does_not_take_the_next_one_with_it() -> None:
    assert parsed(f"<tool_call>oops{CALL}") == ["<tool_call>oops", LOOK]
    broken = '<tool_call>{"name": "a}</tool_call>'
    assert parsed(f"{broken}\n{CALL}") == [broken, LOOK]


def test_a_closing_tag_inside_a_string_closes_nothing() -> None:
    arguments = json.dumps({"text": 'say "</tool_call>" \\'})
    text = '<tool_call>{"name": "say", "arguments": ' + arguments + "}</tool_call>"
    assert parsed(text) == [("say", arguments)]


def test_a_long_run_of_white_space_is_not_held_back() -> None:
    parser = make_parser(CallForm.TAGGED, parallel=True)
    shown = [piece for _ in range(100) for piece in parser.feed(" " * 10)]
    assert "".join(map(str, shown)) == " " * (1000 - MAX_BLANKS)


def test_only_one_call_is_taken_where_calls_may_not_be_parallel() -> None:
    assert parsed(f"{CALL}\n{CALL}", parallel=False) == [LOOK, CALL]


def test_content_is_sent_as_soon_as_it_cannot_begin_a_tool_call() -> None:
    parser = make_parser(CallForm.TAGGED, parallel=True)
    assert parser.feed("one <") == ["one"]
    assert parser.feed("tool") == []
    assert parser.feed("s> two") == [" <tools> two"]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ('{"name": "look", "arguments": {"at": "sky"}}', [LOOK]),
        (
            '[{"name": "look", "arguments": {"at": "sky"}}, {"name": "now", "arguments": {}}]',
            [LOOK, ("now", "{}")],
        ),
        ('{"name": "look", "argum', ['{"name": "look", "argum']),
        ('[{"name": "look", "arguments": 3}]', ['[{"name": "look", "arguments": 3}]']),
        ("", []),
        ("[]\n", ["[]\n"]),
    ],
)
def test_a_forced_call_is_read_from_the_whole_output(text: str, pieces: list[object]) -> None:
    assert parsed(text, form=CallForm.JSON) == pieces


FRAGMENTS = st.sampled_from(
    [
        CALL,
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {',
        "}}",
        '"',
        "\\",
        " ",
        " " * 70,
        "\n",
        "a<",
        "x",
    ]
)


@given(st.lists(FRAGMENTS, max_size=12), st.data(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_outcome_does_not_depend_on_where_the_text_is_cut(fragments, data, parallel):
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parsed(text, parallel=parallel)
    assert parsed(*pieces, parallel=parallel) == whole
    assert parsed(*text, parallel=parallel) == whole


@given(st.lists(FRAGMENTS, max_size=12))
@settings(max_examples=300, deadline=None)
def test_no_character_but_the_white_space_around_calls_is_lost(fragments: list[str]) -> None:
    text = "".join(fragments)
    shown = "".join(part if isinstance(part, str) else "".join(part) for part in parsed(text))
    rest = iter("".join(text.split()))
    # A bare line end in a call's string is escaped.
    seen = "".join(shown.split()) if "\n" not in text else "".join(shown.replace("\\n", "").split())
    assert all(char in rest for char in seen), "what is shown is in the text, in order"
    if not any(isinstance(part, tuple) for part in parsed(text)):
        assert shown == text
