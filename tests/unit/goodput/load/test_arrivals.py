"""Arrival times and traces."""

from __future__ import annotations

import json

import pytest

from triptych.base.errors import ConfigError
from triptych.goodput.load.workload import KINDS, Arrivals, arrival_times, plan_requests, read_trace
from triptych.goodput.measure.slo import preset


@pytest.mark.parametrize("kind", KINDS)
def test_times_ascend_offer_the_rate_exactly_and_come_from_the_seed(kind):
    arrivals = Arrivals(kind, rate=8.0, burstiness=0.5, ramp_to=16.0)
    times = arrival_times(arrivals, 240, 1)
    assert times == sorted(times) == arrival_times(arrivals, 240, 1)
    assert times[-1] == pytest.approx(240 / (12.0 if kind == "ramp" else 8.0))
    assert kind == "constant" or times != arrival_times(arrivals, 240, 2)


def test_a_written_trace_replays_lengths_pictures_and_times(tmp_path):
    path = tmp_path / "load.jsonl"
    planned = plan_requests(preset("reuse-50").workload, 50, 1)
    lines = [
        {
            "time": time,
            "text_tokens": one.text_tokens,
            "output_tokens": one.output_tokens,
            "images": [{"id": str(p.seed), "width": p.width, "height": p.height} for p in one.pictures],
        }
        for time, one in zip(arrival_times(Arrivals(), 50, 1), planned, strict=True)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    replayed = read_trace(path)
    assert [time for time, _ in replayed] == pytest.approx(arrival_times(Arrivals(), 50, 1))
    assert [one.output_tokens for _, one in replayed] == [one.output_tokens for one in planned]
    before = [planned.index(next(p for p in planned if p.pictures == one.pictures)) for one in planned]
    again = [one for _, one in replayed]
    after = [again.index(next(p for p in again if p.pictures == one.pictures)) for one in again]
    assert before == after
    assert [time for time, _ in read_trace(path, speed=2.0)] == pytest.approx(
        [time / 2 for time, _ in replayed]
    )


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"time": 1}',
        '{"time": -1, "text_tokens": 1, "output_tokens": 1}',
        '{"time": 0, "text_tokens": 1, "output_tokens": 1, "images": [{"id": "a", "width": 0, "height": 1}]}',
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path, line):
    path = tmp_path / "load.jsonl"
    path.write_text('{"time": 0, "text_tokens": 1, "output_tokens": 1}\n' + line)
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(path)
