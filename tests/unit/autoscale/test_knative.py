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


def test_pods_have_seventy_percent_of_their_concurrency_on_average() -> None:
    assert follow(lambda _: 28, 200)[-1] == 5  # 28 / (8 · 0.7)


def test_twice_what_the_pods_can_have_is_met_within_the_panic_window() -> None:
    sizes = follow(lambda now: 2 if now < 100 else 56, 200)
    assert sizes[99] == 1 and max(sizes[:107]) == 10


def test_no_pod_is_taken_away_in_panic() -> None:
    sizes = follow(lambda now: 56 if 100 <= now < 110 else 2, 400)
    peak = max(sizes)
    last = max(now for now, size in enumerate(sizes) if size == peak)
    assert last >= 160 and sizes[-1] == 1


def test_pods_are_at_most_halved_in_one_decision() -> None:
    sizes = follow(lambda now: 112 if now < 200 else 0, 500, workers=20)
    falls = [(before, after) for before, after in zip(sizes, sizes[1:], strict=False) if after < before]
    assert falls and all(after >= before // 2 for before, after in falls)


def test_the_last_pod_goes_when_a_whole_stable_window_was_empty() -> None:
    sizes = follow(lambda now: 1 if now < 30 else 0, 200)
    assert sizes[88] == 1 and sizes[92] == 0


def test_the_first_item_wakes_an_empty_pool_at_once() -> None:
    sizes = follow(lambda now: 1 if now >= 101 else 0, 110, workers=0)
    assert sizes[100] == 0 and sizes[101] == 1
