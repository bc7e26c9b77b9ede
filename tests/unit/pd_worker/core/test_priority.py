"""A request's priority decides inside its tenant, and between tenants nothing."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine.engine_requests import Make, ModellessEngine, finished, make_feature, make_request, names
from support.engine.tight_engine import ROW_BYTES, TightEngine, serve, tight_requests
from triptych.ec_connector.connectors.memory import MemoryStore
from triptych.pd_worker.core.request import EngineRequest

STORE = MemoryStore()


def asked(name: str, priority: int, arrival: float, prompt: int = 4, **more: object) -> EngineRequest:
    """A request of the tenant that its first letter names, whose prompt is nobody else's."""
    tokens = [hash((name, place)) % 50 for place in range(prompt)]
    request = make_request(name, tokens, arrival=arrival, **more)  # type: ignore[arg-type]
    return replace(request, tenant=name[0], priority=priority)


def starts(engine: ModellessEngine) -> list[str]:
    """Who begins, in order, until all have ended."""
    found = [chunk.state.request.request_id for output in engine.run_out() for chunk in output.chunks]
    return list(dict.fromkeys(found))


def test_a_lower_priority_starts_first_and_equal_ones_by_arrival(make: Make) -> None:
    engine = make(max_num_seqs=1)
    engine.add(asked("a1", 5, 1.0), asked("a2", 0, 2.0), asked("a3", -7, 3.0), asked("a4", 0, 4.0))
    assert starts(engine) == ["a3", "a2", "a4", "a1"]


def test_what_was_under_way_starts_before_any_priority(make: Make) -> None:
    engine = make(max_num_seqs=1)
    engine.add(asked("a1", -9, 1.0), asked("a2", 9, 2.0, attempt=2))
    assert starts(engine) == ["a2", "a1"]


def test_room_for_items_goes_by_priority(make: Make) -> None:
    image = [make_feature(name, 1, 4) for name in "abc"]
    engine = make(capacity=image[0].plan.nbytes)
    for at, priority in enumerate((0, 3, -3)):
        request = make_request(f"a{at}", 8, [image[at]], ready=[], arrival=float(at))
        engine.add(replace(request, tenant="a", priority=priority))
        engine.step()
    engine.arrive(*image)
    engine.run_out()
    assert names(engine.of("admitted")) == ["a0", "a2", "a1"]


def test_a_lower_priority_starts_and_goes_on_before_a_prompt_that_is_under_way(make: Make) -> None:
    engine = make(num_blocks=256, max_num_seqs=4)
    engine.add(asked("a1", 1, 1.0, prompt=64))
    engine.step()
    engine.add(asked("a2", 0, 2.0, prompt=64))
    assert [chunk.state.request.request_id for output in engine.run_out() for chunk in output.chunks] == [
        *["a2"] * 4,
        *["a1"] * 3,
    ]


def test_an_equal_priority_starts_behind_a_prompt_that_is_under_way(make: Make) -> None:
    engine = make(num_blocks=256, max_num_seqs=4)
    engine.add(asked("a1", 1, 1.0, prompt=64))
    engine.step()
    engine.add(asked("a2", 1, 2.0, prompt=16))
    assert starts(engine) == ["a1", "a2"]


def test_the_highest_priority_gives_its_blocks_up_and_not_the_latest(make: Make) -> None:
    engine = make(num_blocks=4, prefix_caching=False)
    engine.add(asked("a1", 1, 0.0, max_tokens=12), asked("a2", 0, 5.0, max_tokens=12))
    preempted = [state.request.request_id for output in engine.run_out() for state in output.preempted]
    assert set(preempted) == {"a1"}
    assert set(finished(engine)) == {"a1", "a2"}


def test_between_tenants_with_one_each_the_latest_gives_way_whatever_its_priority(make: Make) -> None:
    engine = make(num_blocks=4, prefix_caching=False)
    engine.add(asked("a1", 1, 0.0, max_tokens=12), asked("b1", -1, 5.0, max_tokens=12))
    preempted = [state.request.request_id for output in engine.run_out() for state in output.preempted]
    assert set(preempted) == {"b1"}


def test_of_a_tenant_that_leaves_places_to_another_the_highest_priority_goes(make: Make) -> None:
    engine = make(num_blocks=256, max_num_seqs=2)
    engine.add(asked("a1", 4, 1.0, max_tokens=40), asked("a2", 0, 2.0, max_tokens=40))
    for _ in range(5):
        engine.step()
    engine.add(asked("b1", 9, 9.0, max_tokens=3))
    gone = [state.request.request_id for output in engine.run_out() for state in output.preempted]
    assert gone == ["a1"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-3, 3)), min_size=4, max_size=30),
    st.sampled_from([{"max_num_seqs": 2}, {"budget": 8}]),
    st.sampled_from([4, 20]),
)
def test_tenants_have_the_steps_that_they_have_without_priorities(given_ones, options, prompt) -> None:
    def steps(*, with_priorities: bool) -> list[Counter[str]]:
        engine = ModellessEngine(STORE, **{"num_blocks": 64, **options})
        for at, (tenant, priority) in enumerate(given_ones):
            request = asked(f"{tenant}{at}", priority * with_priorities, float(at), prompt, max_tokens=6)
            engine.add(request)
        had, tokens = Counter[str](), []
        for output in engine.run_out():
            for chunk in output.chunks:
                had[chunk.state.tenant] += chunk.count
            tokens.append(had.copy())
        return tokens

    ordered, plain = steps(with_priorities=True), steps(with_priorities=False)
    # Of tenants that have had the same, either may be next.
    for one, other in zip(ordered, plain, strict=False):
        assert all(abs(one[tenant] - other[tenant]) <= 2 * 16 for tenant in "abc")


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30), rows=st.integers(6, 14), one_by_one=st.booleans())
def test_requests_of_any_priorities_that_fill_the_memory_all_end(seed, rows, one_by_one) -> None:
    rng = random.Random(seed)
    engine = TightEngine(
        STORE,
        capacity=rows * ROW_BYTES,
        one_by_one=one_by_one,
        num_blocks=rng.randint(10, 20),
        max_model_len=40,
        budget=rng.choice([3, 8, 16]),
        max_num_seqs=rng.randint(1, 5),
        prefix_caching=rng.random() < 0.5,
    )
    requests = tight_requests(rng, rows, 8)
    for request in requests:
        request.priority, request.tenant = rng.randint(-2, 2), rng.choice("aab")
    try:
        assert serve(engine, rng, requests, limit=400), "requests wait for ever"
        assert len(finished(engine)) == 8
    finally:
        engine.close()
