"""Tenants are served in turns by what they have had; a tenant with nothing in the batch never waits long."""

from __future__ import annotations

import random
from collections import Counter
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine.engine_requests import (
    STORE,
    Make,
    ModellessEngine,
    finished,
    make_feature,
    make_request,
    names,
    publish,
)
from support.engine.tight_engine import ROW_BYTES, TightEngine, serve, tight_requests
from support.matrix import matrix
from triptych.ec_connector.connectors.memory import MemoryStore
from triptych.pd_worker.core import step_shares
from triptych.pd_worker.core.outputs import SchedulerOutput
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.core.tenant_turns import TenantTurns

LONG = 3000
PROMPT = 12


def of(tenant: str, name: str, prompt: int = PROMPT, arrival: float = 0.0, **more: object) -> EngineRequest:
    """A request of the tenant whose prompt is nobody else's."""
    tokens = [hash((tenant, name, i)) % 50 for i in range(prompt)]
    request = make_request(f"{tenant}{name}", tokens, arrival=arrival, **more)  # type: ignore[arg-type]
    request.tenant = tenant
    return request


def flood(engine: ModellessEngine, count: int, prompt: int = PROMPT, tenant: str = "a") -> None:
    """A fills the engine with long answers, and its queue behind."""
    engine.add(*(of(tenant, str(i), prompt, arrival=i / 1000, max_tokens=LONG) for i in range(count)))


def steps_to_first_token(engine: ModellessEngine, name: str, limit: int = 300) -> int:
    for step in range(1, limit):
        engine.step()
        if any(event.request_id == name for event in engine.of("tokens")):
            return step
    raise AssertionError(f"{name} has no token in {limit} steps")


def roomy(make: Make, **more: int) -> ModellessEngine:
    options = {"num_blocks": 4096, "block_size": 4, "budget": 64, "max_num_seqs": 16, "max_model_len": 8192}
    return make(**(options | more))


@pytest.mark.parametrize(
    ("what", "options", "prompt"),
    [
        ("slots", {"max_num_seqs": 16}, PROMPT),
        ("blocks", {"num_blocks": 64, "max_num_seqs": 64, "max_model_len": 250}, PROMPT),
        ("prefill tokens", {"max_num_seqs": 64}, 6000),
    ],
)
def test_a_tenants_first_token_comes_within_eight_steps_and_its_own_prefill_however_full_the_engine_is(
    make, what, options, prompt
):
    engine = roomy(make, **options)
    flood(engine, 64, prompt)
    for _ in range(40):
        engine.step()
    own = 130
    engine.add(of("b", "hi", own, arrival=9.0, max_tokens=4))
    budget = engine.scheduler.limits.prefill_cap
    assert steps_to_first_token(engine, "bhi") <= 8 + -(-own // budget)
    engine.scheduler.cancel([f"a{i}" for i in range(64)], "proxy")
    engine.run_out()


def test_a_tenant_that_asks_again_and_again_beside_a_flood_waits_each_time_a_few_steps(make):
    engine = roomy(make)
    flood(engine, 64)
    for _ in range(40):
        engine.step()
    for turn in range(10):
        engine.add(of("b", str(turn), arrival=9.0 + turn, max_tokens=2))
        assert steps_to_first_token(engine, f"b{turn}") <= 8
    engine.scheduler.cancel([f"a{i}" for i in range(64)], "proxy")
    engine.run_out()
    assert len(finished(engine)) == 74


def test_a_request_that_gave_way_goes_on_where_it_stopped(make):
    engine = roomy(make, max_num_seqs=2)
    for name in ("1", "2"):
        engine.add(of("a", name, max_tokens=40, arrival=float(name)))
    for _ in range(10):
        engine.step()
    engine.add(of("b", "hi", arrival=9.0, max_tokens=3))
    outputs = engine.run_out()
    assert [names_of(output) for output in outputs if output.preempted] == [["a2"]]
    assert sum(output.gave_way for output in outputs) == 1
    positions = [event.position for event in engine.of("tokens") if event.request_id == "a2"]
    assert positions == list(range(40))


def names_of(output: SchedulerOutput) -> list[str]:
    return [state.request.request_id for state in output.preempted]


def test_a_tenant_with_one_request_in_the_batch_is_never_preempted_for_another_one(make):
    engine = roomy(make, max_num_seqs=2)
    engine.add(of("a", "1", max_tokens=30), of("b", "1", max_tokens=30))
    engine.step()
    engine.add(of("c", "1", arrival=1.0, max_tokens=2))
    assert not [output for output in engine.run_out() if output.preempted]


def test_a_free_slot_goes_to_the_tenant_with_the_least_service(make):
    engine = roomy(make, max_num_seqs=4)
    flood(engine, 20)
    for _ in range(30):
        engine.step()
    engine.add(*(of("b", str(i), arrival=5.0 + i, max_tokens=200) for i in range(6)))
    for _ in range(30):
        engine.step()
    running = Counter(state.tenant for state in engine.scheduler.running)
    assert running == {"a": 3, "b": 1}, "one has given way, and no more than one"
    engine.scheduler.cancel(["a0", "a1"], "proxy")
    for _ in range(4):
        engine.step()
    running = Counter(state.tenant for state in engine.scheduler.running)
    assert running["b"] == 3
    engine.scheduler.cancel([f"a{i}" for i in range(20)], "proxy")
    engine.run_out()


def test_prompts_that_are_computed_at_once_share_the_steps(make):
    engine = roomy(make, budget=32)
    engine.add(of("a", "long", 4000))
    engine.step()
    engine.add(*(of("b", str(i), 320, arrival=1.0 + i) for i in range(3)))
    had: Counter[str] = Counter()
    for _ in range(40):
        for chunk in engine.step().chunks:
            had[chunk.state.tenant] += chunk.count
    assert abs(had["a"] - had["b"]) <= 2 * 32
    engine.run_out()


def test_a_tenant_collects_no_claim_while_it_is_idle(make):
    engine = roomy(make, budget=32)
    engine.add(of("b", "first", 8))
    engine.run_out()
    engine.add(of("a", "long", 4000))
    for _ in range(60):
        engine.step()
    engine.add(*(of("b", str(i), 600, arrival=1.0 + i) for i in range(3)))
    had: Counter[str] = Counter()
    for _ in range(20):
        for chunk in engine.step().chunks:
            had[chunk.state.tenant] += chunk.count
    assert had["a"] >= had["b"] - 2 * 32, "it takes no more than half for having been away"
    engine.run_out()


def test_room_for_items_goes_in_turns(make):
    image = [make_feature(str(index), 1, 4) for index in range(12)]
    engine = make(capacity=2 * image[0].plan.nbytes, max_num_seqs=16)
    for index in range(8):
        request = make_request(f"a{index}", 8, [image[index]], ready=[], arrival=float(index))
        request.tenant = "a"
        engine.add(request)
    engine.step()
    request = make_request("b", 8, [image[8]], ready=[], arrival=50.0)
    request.tenant = "b"
    engine.add(request)
    engine.arrive(*image[:2])
    for _ in range(6):
        engine.step()
    assert names(engine.of("admitted"))[:3] == ["a0", "a1", "b"]
    engine.arrive(*image)
    engine.run_out()


def full_of_pictures(make: Make, running: int, waiting: int, **more: int) -> tuple[ModellessEngine, list]:
    """A's long answers in every slot, its next requests behind, whose pictures take all room, and B's one."""
    image = [make_feature(str(index), 1, 4) for index in range(waiting + 2)]
    options = {"capacity": waiting * image[0].plan.nbytes, "max_num_seqs": running, "max_model_len": 8192}
    engine = make(**({"num_blocks": 4096, "budget": 64} | options | more))
    flood(engine, running)
    engine.step()
    for index in range(waiting):
        request = make_request(f"p{index}", 8, [image[index]], ready=[], arrival=1.0 + index)
        request.tenant = "a"
        engine.add(request)
    engine.arrive(*image[:waiting])
    for _ in range(3):
        engine.step()
    assert engine.admission.reserved == engine.admission.capacity
    asked = make_request("b", 8, [image[waiting]], ready=[], arrival=50.0)
    asked.tenant = "b"
    engine.add(asked)
    return engine, image


def test_a_tenants_first_picture_gets_the_room_of_another_ones_that_only_wait(make):
    engine, image = full_of_pictures(make, 4, 3)
    engine.step()
    assert names(engine.of("admitted"))[-1] == "b"
    engine.arrive(image[3])
    assert steps_to_first_token(engine, "b") <= 8
    engine.scheduler.cancel([f"a{index}" for index in range(4)], "proxy")
    engine.run_out()
    assert {"p0", "p1", "p2"} <= set(finished(engine)), "who gave room up is served later"
    assert names(engine.of("admitted")).count("p2") == 1, "a client hears of one admission"
    assert not engine.of("item_missing"), "what is in the store is loaded again, not encoded again"


def test_a_picture_that_is_still_being_encoded_when_its_request_gives_room_up_is_waited_for(make):
    engine, image = full_of_pictures(make, 1, 2)
    late = make_feature("late", 1, 4)
    engine.scheduler.cancel(["p1"], "proxy")
    request = make_request("q", 8, [late], ready=[], arrival=3.0)
    request.tenant = "a"
    engine.scheduler.cancel(["b"], "proxy")
    engine.add(request)
    engine.step()
    asked = make_request("b2", 8, [image[3]], ready=[], arrival=51.0)
    asked.tenant = "b"
    engine.add(asked)
    engine.step()
    assert names(engine.of("admitted"))[-2:] == ["q", "b2"]
    engine.scheduler.cancel(["b2", "a0"], "proxy")
    for _ in range(6):
        engine.step()
    assert not engine.of("item_missing")
    engine.arrive(late)
    engine.run_out()
    assert "q" in finished(engine)


@pytest.mark.parametrize("waiting", [1, 2])
def test_the_earliest_picture_of_a_tenant_without_any_other_request_keeps_its_room(make, waiting):
    image = [make_feature(str(index), 1, 4) for index in range(4)]
    engine = make(capacity=waiting * image[0].plan.nbytes)
    for index in range(waiting):
        request = make_request(f"p{index}", 8, [image[index]], ready=[], arrival=float(index))
        request.tenant = "a"
        engine.add(request)
    engine.step()
    asked = make_request("b", 8, [image[3]], ready=[], arrival=9.0)
    asked.tenant = "b"
    engine.add(asked)
    for _ in range(3):
        engine.step()
    assert ("b" in names(engine.of("admitted"))) is (waiting > 1)
    engine.arrive(*image)
    engine.run_out()
    assert len(finished(engine)) == waiting + 1


def test_room_is_given_up_once_and_not_to_and_fro(make):
    engine, image = full_of_pictures(make, 2, 4)
    for index in range(3):
        request = make_request(f"b{index}", 8, [make_feature(f"b{index}", 1, 4)], ready=[], arrival=60.0)
        request.tenant = "b"
        engine.add(request)
    put_off: Counter[str] = Counter()
    for _ in range(30):
        before = {state.request.request_id for state in engine.scheduler._requests if state.admitted}
        engine.step()
        after = {state.request.request_id for state in engine.scheduler._requests if state.admitted}
        put_off.update(before - after)
    assert put_off == {"p3": 1}
    engine.scheduler.cancel([f"a{index}" for index in range(2)], "proxy")
    engine.arrive(image[4], *(make_feature(f"b{index}", 1, 4) for index in range(3)))
    engine.run_out()


def test_requests_without_a_tenant_are_one_tenant_in_order_of_arrival(make):
    engine = make(budget=16, max_num_seqs=1)
    for index in reversed(range(5)):
        engine.add(of("", str(index), 4, arrival=float(index)))
    assert [output.chunks[0].state.request.request_id for output in engine.run_out()] == list("01234")


def test_what_a_tenant_had_before_wears_off_while_another_one_is_alone():
    turns = TenantTurns()
    turns.add("a")
    turns.add("b")
    turns.charge("b", 1000)
    turns.remove("b")
    turns.charge_only(5000)
    turns.add("b")
    turns.charge("a", 1)
    assert turns.next(["a", "b"]) == "b"


def test_turns_of_few_tenants_hold_nothing_of_those_that_have_gone():
    turns = TenantTurns()
    turns.add("stays")
    for index in range(1000):
        tenant = str(index)
        turns.add(tenant)
        turns.charge("stays", 10)
        turns.start(tenant)
        turns.charge(tenant, 5)
        turns.stop(tenant)
        turns.remove(tenant)
    assert len(turns._service._service) < 100
    turns.remove("stays")
    assert not turns._service._service
    assert (turns.waiting(), turns.several, turns.richest()) == (0, False, None)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30), rows=st.integers(6, 14), tenants=st.integers(2, 5))
def test_requests_of_several_tenants_that_fill_the_memory_to_the_last_byte_all_end(seed, rows, tenants):
    rng = random.Random(seed)
    store = MemoryStore()
    engine = TightEngine(
        store,
        capacity=rows * ROW_BYTES,
        num_blocks=rng.randint(10, 20),
        max_model_len=40,
        budget=rng.choice([3, 8, 16]),
        max_num_seqs=rng.randint(1, 5),
        prefix_caching=rng.random() < 0.5,
    )
    requests = tight_requests(rng, rows, 8)
    for request in requests:
        request.tenant = rng.choice("abcde"[:tenants])
    try:
        assert serve(engine, rng, requests, limit=400), "requests wait for ever"
        assert len(finished(engine)) == 8
        engine.assert_at_rest()
    finally:
        engine.close()


@pytest.mark.parametrize(("host_blocks", "slots"), matrix([(0, 0), (12, 0), (0, 8)], quick=2))
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_all_requests_end_whoever_comes_and_gives_way(host_blocks, slots, seed):
    rng = random.Random(seed)
    STORE.clear()
    engine = ModellessEngine(
        STORE,
        num_blocks=rng.randint(10, 24),
        budget=rng.choice([3, 8, 16]),
        max_num_seqs=rng.randint(1, 6),
        max_model_len=40,
        prefix_caching=rng.random() < 0.7,
        host_blocks=host_blocks,
        slots=slots,
        snapshots=4 if slots else 0,
        capacity=16 * rng.randint(12, 30),
    )
    waiting = []
    for index in range(20):
        items = [make_feature(f"i{index % 4}", 1, 3)] if rng.random() < 0.4 else []
        publish(STORE, *items)
        request = make_request(
            f"r{index}", [rng.randint(0, 1)] * rng.randint(4, 20), items,
            max_tokens=rng.randint(1, 16), arrival=float(index), attempt=rng.choice((1, 1, 2)),
        )  # fmt: skip
        request.tenant = rng.choice("abc")
        waiting.append(request)
    with patch.object(step_shares, "CROWD_ROWS", rng.choice((1, 4))):
        for _ in range(600):
            if waiting and rng.random() < 0.4:
                engine.add(waiting.pop())
            engine.step(seconds=lambda output: rng.random())
            if not waiting and engine.idle:
                break
    assert len(finished(engine)) == 20
    engine.assert_at_rest()
