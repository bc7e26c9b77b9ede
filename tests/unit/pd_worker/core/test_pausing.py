from __future__ import annotations

import random

import pytest

from support.engine.engine_requests import STORE, Make, finished, make_feature, make_request, publish, shares
from triptych.base.types import FinishReason
from triptych.pd_worker.core.request_events import NewTokens


def test_a_paused_request_is_not_scheduled_and_its_place_and_blocks_are_free_for_others(make: Make) -> None:
    engine = make(max_num_seqs=1, num_blocks=6, block_size=4, max_model_len=24)
    engine.add(make_request("a", 8, max_tokens=12), make_request("b", [9] * 8, max_tokens=9, arrival=1.0))
    engine.step()
    engine.scheduler.pause(["a", "unknown"], [], "proxy")
    engine.run_out()
    assert set(finished(engine)) == {"b"}
    assert [event.position for event in engine.of(NewTokens) if event.request_id == "a"] == [0]
    engine.scheduler.pause([], ["a"], "proxy")
    engine.run_out()
    assert [event.position for event in engine.of(NewTokens) if event.request_id == "a"] == [*range(12)]
    engine.assert_at_rest()


def test_a_resumed_request_finds_its_blocks_in_the_prefix_cache(make: Make) -> None:
    engine = make(block_size=4)
    engine.add(make_request("a", 9, max_tokens=4))
    engine.step()
    engine.scheduler.pause(["a"], [], "proxy")
    engine.step()
    engine.scheduler.pause([], ["a"], "proxy")
    assert shares(engine.step()) == [("a", 8, 2)]


def test_a_request_paused_while_it_waits_starts_and_stops_after_that_step(make: Make) -> None:
    engine = make()
    engine.add(make_request("a", 4, max_tokens=5))
    engine.scheduler.pause(["a"], [], "proxy")
    engine.run_out()
    assert len(engine.of(NewTokens)) == 1
    engine.scheduler.pause([], ["a"], "proxy")
    engine.run_out()
    assert finished(engine)["a"].usage.completion_tokens == 5


def test_a_pause_of_another_proxy_is_ignored_and_a_later_attempt_is_not_paused(make: Make) -> None:
    engine = make()
    engine.add(make_request("a", 4, max_tokens=8))
    engine.step()
    engine.scheduler.pause(["a"], [], "stranger")
    assert shares(engine.step()) == [("a", 4, 1)]
    engine.scheduler.pause(["a"], [], "proxy")
    engine.add(make_request("a", 4, max_tokens=8, attempt=2))
    engine.run_out()
    assert finished(engine)["a"].reason is FinishReason.LENGTH


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("seed", range(40))
def test_requests_that_are_paused_at_random_end_with_all_tokens_and_leave_nothing(
    make: Make, seed: int, preemption: str
) -> None:
    rng = random.Random(seed)
    swap = {"host_blocks": 8} if preemption == "swap" else {}
    engine = make(num_blocks=10, block_size=4, max_model_len=40, max_num_seqs=3, capacity=16 * 6, **swap)
    images = [make_feature(name, 0, 6) for name in ("cat", "dog")]
    publish(STORE, *images)
    names = [f"r{number}" for number in range(6)]
    for number, name in enumerate(names):
        image = [rng.choice(images)] if rng.random() < 0.5 else []
        engine.add(make_request(name, [3] * 8, image, max_tokens=rng.randint(4, 20), arrival=number))
    paused: set[str] = set()
    for _ in range(60):
        chosen = {name for name in names if rng.random() < 0.3}
        engine.scheduler.pause(sorted(chosen - paused), sorted(chosen & paused), "proxy")
        paused ^= chosen
        engine.step()
    engine.scheduler.pause([], sorted(paused), "proxy")
    engine.run_out()
    assert {event.reason for event in finished(engine).values()} == {FinishReason.LENGTH}
    for name in names:
        positions = [event.position for event in engine.of(NewTokens) if event.request_id == name]
        assert positions == list(range(finished(engine)[name].usage.completion_tokens))
    engine.assert_at_rest()
