"""Server-sent events, however the stream is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.pd_worker.vllm.http.client import EventParser
from triptych.pd_worker.vllm.http.replies import EngineGarbage

STREAM = b'data: {"a": 1}\n\n: comment\n\ndata:{"b": 2}\r\n\r\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_are_the_same_however_the_bytes_are_cut(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    parser = EventParser()
    found = [
        data for start, end in zip(edges, edges[1:], strict=False) for data in parser.feed(STREAM[start:end])
    ]
    assert found == EVENTS


def test_an_event_that_does_not_end_is_bounded():
    parser = EventParser(limit=10)
    with pytest.raises(EngineGarbage, match="longer than 10 bytes"):
        list(parser.feed(b"data: 1234567890"))


def test_a_line_that_is_no_event_is_garbage():
    with pytest.raises(EngineGarbage, match="html"):
        list(EventParser().feed(b"<html>\n"))
