"""Requests that wait for a PD worker are handed over in turns between tenants."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from support.hostile.operations import operations
from triptych.base.types import SamplingParams
from triptych.proxy.call.chat import ChatCall
from triptych.proxy.pd.waiting import WaitingSubmits
from triptych.proxy.requests.instructions import Submit
from triptych.proxy.requests.request import InFlightRequest

ORDER = Submit(1)


def request(name: str, order: int, *, resumed: bool = False, priority: int = 0) -> Any:
    call = SimpleNamespace(tenant=name[0], priority=priority)
    return SimpleNamespace(request_id=name, call=call, order=order, resumed=resumed)


def queue(*requests: Any) -> WaitingSubmits:
    waiting = WaitingSubmits()
    for one in requests:
        waiting.add(one, ORDER)
    return waiting


def handed_over(waiting: WaitingSubmits, count: int = 100, able: Any = lambda name: True) -> list[str]:
    names: list[str] = []
    with closing(waiting.in_turns()) as entries:
        while len(names) < count and (entry := next(entries, None)) is not None:
            if able(entry[0].request_id):
                names.append(entry[0].request_id)
                waiting.hand_over(entry[0])
    return names


def test_one_tenants_requests_go_resumed_ones_first_and_by_arrival():
    waiting = queue(request("a3", 3), request("a1", 1), request("a2", 2), request("a9", 9, resumed=True))
    assert handed_over(waiting) == ["a9", "a1", "a2", "a3"]
    assert not len(waiting)


def test_a_lower_priority_goes_before_earlier_requests_of_its_tenant_and_after_resumed_ones():
    waiting = queue(
        request("a1", 1, priority=7), request("a2", 2), request("a3", 3, priority=-1), request("a4", 4)
    )
    waiting.add(request("a5", 5, resumed=True, priority=9), ORDER)
    assert handed_over(waiting) == ["a5", "a3", "a2", "a4", "a1"]


def test_a_priority_takes_no_turn_of_another_tenant():
    waiting = queue(*(request(f"a{i}", i, priority=-100) for i in range(4)), request("b4", 4, priority=100))
    waiting.add(request("b5", 5, priority=99), ORDER)
    assert handed_over(waiting) == ["a0", "b5", "a1", "b4", "a2", "a3"]


def test_a_later_window_of_a_sound_goes_before_new_requests_of_its_own_tenant_only():
    sound = ChatCall("r", "m", (), SamplingParams(), 10.0, tenant="a")
    later = replace(sound, continues=True)
    windows = [InFlightRequest(later, at, 10.0, f"a-window{at}") for at in (50, 51, 52)]
    waiting = queue(request("a1", 1), *windows, request("b1", 2), request("b2", 3))
    assert handed_over(waiting) == ["a-window50", "b1", "a-window51", "b2", "a-window52", "a1"]


def test_a_tenant_with_a_long_queue_keeps_another_one_waiting_for_one_request():
    waiting = queue(*(request(f"a{i:02}", i, resumed=i % 2 == 0) for i in range(20)))
    assert len(handed_over(waiting, 8)) == 8
    waiting.add(request("b0", 100), ORDER)
    waiting.add(request("b1", 101), ORDER)
    assert [name[0] for name in handed_over(waiting, 5)] == ["b", "a", "b", "a", "a"]


def test_a_tenant_that_comes_back_has_collected_no_claim():
    waiting = queue(*(request(f"a{i:02}", i) for i in range(20)), request("b0", 30))
    assert len(handed_over(waiting, 12)) == 12
    for number in range(31, 34):
        waiting.add(request(f"b{number}", number), ORDER)
    assert sorted(name[0] for name in handed_over(waiting, 4)) == ["a", "a", "b", "b"]


def test_what_cannot_be_handed_over_keeps_its_place_and_nobody_else():
    waiting = queue(*(request(f"a{i}", i) for i in range(3)), request("b0", 9))
    assert handed_over(waiting, able=lambda name: name not in ("a0", "b0")) == ["a1", "a2"]
    waiting.add(request("a3", 3), ORDER)
    assert handed_over(waiting) == ["b0", "a0", "a3"]


def test_a_request_that_was_withdrawn_or_replaced_is_handed_over_never_or_once():
    waiting = queue(*(request(f"a{i}", i) for i in range(3)))
    waiting.discard("a0")
    waiting.discard("a0")
    waiting.add(request("a1", 1, resumed=True), ORDER)
    assert handed_over(waiting) == ["a1", "a2"]
    assert "a0" not in waiting and waiting.order_of("a0") is None


def test_a_tenant_that_may_not_keeps_its_queue_and_is_passed_over_without_a_look_at_it():
    waiting = queue(*(request(f"a{i}", i) for i in range(1000)), request("b0", 2000), request("b1", 2001))
    with closing(waiting.in_turns(lambda tenant: tenant == "b")) as entries:
        assert [entry[0].request_id for entry in entries] == ["b0", "b1"]
    with closing(queue(request("a0", 1)).in_turns(lambda tenant: False)) as entries:
        assert list(entries) == []
    assert handed_over(waiting, 3) == ["a0", "b0", "a1"]


def test_a_hand_over_costs_the_same_with_many_requests_that_wait():
    def cost(waiting_requests: int) -> int:
        waiting = queue(*(request(f"a{i}", i) for i in range(waiting_requests)))
        return operations(lambda: handed_over(waiting, 1))

    assert cost(1000) < 1.5 * cost(10)
