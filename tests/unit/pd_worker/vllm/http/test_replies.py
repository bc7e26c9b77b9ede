"""What comes from the server is read strictly."""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.data.items import make_plan
from triptych.base.types import MMFeature, Placement
from triptych.base.vllm_classes import ROWS
from triptych.models.generic.layout import ItemLayout
from triptych.pd_worker.core.outputs import RawLogprobs
from triptych.pd_worker.vllm.http.call import EngineCall, _metadata, place_of, range_of, size_of
from triptych.pd_worker.vllm.http.client import EventParser
from triptych.pd_worker.vllm.http.replies import (
    ChosenToken,
    EngineBusy,
    EngineFailed,
    EngineGarbage,
    EngineRejected,
    RankedToken,
    StreamChoice,
    StreamChunk,
    StreamEvent,
    TokenLogprobs,
    check_tokens,
    decode,
    error_of_body,
    error_of_event,
    error_of_status,
)


def chunk(**choice: object) -> StreamEvent:
    return decode(json.dumps({"choices": [choice]}).encode(), StreamEvent)


def test_tokens_and_reason_are_read_and_all_else_is_ignored():
    made = chunk(index=0, token_ids=[3, 4], finish_reason="length", stop_reason=None, weight_versions=[])
    assert (made.choices[0].token_ids, made.choices[0].finish_reason) == ([3, 4], "length")


def test_the_last_chunk_says_how_much_of_the_prompt_was_cached():
    raw = b'{"choices": [], "usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}}'
    assert decode(raw, StreamEvent).cached_tokens == 4
    assert chunk().cached_tokens == 0


@pytest.mark.parametrize(
    "raw",
    [b"", b"[", b"7", b"\xff", b'{"choices": 3}', b'{"choices": [{"token_ids": ["3"]}]}', b"[" * 100_000],
)
def test_what_is_no_chunk_is_garbage(raw):
    with pytest.raises(EngineGarbage):
        decode(raw, StreamEvent)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_chunk_or_garbage(raw):
    try:
        decode(raw, StreamEvent)
    except EngineGarbage:
        return
    json.loads(raw)


def test_an_error_event_names_field_and_reason():
    made = decode(b'{"error": {"message": "too many", "param": "logprobs", "code": 400}}', StreamEvent)
    error = error_of_event(made.error)
    assert isinstance(error, EngineRejected)
    assert (error.message, error.param) == ("too many", "logprobs")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "m"}}', "m"),
        (b'{"message": "m"}', "m"),
        (b'{"detail": "m"}', "m"),
        (b"<html>", "<html>"),
        (b'{"error": "m"}', '{"error": "m"}'),
    ],
)
def test_the_reason_of_a_refusal_is_found_in_each_form(body, message):
    error = error_of_body(400, body)
    assert isinstance(error, EngineRejected) and error.message == message


def reply_chunk(token_ids: list[int], logprobs: TokenLogprobs | None = None) -> StreamChunk:
    return StreamChunk([StreamChoice(token_ids, logprobs=logprobs)])


@pytest.mark.parametrize("token_ids", [[10], [-1], [3, 10]])
def test_tokens_that_the_model_lacks_are_garbage(token_ids):
    with pytest.raises(EngineGarbage, match="beyond 9"):
        check_tokens(reply_chunk(token_ids), 10)


def test_logprobs_of_other_tokens_are_garbage():
    content = TokenLogprobs([ChosenToken(4, -1.0)])
    check_tokens(reply_chunk([4], content), 10)
    with pytest.raises(EngineGarbage):
        check_tokens(reply_chunk([3], content), 10)


def test_the_likeliest_tokens_are_taken_by_rank():
    top = [RankedToken(8, -5.0, 9), RankedToken(3, -1.0, 1), RankedToken(4, -2.0, 2)]
    assert ChosenToken(8, -5.0, 9, top).raw(2) == RawLogprobs((8, -5.0), ((3, -1.0), (4, -2.0)))
    assert ChosenToken(8, -5.0, 9, top).raw(0) == RawLogprobs((8, -5.0), ())


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, EngineRejected),
        (404, EngineRejected),
        (429, EngineBusy),
        (503, EngineBusy),
        (500, EngineFailed),
        (302, EngineGarbage),
    ],
)
def test_a_status_says_whether_to_try_again(status, kind):
    assert type(error_of_status(status, "why")) is kind


def test_a_foreign_message_is_one_short_line():
    error = error_of_status(500, "a\nb\x1b[31m" + "x" * 1000)
    assert str(error) == "500: " + ("a b?[31m" + "x" * 1000)[:500]


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


def test_an_items_size_is_its_grid():
    assert size_of(make_plan()) == ("image_grid_thw", (1, 2, 14))


def test_an_item_without_a_grid_still_has_a_field_which_the_connector_knows():
    assert size_of(replace(make_plan(rows=7), grid_thw=())) == (ROWS, (7,))


def test_a_sounds_size_is_its_rows_and_a_videos_its_grid():
    plan = make_plan(rows=7)
    assert size_of(replace(plan, modality="audio", grid_thw=(0, 90, 90))) == (ROWS, (7,))
    assert size_of(replace(plan, modality="video")) == ("video_grid_thw", (1, 2, 14))


def test_a_placeholder_is_the_tokens_that_take_rows():
    assert range_of(Placement(10, 6, ((1, 4),))) == {"offset": 11, "length": 4}
    assert range_of(Placement(10, 6)) == {"offset": 10, "length": 6}


def test_rows_that_stand_apart_are_named_for_the_connector_beside_the_whole_placeholder():
    runs = ((1, 3), (6, 4))
    feature = MMFeature(make_plan(), Placement(10, 11, runs))
    assert place_of(feature) == ({"offset": 10, "length": 11}, [[1, 3], [6, 4]])
    call = EngineCall([0] * 30, {}, features=[feature])
    namespace = feature.plan.namespace
    assert call.ec_transfer_params == {feature.mm_hash: {"namespace": namespace, "runs": [[1, 3], [6, 4]]}}
    signed = replace(call, tickets={feature.mm_hash: {"proof": "p"}})
    assert signed.ec_transfer_params == {feature.mm_hash: {"proof": "p", "runs": [[1, 3], [6, 4]]}}


def test_a_picture_is_cut_to_its_rows_and_a_video_keeps_the_marks_around_them():
    place = Placement(10, 6, ((1, 4),))
    assert place_of(MMFeature(make_plan(), place)) == ({"offset": 11, "length": 4}, [])
    video = MMFeature(replace(make_plan(), modality="video"), place)
    assert place_of(video) == ({"offset": 10, "length": 6}, [[1, 4]])
    assert place_of(MMFeature(video.plan, Placement(10, 6))) == ({"offset": 10, "length": 6}, [])


def test_a_videos_seconds_go_beside_its_grid():
    grids = {1: torch.tensor([0.5]), 2: torch.tensor([[2, 4, 4]])}
    layout = ItemLayout((5,) * 8, ((),) * 8, grids).encode()
    plan = replace(make_plan(rows=8), modality="video", grid_thw=(2, 4, 4), layout=layout)
    item = msgspec.msgpack.decode(base64.b64decode(_metadata(plan)))
    assert item.keys() == {"video_grid_thw", "second_per_grid_ts"}
    dtype, shape, raw = item["second_per_grid_ts"]["data"]
    assert (dtype, shape, struct.unpack("<f", raw.data)) == ("float32", [1], (0.5,))


def test_an_item_without_pixels_is_encoded_as_vllm_reads_it():
    plan = replace(make_plan(), grid_thw=(1, 4, 4))
    assert _metadata(plan) == (
        "ga5pbWFnZV9ncmlkX3Rod4KkZGF0YZOlaW50NjSRA8cYAwEAAAAAAAAABAAAAAAAAAAEAAAAAAAAAKVmaWVsZJKnYmF0Y2hlZIGra2Vl"
        "cF9vbl9jcHXD"
    )
