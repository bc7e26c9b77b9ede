"""The rules of Knative's autoscaler, second by second."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.autoscale.policies import Concurrency, PoolView


def follow(items: Callable[[int], int], seconds: int, workers: int = 1, ready_after: int = 0) -> list[int]:
    """What it wants in every second for so many items in the pool, of which each pod may have 8."""
    scaler, sizes = Concurrency(0, 50), []
    for now in range(seconds):
        busy = {f"e{index}": 0.0 for index in range(workers)}
        workers = scaler.desired(PoolView(now, 0, busy, items(now), items(now)))
        sizes.append(workers)
    return sizes


def test_twice_what_the_pods_can_have_is_met_within_the_panic_window() -> None:
    sizes = follow(lambda now: 2 if now < 100 else 56, 200)
    assert sizes[99] == 1 and max(sizes[:107]) == 10


def test_the_last_pod_goes_when_a_whole_stable_window_was_empty() -> None:
    sizes = follow(lambda now: 1 if now < 30 else 0, 200)
    assert sizes[88] == 1 and sizes[92] == 0
