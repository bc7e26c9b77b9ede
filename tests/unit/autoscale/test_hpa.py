"""The rules of the Horizontal Pod Autoscaler, second by second."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.autoscale.policies import CpuPercent, PoolView, QueueLength, Scaler


def follow(scaler: Scaler, seconds: int, view: Callable[[int, int], PoolView], workers: int = 1) -> list[int]:
    """What the scaler wants in every second, of a pool that has it at once; `view` of second and workers."""
    sizes = []
    for now in range(seconds):
        workers = scaler.desired(view(now, workers))
        sizes.append(workers)
    return sizes


def at_use(share: Callable[[int], float]) -> Callable[[int, int], PoolView]:
    """Workers that have been busy for this share of their time at each second, all alike."""
    spent = [0.0]

    def view(now: int, workers: int) -> PoolView:
        spent[0] += share(now)
        return PoolView(now, 0, {f"e{index}": spent[0] for index in range(workers)})

    return view


def queue(
    waiting: Callable[[int], int], requests: Callable[[int], int] = int
) -> Callable[[int, int], PoolView]:
    def view(now: int, workers: int) -> PoolView:
        busy = {f"e{index}": 0.0 for index in range(workers)}
        return PoolView(now, 0, busy, waiting(now), waiting(now), requests(now))

    return view


def test_workers_that_are_busy_all_the_time_grow_by_the_ratio_to_the_target() -> None:
    sizes = follow(CpuPercent(1, 20), 60, at_use(lambda _: 1.0), workers=4)
    assert sizes[19] == 4 and sizes[20] == 6  # 4 · 1.0 / 0.7, at the first sync with two scrapes


def test_workers_are_taken_away_only_when_nothing_has_asked_for_them_for_five_minutes() -> None:
    sizes = follow(CpuPercent(1, 20), 600, at_use(lambda now: 0.7 if now < 100 else 0.1), workers=6)
    assert sizes[399] == 6 and min(sizes) == 1


def test_with_a_minimum_of_zero_the_last_worker_goes_after_the_cooldown() -> None:
    sizes = follow(QueueLength(0, 100), 800, queue(lambda now: 3 if now < 40 else 0, lambda _: 7))
    assert sizes[390] == 1 and sizes[-1] == 0
