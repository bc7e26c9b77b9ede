"""The events of encoder jobs that both sides make by the same functions."""

from __future__ import annotations

from triptych.base.errors import Overloaded
from triptych.base.types import ItemPlan
from triptych.protos.job_events import NEED_MEDIA, WAITS, failed, planned


def test_a_plan_travels_with_all_its_fields() -> None:
    plan = planned(ItemPlan("b" * 64, "a" * 64, "image", 2, 8, "float32", 4, ((1, 2),), (1, 2, 2))).planned
    assert (plan.mm_hash, plan.rows, plan.width, plan.dtype, plan.length) == ("b" * 64, 2, 8, "float32", 4)
    assert [(run.start, run.count) for run in plan.runs] == [(1, 2)]
    assert list(plan.grid_thw) == [1, 2, 2]


def test_a_failure_travels_with_its_error_and_the_holder_of_the_lease() -> None:
    end = failed(
        Overloaded("full", retry_after=2), retryable=True, owner_address="h:1", owner_token="t"
    ).failed
    assert (end.error.code, end.error.retry_after, end.retryable) == ("overloaded", 2, True)
    assert (end.owner_address, end.owner_token) == ("h:1", "t")
    assert not failed(Overloaded("full"), retryable=False).failed.retryable


def test_events_without_content_say_what_they_are() -> None:
    assert (NEED_MEDIA.WhichOneof("body"), WAITS.WhichOneof("body")) == ("need_media", "waits")
