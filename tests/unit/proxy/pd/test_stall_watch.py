"""A PD worker that shows neither event nor progress stands still; a slow or an old one does not."""

from __future__ import annotations

import math

import pytest

from triptych.base.engine_beat import SLOW_FACTOR
from triptych.protos import pd_pb2
from triptych.proxy.pd.stall_watch import StallWatch

LIMIT = 5.0
EVENT = pd_pb2.StepEvents(events=[pd_pb2.RequestEvent(request_id="r")])


def beat(count: int, patience: float = 1.0) -> pd_pb2.StepEvents:
    return pd_pb2.StepEvents(beat=pd_pb2.Beat(count=count, patience=patience))


COMPILES = int(LIMIT * SLOW_FACTOR)


@pytest.mark.parametrize(
    ("limit", "beats", "stalled"),
    [
        (LIMIT, [beat(7)] * 5, False),
        (LIMIT, [beat(7)] * 6, True),
        (LIMIT, [beat(7)] + [None] * 5, True),
        (LIMIT, [beat(7)] * 6 + [beat(8)], False),
        (LIMIT, [beat(700)] * 6 + [beat(1)], False),
        (LIMIT, [None] * 1000, False),
        (0.0, [beat(7)] * 1000, False),
        (LIMIT, [beat(7, SLOW_FACTOR)] * COMPILES, False),
        (LIMIT, [beat(7, SLOW_FACTOR)] * (COMPILES + 1), True),
    ],
    ids=[
        "stands still",
        "for the limit",
        "beats stay away",
        "moves again",
        "restarted",
        "sends no beats",
        "no limit",
        "compiles",
        "compiles too long",
    ],
)
def test_a_worker_whose_count_stands_still_for_the_limit_is_stalled(limit, beats, stalled):
    watch = StallWatch(limit)
    for second, message in enumerate(beats):
        if message is not None:
            watch.observe(message)
        last = watch.stalled(float(second))
    assert last is stalled


def test_a_count_that_changes_an_event_and_tokens_in_lists_are_progress():
    watch = StallWatch(LIMIT)
    listed = pd_pb2.StepEvents(tokens=pd_pb2.StepTokens(request_ids=["r"]))
    for second in range(60):
        watch.observe(beat(min(second, 19)))
        if second >= 20:
            watch.observe(EVENT if second < 40 else listed)
        assert not watch.stalled(float(second))


@pytest.mark.parametrize("patience", [1e30, math.inf, math.nan, -1.0, 0.0])
def test_a_worker_cannot_register_an_endless_or_negative_patience(patience):
    watch = StallWatch(LIMIT)
    said = []
    for second in range(6):
        watch.observe(beat(7, patience))
        said.append(watch.stalled(float(second)))
    assert said == [False] * 5 + [True]


def test_a_proxy_that_was_suspended_itself_suspects_no_worker():
    watch = StallWatch(LIMIT)
    watch.observe(beat(7))
    assert not watch.stalled(0.0)
    assert not watch.stalled(1000.0)
