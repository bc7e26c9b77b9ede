"""Reasoning is told from the answer, however the text is cut into pieces."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.base.delta import Delta
from triptych.base.types import FinishReason, ReasoningMarkers, Usage
from triptych.protos.pd_pb2 import Admitted
from triptych.proxy.call.answer import CallBegin, CallPiece, ChoiceReader, ReasoningPiece, ReasoningSplitter
from triptych.proxy.call.chat import Done, Timings
from triptych.proxy.call.tools import CallForm, ToolUse

THINK = ReasoningMarkers("<think>", "</think>")
BEGUN = ReasoningMarkers("<think>", "</think>", begun=True)
GEMMA = ReasoningMarkers("<|channel>", "<channel|>", label="thought\n")
CASES = [
    (BEGUN, "I see.\n</think>\n\nRed.", ("I see.", "Red.")),
    (BEGUN, "\nI see\n\n.</think>Red.\n", ("I see\n\n.", "Red.\n")),
    (BEGUN, "no end, </thin", ("no end, </thin", "")),
    (BEGUN, "</think>\n\nRed.", ("", "Red.")),
    (BEGUN, "a < b </thing> c</think>d", ("a < b </thing> c", "d")),
    (BEGUN, "a</think>b</think>c<think>", ("a", "b</think>c<think>")),
    (BEGUN, "", ("", "")),
    (BEGUN, "\n" * 100 + "I see" + "\n" * 100 + "</think>Red.", ("I see" + "\n" * 36, "Red.")),
    (THINK, "<think>\nI see.\n</think>\n\nRed.", ("I see.", "Red.")),
    (THINK, "\n <think>a</think>b", ("a", "b")),
    (THINK, "Red. <think>a</think>", ("", "Red. <think>a</think>")),
    (THINK, "\n\nRed.", ("", "\n\nRed.")),
    (THINK, "<thin", ("", "<thin")),
    (THINK, "a</think>b", ("", "a</think>b")),
    (GEMMA, "<|channel>thought\nI see.\n<channel|>Red.", ("I see.", "Red.")),
    (GEMMA, "<|channel>other\nI see.<channel|>Red.", ("other\nI see.", "Red.")),
    (GEMMA, "<|channel>though", ("though", "")),
]


def split(markers: ReasoningMarkers, *texts: str) -> tuple[str, str]:
    splitter = ReasoningSplitter(markers)
    parts = [*(splitter.feed(text) for text in texts), splitter.finish()]
    return "".join(reasoning for reasoning, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.parametrize(("markers", "text", "parts"), CASES)
def test_reasoning_and_answer_are_told_apart_and_the_markers_are_in_neither(markers, text, parts):
    assert split(markers, text) == parts
    assert split(markers, *text) == parts, "letter by letter"


def test_a_long_run_of_line_breaks_is_not_held_back():
    splitter = ReasoningSplitter(BEGUN)
    splitter.feed("I see")
    assert "".join(splitter.feed("\n")[0] for _ in range(1000)) == "\n" * (1000 - 64)


@settings(max_examples=300)
@given(
    st.sampled_from([THINK, BEGUN, GEMMA]),
    st.lists(
        st.sampled_from(["<think>", "</think>", "<", "/", "t", "\n", " ", "x", "<|channel>", "thought"])
    ),
    st.data(),
)
def test_the_cuts_change_nothing(markers, tokens, data):
    text = "".join(tokens)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(markers, *pieces) == split(markers, text)


def done(reason: FinishReason = FinishReason.STOP) -> Done:
    return Done(reason, Usage(1, 1), Timings())


def test_a_call_after_the_reasoning_is_found_and_one_in_it_is_not():
    reader = ChoiceReader(ToolUse(form=CallForm.TAGGED))
    reader.begin(Admitted(prompt_token_ids=(1,), reasoning=asdict(BEGUN)))
    call = '<tool_call>{"name": "look"}</tool_call>'
    pieces = [*reader.read(Delta(f"{call}</think>\n{call}", [1, 2])), *reader.end(done())[0]]
    assert [type(piece) for piece in pieces] == [ReasoningPiece, CallBegin, CallPiece]
    assert pieces[0].text == call


def test_reasoning_that_is_not_wanted_is_counted_all_the_same():
    reader = ChoiceReader(reasoning=False)
    reader.begin(Admitted(prompt_token_ids=(1,), reasoning=asdict(BEGUN)))
    pieces = [reader.read(Delta(text, [7])) for text in ("a", "b", "c</think>", "d", "e")]
    assert pieces == [[], [], [], ["d"], ["e"]]
    assert reader.reasoning_tokens == 3


def test_a_reader_is_plain_once_the_reasoning_is_over():
    reader = ChoiceReader()
    assert reader.plain
    reader.begin(Admitted(prompt_token_ids=(1,), reasoning=asdict(BEGUN)))
    seen = []
    for text in ("a", "</think>", "\n", "b"):
        reader.read(Delta(text, [7]))
        seen.append(reader.plain)
    assert seen == [False, False, False, True]
