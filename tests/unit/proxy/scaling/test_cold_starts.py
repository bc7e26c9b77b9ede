from __future__ import annotations

from triptych.proxy.scaling.autoscaler import ColdStarts


def test_the_time_from_the_decision_to_the_registration_is_learnt_for_each_kind() -> None:
    starts = ColdStarts()
    starts.poll({"a": "cpu"}, 0.0)
    starts.asked(2, 10.0)
    starts.poll({"a": "cpu", "b": "cuda"}, 14.0)
    starts.poll({"a": "cpu", "b": "cuda", "c": "cpu"}, 18.0)
    assert starts.seconds == {"cuda": 4.0, "cpu": 8.0}
    assert (starts.expected("cuda"), starts.expected("never seen")) == (4.0, 8.0)


def test_workers_that_nobody_asked_for_say_nothing() -> None:
    starts = ColdStarts()
    starts.poll({}, 0.0)
    starts.poll({"a": "cpu"}, 5.0)
    starts.asked(1, 6.0)
    starts.withdrawn()
    starts.poll({"a": "cpu", "b": "cpu"}, 9.0)
    assert starts.expected("cpu") == 0.0


def test_a_start_that_never_comes_is_forgotten() -> None:
    starts = ColdStarts()
    starts.poll({}, 0.0)
    starts.asked(1, 0.0)
    starts.poll({"a": "cpu"}, 4000.0)
    assert starts.seconds == {}
