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


def test_a_use_within_the_tolerance_changes_nothing() -> None:
    assert set(follow(CpuPercent(1, 20), 400, at_use(lambda _: 0.75), workers=4)[1:]) == {4}


def test_workers_are_taken_away_only_when_nothing_has_asked_for_them_for_five_minutes() -> None:
    sizes = follow(CpuPercent(1, 20), 600, at_use(lambda now: 0.7 if now < 100 else 0.1), workers=6)
    assert sizes[399] == 6 and min(sizes) == 1


def test_a_pool_that_grows_on_cpu_use_never_goes_to_zero() -> None:
    assert follow(CpuPercent(0, 20), 700, at_use(lambda _: 0.0), workers=3)[-1] == 1


def test_workers_that_start_count_as_idle_when_more_are_wanted() -> None:
    scaler = CpuPercent(1, 20)
    for now in range(36):
        wanted = scaler.desired(PoolView(now, 3, {"e0": float(now)}))
    assert wanted == 4  # one of four is at 100 %: 25 % on average, which must not turn the change round


def test_the_pool_at_most_doubles_or_grows_by_four_in_a_sync() -> None:
    sizes = follow(QueueLength(1, 100), 60, queue(lambda _: 400))
    assert sizes[5] == 5 and sizes[20] == 10 and sizes[35] == 20


def test_there_is_one_worker_for_every_five_items_that_wait() -> None:
    assert follow(QueueLength(1, 100), 120, queue(lambda _: 23))[-1] == 5


def test_a_queue_that_is_empty_takes_workers_away_after_five_minutes() -> None:
    sizes = follow(QueueLength(1, 100), 500, queue(lambda now: 23 if now < 40 else 0))
    assert sizes[320] == 5 and sizes[-1] == 1


def test_with_a_minimum_of_zero_the_last_worker_goes_after_the_cooldown() -> None:
    sizes = follow(QueueLength(0, 100), 800, queue(lambda now: 3 if now < 40 else 0, lambda _: 7))
    assert sizes[390] == 1 and sizes[-1] == 0


def test_what_waits_at_an_empty_pool_activates_it_at_a_poll() -> None:
    scaler = QueueLength(0, 100, cooldown=0.0)
    sizes = follow(scaler, 60, queue(lambda now: 1 if now >= 31 else 0, lambda _: 7))
    assert sizes[20] == 0 and sizes[49] == 0 and sizes[50] == 1
