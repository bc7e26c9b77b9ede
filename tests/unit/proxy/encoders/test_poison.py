"""An item whose encoders die does not go through the whole pool, nor does it take others with it."""

from __future__ import annotations

from support.data.items import bare_plan
from triptych.proxy.encoders.job import EncoderJob, EncoderSlot, JobState
from triptych.proxy.encoders.job_table import EncoderJobTable
from triptych.proxy.routing import MAX_LOSSES

SPACE = "n"
LATER = 100.0


def table(*addresses: str, credit: int = 4) -> EncoderJobTable:
    made = EncoderJobTable(1 << 20)
    made.set_encoders(EncoderSlot(address, (SPACE,), credit, credit) for address in addresses or ("e1",))
    return made


def started(jobs: EncoderJobTable, now: float = LATER) -> list[str]:
    return sorted(job.mm_hash for job in jobs.pump(now) if job.state is JobState.PLANNING)


def running(jobs: EncoderJobTable, now: float = LATER) -> list[str]:
    return sorted(job.mm_hash for job in jobs.pump(now) if job.state is JobState.RUNNING)


def want(jobs: EncoderJobTable, *keys: str) -> list[EncoderJob]:
    for key in keys:
        jobs.admit(f"r-{key}")
    return [jobs.want(key, f"r-{key}", SPACE)[0] for key in keys]


def suspect(jobs: EncoderJobTable, key: str) -> EncoderJob:
    """A job that may lose one encoder more."""
    (job,) = want(jobs, key)
    for _ in range(MAX_LOSSES - 1):
        assert started(jobs) == [key]
        jobs.lost(job.try_id, key, 0.0)
    return job


def test_an_item_that_has_lost_three_encoders_in_preprocessing_is_given_up() -> None:
    jobs = table()
    job = suspect(jobs, "k")
    assert started(jobs) == ["k"]
    assert jobs.lost(job.try_id, "k", 0.0) is job
    assert job.losses == MAX_LOSSES == 3
    assert len(jobs) == 0


def test_an_encoder_lost_in_the_tower_counts_and_one_lost_while_the_item_waits_does_not() -> None:
    jobs = table()
    (job,) = want(jobs, "k")
    for _ in range(5):
        jobs.end_attempt("r-k")
        assert started(jobs) == ["k"]
        jobs.planned(job.try_id, bare_plan("k"))
        assert job.state is JobState.PLANNED
        jobs.lost(job.try_id, "k", 0.0)
        assert job.losses == 0
    for losses in (1, 2, 3):
        jobs.admit("r-k")
        assert started(jobs) == ["k"]
        jobs.planned(job.try_id, bare_plan("k"))
        assert running(jobs) == ["k"]
        jobs.lost(job.try_id, "k", 0.0)
        assert job.losses == losses
    assert len(jobs) == 0


def test_the_last_chance_is_taken_alone_in_preprocessing() -> None:
    jobs = table()
    job = suspect(jobs, "k")
    assert started(jobs) == ["k"]
    want(jobs, "other")
    assert started(jobs) == []
    jobs.planned(job.try_id, bare_plan("k"))
    assert running(jobs) == ["k"]
    assert started(jobs) == []
    jobs.ready(job.try_id, bare_plan("k"))
    assert started(jobs) == ["other"]


def test_the_last_chance_is_taken_alone_in_the_tower() -> None:
    jobs = table()
    job = suspect(jobs, "k")
    jobs.end_attempt("r-k")
    assert started(jobs) == ["k"]
    jobs.planned(job.try_id, bare_plan("k"))
    other, third = want(jobs, "other", "third")
    assert started(jobs) == ["other", "third"]
    jobs.planned(other.try_id, bare_plan("other"))
    assert running(jobs) == ["other"]
    jobs.admit("r-k")
    assert running(jobs) == []
    jobs.planned(third.try_id, bare_plan("third"))
    jobs.ready(other.try_id, bare_plan("other"))
    # `third` was admitted before.
    assert running(jobs) == ["third"]
    jobs.ready(third.try_id, bare_plan("third"))
    assert running(jobs) == ["k"]


def test_an_item_that_must_be_alone_does_not_starve() -> None:
    jobs = table()
    (early,) = want(jobs, "early")
    started(jobs)
    (job,) = want(jobs, "k")
    for _ in range(MAX_LOSSES - 1):
        assert started(jobs) == ["k"]
        jobs.lost(job.try_id, "k", 0.0)
    want(jobs, "late")
    # `k` waits for `early`, so `late` has to wait for `k`.
    assert started(jobs) == []
    jobs.planned(early.try_id, bare_plan("early"))
    assert running(jobs) == ["early"]
    assert started(jobs) == []
    jobs.ready(early.try_id, bare_plan("early"))
    assert started(jobs) == ["k"]


def test_others_go_on_at_another_encoder_meanwhile() -> None:
    jobs = table("e1", "e2")
    suspect(jobs, "k")
    assert started(jobs) == ["k"]
    want(jobs, *"abc")
    assert started(jobs) == ["a", "b", "c"]
    busy = {jobs.items.job(key).address for key in "abc"}
    assert busy == {"e1", "e2"} - {jobs.items.job("k").address}


def test_two_items_that_must_be_alone_take_turns() -> None:
    jobs = table()
    (first,) = want(jobs, "a")
    (second,) = want(jobs, "b")
    for _ in range(2):
        assert started(jobs) == ["a", "b"]
        jobs.lost(first.try_id, "a", 0.0)
        jobs.lost(second.try_id, "b", 0.0)
    assert started(jobs) == ["a"]
    jobs.lost(first.try_id, "a", 0.0)
    assert started(jobs) == ["b"]
    jobs.planned(second.try_id, bare_plan("b"))
    assert running(jobs) == ["b"]
    assert jobs.ready(second.try_id, bare_plan("b")) is second
    assert len(jobs) == 0
