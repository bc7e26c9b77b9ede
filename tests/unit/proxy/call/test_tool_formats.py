"""Tool calls in the forms of all model families, however the text is cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.data.tool_calls import ARGUMENTS, BROKEN, CALL, CASES, NOW, SCHEMAS, SHAPES, SKY, STEPS, written
from triptych.pd_worker.frontend.tool_format import find_tool_format
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
def test_wherever_an_output_is_cut_in_two_its_calls_are_the_same(name):
    for format_name, text, _ in [*CASES, *BROKEN]:
        if format_name == name:
            whole = parsed(name, text)
            assert all(parsed(name, text[:at], text[at:]) == whole for at in range(1, min(len(text), 600)))


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


def test_every_format_streams_its_arguments():
    assert {name for name, _ in STEPS} == set(FORMATS)


@pytest.mark.parametrize(("name", "steps"), STEPS)
def test_arguments_come_as_soon_as_they_are_certain(name, steps):
    parser = make_parser(CallForm.TAGGED, parallel=True, tool_format=name, schemas=SCHEMAS)
    for text, expected in steps:
        assert [getattr(piece, "name", None) or piece.text for piece in parser.feed(text)] == expected, text
    assert parser.finish() == []


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
