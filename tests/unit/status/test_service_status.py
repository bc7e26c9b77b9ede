"""The answers to probes, by phase, health and what is missing."""

from __future__ import annotations

import pytest

from triptych.base.status.status_server import (
    ProbeAnswer,
    ServicePhase,
    ServiceStatus,
    health_answer,
    ready_answer,
)


@pytest.mark.parametrize(
    ("phase", "healthy", "expected"),
    [
        (ServicePhase.STARTING, True, ProbeAnswer(503, "starting")),
        (ServicePhase.READY, True, ProbeAnswer(200, "ready")),
        (ServicePhase.READY, False, ProbeAnswer(503, "stalled")),
        (ServicePhase.DRAINING, True, ProbeAnswer(503, "draining")),
        (ServicePhase.DRAINING, False, ProbeAnswer(503, "draining")),
    ],
)
def test_only_a_loaded_and_healthy_process_that_is_not_leaving_is_ready(phase, healthy, expected):
    assert ready_answer(phase, healthy=healthy) == expected


def test_a_process_without_its_store_is_ready_and_says_what_it_lacks() -> None:
    assert ready_answer(ServicePhase.READY, healthy=True, degraded=["store"]) == ProbeAnswer(
        200, "ready", ("store",)
    )


def test_a_process_that_alone_lacks_its_store_is_not_ready() -> None:
    answer = ready_answer(ServicePhase.READY, healthy=True, cut_off=True, degraded=["store"])
    assert answer == ProbeAnswer(503, "cut off from the store")


def test_liveness_follows_the_engines_and_nothing_else() -> None:
    status = ServiceStatus()
    healthy = True
    status.follow(lambda: healthy, lambda: ["store"])
    assert status.health_probe().status == 200
    status.ready()
    status.drain()
    assert status.health_probe() == health_answer(healthy=True)
    healthy = False
    assert status.health_probe().status == 503


def test_a_process_that_drains_does_not_become_ready_again() -> None:
    status = ServiceStatus()
    status.drain()
    status.ready()
    assert status.ready_probe() == ProbeAnswer(503, "draining")
