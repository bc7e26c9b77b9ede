"""Admission of items to the embedding memory, and for whom a worker is kept."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from support.engine.engine_requests import STORE, Make, finished, make_feature, make_request, publish, shares
from triptych.base.errors import ConfigError, ContextTooLong, InvalidRequest
from triptych.base.types import FinishReason
from triptych.pd_worker.core.admission import (
    Admission,
    AdmissionQueue,
    SchedulerLimits,
    check_request,
    distinct_bytes,
)
from triptych.pd_worker.isolation import ARRIVAL_SECONDS, Isolation


def test_a_sum_above_the_capacity_is_refused_with_the_sizes_and_the_flag() -> None:
    features = [make_feature("a", 0, 40), make_feature("b", 50, 30)]
    with pytest.raises(InvalidRequest, match=r"640 B \+ 480 B = 1.1 KiB.*--encoder-cache-memory is 1.0 KiB"):
        Admission(1024).check(features)


@pytest.mark.parametrize(("prompt", "received"), [(10, 0), (8, 2), (8, 3)])
def test_prompt_and_received_output_that_leave_no_token_of_the_model_are_refused(prompt, received):
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=10)
    request = make_request("r", prompt)
    request.output_token_ids.extend(range(received))
    with pytest.raises(ContextTooLong, match=f"has {prompt + received} tokens"):
        check_request(request, limits, None)


@pytest.mark.parametrize(("received", "finished"), [(1, None), (2, FinishReason.STOP)])
def test_a_resumed_request_that_has_a_token_left_or_had_ended_is_taken(received, finished):
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=10)
    request = make_request("r", 8)
    request.output_token_ids.extend(range(received))
    request.output.finished = finished
    check_request(request, limits, None)


def test_a_repeated_item_counts_once() -> None:
    features = [make_feature("a", 0, 40), make_feature("a", 50, 40)]
    assert distinct_bytes(features) == {features[0].mm_hash: 640}
    Admission(1024).check(features)


def test_all_items_are_promised_or_none() -> None:
    admission = Admission(100)
    assert admission.reserve("r", {"a": 60})
    assert not admission.reserve("s", {"b": 30, "c": 20})
    assert admission.reserved == 60
    assert admission.reserve("s", {"b": 30})


def test_requests_that_share_an_item_share_its_promise() -> None:
    admission = Admission(100)
    assert admission.reserve("r", {"a": 80})
    assert admission.reserve("s", {"a": 80, "b": 20})
    admission.release("r", "a")
    assert admission.reserved == 100
    admission.release_request("s")
    assert admission.reserved == 0


def test_releasing_twice_is_releasing_once() -> None:
    admission = Admission(100)
    admission.reserve("r", {"a": 40})
    admission.reserve("s", {"a": 40})
    for _ in range(2):
        admission.release("r", "a")
        admission.release_request("r")
    assert admission.reserved == 40


def test_asking_again_for_what_is_held_costs_nothing() -> None:
    admission = Admission(100)
    assert admission.reserve("r", {"a": 100})
    assert admission.reserve("r", {"a": 100})
    admission.release_request("r")
    assert admission.reserved == 0


@dataclass(frozen=True)
class Waiter:
    name: str
    own_order: tuple[bool, int, float, str]
    nbytes: int
    tenant: str = ""


def queue_of(*sizes: int) -> AdmissionQueue[Waiter]:
    """Waiters `0`, `1`, ... of these sizes, the last one queued first."""
    queue = AdmissionQueue[Waiter]()
    for number, nbytes in reversed(list(enumerate(sizes))):
        name = str(number)
        queue.add(Waiter(name, (True, 0, float(number), name), nbytes), has_items=nbytes > 0)
    return queue


def test_what_has_no_items_passes_what_does_not_fit_and_nothing_else_does() -> None:
    admission, queue = Admission(100), queue_of(60, 50, 10, 0)

    def admitted() -> list[str]:
        taken = queue.admit(lambda waiter: admission.reserve(waiter.name, {waiter.name: waiter.nbytes}))
        return [waiter.name for waiter, _ in taken]

    assert admitted() == ["0", "3"]
    admission.release_request("0")
    assert admitted() == ["1", "2"]


def test_a_refused_request_leaves_with_its_error_and_keeps_no_one_waiting() -> None:
    queue, refusal = queue_of(1, 1), InvalidRequest("no")

    def take(waiter: Waiter) -> bool:
        if waiter.name == "0":
            raise refusal
        return True

    assert [(waiter.name, error) for waiter, error in queue.admit(take)] == [("0", refusal), ("1", None)]
    assert list(queue.admit(take)) == []


ME, OTHER = ("p1", "r1"), ("p1", "r2")


def claimed(tokens: int = 4) -> Isolation:
    isolation = Isolation()
    assert isolation.claim(ME, tokens, None, 0.0)
    return isolation


def test_a_worker_that_is_reserved_for_no_request_takes_all() -> None:
    assert Isolation().admits(OTHER, None, 0.0)


def test_until_its_request_comes_a_worker_takes_no_other_one_for_a_while() -> None:
    isolation = claimed()
    assert not isolation.admits(OTHER, None, ARRIVAL_SECONDS - 1)
    assert isolation.admits(ME, None, ARRIVAL_SECONDS - 1)
    assert claimed().admits(OTHER, None, ARRIVAL_SECONDS)


def test_a_request_has_the_worker_to_itself_until_it_has_put_out_its_tokens() -> None:
    isolation = claimed(tokens=4)
    assert isolation.admits(ME, None, 1.0)
    assert not isolation.admits(OTHER, 0, 100.0)
    assert not isolation.admits(OTHER, 3, 100.0)
    assert isolation.admits(OTHER, 4, 100.0)
    assert isolation.admits(OTHER, 0, 100.0)


def test_a_request_that_ended_before_anybody_else_came_does_not_keep_the_worker() -> None:
    isolation = claimed()
    assert isolation.admits(ME, None, 1.0)
    assert isolation.admits(OTHER, None, 1.0)


def test_a_request_that_is_cancelled_before_it_came_frees_the_worker() -> None:
    isolation = claimed()
    isolation.free(OTHER)
    assert not isolation.admits(OTHER, None, 1.0)
    isolation.free(ME)
    assert isolation.admits(OTHER, None, 1.0)


def test_another_proxy_waits_for_its_turn_and_the_same_one_takes_it_over() -> None:
    isolation = claimed()
    assert not isolation.claim(("p2", "r9"), 4, None, 1.0)
    assert not isolation.claim(("p2", "r9"), 4, 3, 1.0)
    assert isolation.claim(OTHER, 4, 3, 1.0)
    assert isolation.key == OTHER


def test_a_reservation_of_a_worker_always_ends() -> None:
    draw = random.Random(7)
    for _ in range(300):
        isolation, now, here = Isolation(), 0.0, {}
        for _ in range(draw.randint(1, 20)):
            key = (draw.choice("pq"), draw.choice("rs"))
            produced = here.get(isolation.key)
            action = draw.random()
            if action < 0.3:
                if isolation.claim(key, 4, produced, now):
                    here.clear()
            elif action < 0.6:
                kept = isolation.key
                if isolation.admits(key, produced, now):
                    assert kept in (None, key) or isolation.key is None
                    here[key] = 0
            elif action < 0.8 and here:
                here[draw.choice(sorted(here))] += 1
            elif here:
                del here[draw.choice(sorted(here))]
            now += draw.random() * 4
        here.clear()
        assert isolation.admits(("z", "z"), None, now + ARRIVAL_SECONDS)


def test_a_paused_request_is_not_scheduled_and_its_place_and_blocks_are_free_for_others(make: Make) -> None:
    engine = make(max_num_seqs=1, num_blocks=6, block_size=4, max_model_len=24)
    engine.add(make_request("a", 8, max_tokens=12), make_request("b", [9] * 8, max_tokens=9, arrival=1.0))
    engine.step()
    engine.scheduler.pause(["a", "unknown"], [], "proxy")
    engine.run_out()
    assert set(finished(engine)) == {"b"}
    assert [event.position for event in engine.of("tokens") if event.request_id == "a"] == [0]
    engine.scheduler.pause([], ["a"], "proxy")
    engine.run_out()
    assert [event.position for event in engine.of("tokens") if event.request_id == "a"] == [*range(12)]


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
    assert len(engine.of("tokens")) == 1
    engine.scheduler.pause([], ["a"], "proxy")
    engine.run_out()
    assert finished(engine)["a"].completion_tokens == 5


def test_a_paused_request_keeps_no_host_copy_of_an_item_that_it_has_not_read(make: Make) -> None:
    engine, image = make(budget=4), make_feature("cat", 6, 6)
    publish(STORE, image)
    engine.add(make_request("a", 16, [image], max_tokens=3))
    engine.step()
    assert engine.connector.num_held == 1
    engine.scheduler.pause(["a"], [], "proxy")
    engine.run_out()
    assert (engine.of("tokens"), engine.connector.num_held) == ([], 0)
    engine.scheduler.pause([], ["a"], "proxy")
    engine.run_out()
    assert finished(engine)["a"].completion_tokens == 3


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
def test_requests_that_are_paused_at_random_end_with_all_tokens_and_leave_nothing(make, seed, preemption):
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
        positions = [event.position for event in engine.of("tokens") if event.request_id == name]
        assert positions == list(range(finished(engine)[name].completion_tokens))


@pytest.mark.parametrize("budget", [1, -5])
def test_a_step_without_a_token_for_prompts_beside_text_is_refused(budget: int) -> None:
    with pytest.raises(ConfigError, match=f"--max-num-batched-tokens {budget} .* give 2 or more, or 0"):
        SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=budget, max_model_len=10)


@pytest.mark.parametrize("budget", [2, 3, 16])
def test_a_prompt_is_prefilled_beside_text_whatever_the_budget_of_a_step(make: Make, budget: int) -> None:
    engine = make(budget=budget)
    engine.add(make_request("text", 2, max_tokens=30))
    while not engine.of("tokens"):
        engine.step()
    engine.add(make_request("prompt", [9] * 4, max_tokens=1, arrival=1.0))
    for _ in range(6):
        assert shares(engine.step())[0][0] == "text"
    assert "prompt" in finished(engine)
    assert "text" not in finished(engine)
