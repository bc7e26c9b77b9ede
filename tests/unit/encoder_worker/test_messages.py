"""Jobs from the wire are checked field by field."""

from __future__ import annotations

import pytest

from triptych.base.errors import InvalidRequest, Overloaded
from triptych.base.types import ItemPlan
from triptych.encoder_worker.job_spec import ItemFormat
from triptych.encoder_worker.jobs.job import Failed, JobTimings, MediaWanted, Planned, Ready, Waits
from triptych.encoder_worker.media.formats import MAX_MEDIA_BYTES
from triptych.encoder_worker.server import MAX_TIMEOUT, event_message, parse_job
from triptych.protos import encoder_pb2

FORMAT = ItemFormat("a" * 64, "image", 8, "float32")
GOOD = {
    "job_id": "j",
    "mm_hash": "b" * 64,
    "namespace": "a" * 64,
    "modality": "image",
    "media_bytes": 5,
    "timeout": 10.0,
}


def job(**changes: object) -> encoder_pb2.EncodeJob:
    return encoder_pb2.EncodeJob(**{**GOOD, **changes})


def test_a_good_job_is_taken() -> None:
    spec = parse_job(job(processor_options='{"max_pixels": 7}', re_encode=True), FORMAT)
    assert (spec.mm_hash, spec.media_bytes, spec.re_encode) == ("b" * 64, 5, True)
    assert spec.processor_options == {"max_pixels": 7}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mm_hash", "b" * 63),
        ("mm_hash", "B" * 64),
        ("namespace", "c" * 64),
        ("modality", "text"),
        ("media_bytes", 0),
        ("media_bytes", MAX_MEDIA_BYTES + 1),
        ("timeout", 0.0),
        ("timeout", -1.0),
        ("timeout", float("nan")),
        ("damaged_digest", "x"),
        ("processor_options", "[1]"),
        ("processor_options", "{"),
        ("processor_options", "[" * 60000),
        ("processor_options", '{"a": "' + "x" * 70000 + '"}'),
        ("processor_options", '{"a": 1180591620717411303424}'),
        ("processor_options", '{"a": "\\ud800"}'),
        ("processor_options", '{"a":' * 600 + "1" + "}" * 600),
    ],
)
def test_a_bad_field_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_job(job(**{field: value}), FORMAT)
    assert caught.value.param == field


def test_no_job_lives_longer_than_the_longest() -> None:
    assert parse_job(job(timeout=1e9), FORMAT).timeout == MAX_TIMEOUT


def test_events_travel_with_all_their_fields() -> None:
    plan = ItemPlan("b" * 64, "a" * 64, "image", 2, 8, "float32", 4, ((1, 2),), (1, 2, 2))
    planned = event_message(Planned(plan)).planned
    assert [(run.start, run.count) for run in planned.runs] == [(1, 2)]
    assert list(planned.grid_thw) == [1, 2, 2]
    ready = event_message(Ready(plan, True, JobTimings(1, 2, 3, 4, 5))).ready
    assert (ready.already_stored, ready.queue_seconds, ready.save_seconds) == (True, 1, 4)
    assert (ready.encode_seconds, ready.work_seconds) == (3, 5)
    assert event_message(MediaWanted()).WhichOneof("body") == "need_media"
    assert event_message(Waits()).WhichOneof("body") == "waits"
    failed = event_message(Failed(Overloaded("full", retry_after=2), True, "h:1", "t")).failed
    assert (failed.error.code, failed.error.retry_after, failed.retryable) == ("overloaded", 2, True)
    assert (failed.owner_address, failed.owner_token) == ("h:1", "t")
