from __future__ import annotations

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from support.data.items import make_plan
from triptych.base.types import ItemPlan, MMFeature, Placement
from triptych.ec_connector.base import ECConnectorOutput, ECTransferConfig, FailedLoad, Presence
from triptych.ec_connector.connectors.scheduler_role import TableScheduler
from triptych.ec_connector.metadata import LoadId, Reports, TransferMetadata

A, B = make_plan("a"), make_plan("b")


@dataclass
class Request:
    request_id: str
    features: list[MMFeature] = field(default_factory=list)


def request(name: str, *plans: ItemPlan) -> Request:
    return Request(name, [MMFeature(plan, Placement(0, plan.length)) for plan in plans])


def scheduler() -> TableScheduler:
    return TableScheduler(ECTransferConfig())


def step(role: TableScheduler) -> TransferMetadata:
    return role.build_connector_meta(SimpleNamespace())


def fetched(plan: ItemPlan, generation: int | None = None) -> ECConnectorOutput:
    generations = {} if generation is None else {plan.mm_hash: generation}
    return ECConnectorOutput(fetched={plan.mm_hash: 0.1}, generations=generations)


def failed(plan: ItemPlan, generation: int | None = None) -> ECConnectorOutput:
    generations = {} if generation is None else {plan.mm_hash: generation}
    return ECConnectorOutput(failed=[FailedLoad(plan.mm_hash, "gone")], generations=generations)


def ordered(role: TableScheduler, holder: Request) -> TransferMetadata:
    """The orders of the step in which this request's item A is ready."""
    role.add_request(holder)
    role.item_ready(A.mm_hash)
    return step(role)


def with_a_hit(*holders: Request) -> TableScheduler:
    role = scheduler()
    for holder in holders:
        role.add_request(holder)
    role.item_ready(A.mm_hash)
    step(role)
    role.update_connector_output(fetched(A))
    return role


def test_a_host_copy_that_could_not_be_used_is_dropped_at_once() -> None:
    one = request("r1", A)
    role = with_a_hit(one)
    role.update_state_after_alloc(one, 0)
    [moved] = step(role).moves
    role.update_connector_output(failed(A, moved.generation))
    assert role.has_caches(one) == [Presence.MISS]
    assert step(role).drops == (moved,)
    role.request_finished(one)
    assert step(role).drops == ()


def test_a_host_copy_whose_last_request_has_gone_is_dropped_and_not_moved() -> None:
    one = request("r1", A)
    role = with_a_hit(one)
    role.update_state_after_alloc(one, 0)
    role.request_finished(one)
    order = step(role)
    assert (order.moves, [drop.mm_hash for drop in order.drops]) == ((), [A.mm_hash])


def test_an_order_that_failed_is_repeated_without_its_loads() -> None:
    one = request("r1", A)
    role = with_a_hit(one)
    role.update_state_after_alloc(one, 0)
    role.add_request(request("r2", B))
    role.item_ready(B.mm_hash)
    order = step(role)
    assert dict(order.loads()) == {
        A.mm_hash: order.moves[0].generation,
        B.mm_hash: order.fetches[0].generation,
    }
    role.request_finished(one)
    left = step(role)
    assert left.drops and left.without_loads() == left
    assert not list(order.without_loads().loads())


def test_each_item_of_a_request_has_an_answer_of_its_own_in_order() -> None:
    both = request("r1", B, A)
    role = with_a_hit(both)
    assert role.has_caches(both) == [Presence.UNKNOWN, Presence.HIT]


def test_a_miss_is_coming_once_reported_and_is_loaded_again_at_its_next_ready_mark() -> None:
    role, one = scheduler(), request("r1", A)
    ordered(role, one)
    role.update_connector_output(failed(A))
    assert role.has_caches(one) == [Presence.MISS]
    role.item_missing_reported(A.mm_hash)
    assert role.has_caches(one) == [Presence.LOADING]
    assert step(role).fetches == ()
    role.item_ready(A.mm_hash)
    (again,) = step(role).fetches
    role.update_connector_output(fetched(A, again.generation))
    assert role.has_caches(one) == [Presence.HIT]


def test_a_failure_of_a_load_that_began_before_the_last_ready_mark_is_no_miss() -> None:
    role, one = scheduler(), request("r1", A)
    (first,) = ordered(role, one).fetches
    role.item_ready(A.mm_hash)
    assert step(role).fetches == ()
    role.update_connector_output(failed(A, first.generation))
    assert role.has_caches(one) == [Presence.LOADING]
    (second,) = step(role).fetches
    role.update_connector_output(failed(A, second.generation))
    assert role.has_caches(one) == [Presence.MISS]


def test_late_reports_of_an_earlier_load_are_ignored() -> None:
    role, one, two = scheduler(), request("r1", A), request("r2", A)
    (old,) = ordered(role, one).fetches
    role.request_finished(one)
    role.add_request(two)
    role.item_ready(A.mm_hash)
    role.update_connector_output(fetched(A, old.generation))
    assert role.has_caches(two) == [Presence.LOADING]
    (new,) = step(role).fetches
    role.update_connector_output(failed(A, old.generation))
    assert role.has_caches(two) == [Presence.LOADING]
    role.update_connector_output(fetched(A, new.generation))
    role.update_connector_output(failed(A, old.generation))
    assert role.has_caches(two) == [Presence.HIT]


def test_two_holders_share_one_load_and_the_last_one_drops_the_host_copy() -> None:
    one, two = request("r1", A), request("r2", A)
    role = with_a_hit(one, two)
    role.item_ready(A.mm_hash)
    role.release("r1", A.mm_hash)
    assert step(role).drops == ()
    assert role.has_caches(two) == [Presence.HIT]
    role.release("r2", A.mm_hash)
    assert [copy.mm_hash for copy in step(role).drops] == [A.mm_hash]
    assert role.has_caches(two) == [Presence.UNKNOWN]


def test_release_and_finish_are_idempotent() -> None:
    one, two = request("r1", A), request("r2", A)
    role = with_a_hit(one, two)
    for _ in range(3):
        role.release("r1", A.mm_hash)
        role.request_finished(one)
    assert role.has_caches(two) == [Presence.HIT]
    role.request_finished(two)
    role.request_finished(two)
    assert len(step(role).drops) == 1
    assert role.num_held == 0


def test_an_item_that_stands_twice_in_a_prompt_is_kept_until_its_second_place_is_consumed() -> None:
    twice = request("r1", A, A)
    role = with_a_hit(twice)
    role.release("r1", A.mm_hash)
    assert role.has_caches(twice) == [Presence.HIT, Presence.HIT]
    role.release("r1", A.mm_hash)
    assert len(step(role).drops) == 1


def test_a_load_under_way_is_dropped_with_its_last_holder_and_a_queued_one_never_starts() -> None:
    role, one = scheduler(), request("r1", A, B)
    ordered(role, one)
    role.item_ready(B.mm_hash)
    role.request_finished(one)
    last = step(role)
    assert last.fetches == ()
    assert [copy.mm_hash for copy in last.drops] == [A.mm_hash]


def test_a_move_is_recorded_only_for_a_hit_and_once_per_step() -> None:
    both = request("r1", A, B)
    role = with_a_hit(both)
    for index in (0, 1, 0):
        role.update_state_after_alloc(both, index)
    assert [copy.mm_hash for copy in step(role).moves] == [A.mm_hash]


def test_a_step_is_drained_once_and_leaves_the_scheduler_output_alone() -> None:
    both = request("r1", A)
    role = with_a_hit(both)
    role.update_state_after_alloc(both, 0)
    output = SimpleNamespace(scheduled={"r1": 3}, items=[A.mm_hash])
    before = copy.deepcopy(output)
    first, second = role.build_connector_meta(output), role.build_connector_meta(output)
    assert output == before
    assert first.moves and not second.moves
    assert second.step == first.step + 1


def test_a_host_copy_that_was_moved_can_be_moved_again_after_an_eviction() -> None:
    one = request("r1", A)
    role = with_a_hit(one)
    role.update_state_after_alloc(one, 0)
    first = step(role).moves
    role.update_state_after_alloc(one, 0)
    assert step(role).moves == first


def test_keys_without_a_holder_are_not_loaded() -> None:
    role = scheduler()
    role.item_ready(A.mm_hash)
    role.item_missing_reported(A.mm_hash)
    role.release("nobody", A.mm_hash)
    role.update_connector_output(fetched(A))
    assert step(role) == TransferMetadata(1)
    assert role.num_held == 0


def test_a_released_request_may_hold_its_items_again_after_a_preemption() -> None:
    one = request("r1", A)
    role = with_a_hit(one)
    role.release("r1", A.mm_hash)
    orders = ordered(role, one)
    assert len(orders.drops) == len(orders.fetches) == 1
    assert orders.drops[0].generation < orders.fetches[0].generation


@pytest.mark.parametrize("move_first", [True, False])
def test_the_end_of_an_earlier_loads_move_does_not_hide_that_a_later_load_has_arrived(move_first):
    role, reports, key = scheduler(), Reports(lambda: None), A.mm_hash
    first, second = request("r1", A), request("r2", A)
    (earlier,) = ordered(role, first).fetches
    role.update_connector_output(fetched(A))
    role.request_finished(first)  # while its item is being moved
    step(role)
    (later,) = ordered(role, second).fetches
    calls = [
        lambda: reports.loaded(LoadId(key, earlier.generation)),
        lambda: reports.fetched(LoadId(key, later.generation), 0.1),
    ]
    for call in calls if move_first else reversed(calls):
        call()
    output = reports.drain()
    assert output.loaded == [key]
    role.update_connector_output(output)
    assert role.has_caches(second) == [Presence.HIT], "a request would wait for ever for what is there"
