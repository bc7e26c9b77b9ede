"""The tenant with the least service is next; nobody collects a claim while idle, or loses what it is due."""

from __future__ import annotations

from triptych.base.least_service import LeastService, TurnQueue


def taken(queue: TurnQueue[str], count: int, cost: float = 1.0) -> str:
    names = ""
    for _ in range(count):
        tenant, thing = queue.take()
        queue.charge(tenant, cost * (10 if thing == "large" else 1))
        names += tenant
    return names


def filled(**counts: int) -> TurnQueue[str]:
    queue = TurnQueue[str]()
    for tenant, count in counts.items():
        for _ in range(count):
            queue.put(tenant, "small")
    return queue


def test_things_of_one_tenant_come_in_order_of_arrival():
    queue = TurnQueue[int]()
    for number in range(5):
        queue.put("", number)
    assert [queue.take()[1] for _ in range(5)] == list(range(5))


def test_a_tenants_things_come_by_priority_and_take_no_turn_of_another_one():
    queue = TurnQueue[str]()
    for tenant, priority in (("a", 0), ("b", 9), ("a", 5), ("a", -1), ("b", 8), ("a", 0)):
        queue.put(tenant, f"{tenant}{priority}", priority)
    order = []
    for _ in range(6):
        tenant, thing = queue.take()
        queue.charge(tenant, 1.0)
        order.append(thing)
    assert order == ["a-1", "b8", "a0", "b9", "a0", "a5"]


def test_a_tenant_that_comes_later_waits_for_one_thing_of_each_other():
    queue = filled(a=20, b=20)
    taken(queue, 10)
    queue.put("c", "small")
    assert "c" in taken(queue, 2)


def test_tenants_are_served_alike_by_what_their_things_take():
    queue = filled(b=30)
    for _ in range(30):
        queue.put("a", "large")
    assert taken(queue, 22).count("a") == 2


def test_an_idle_tenant_begins_with_what_the_others_have():
    service = LeastService()
    service.enter("a")
    service.enter("b")
    for _ in range(100):
        service.charge(service.next(("a",)), 1.0)
    service.enter("b")
    first = [service.next(("a", "b")) for _ in range(1)]
    for _ in range(20):
        tenant = service.next(("a", "b"))
        service.charge(tenant, 1.0)
        first.append(tenant)
    assert 9 <= first.count("b") <= 12, "it has half from now on, and no more for having been away"


def test_what_a_tenant_has_had_above_the_others_is_remembered_while_they_wait():
    service = LeastService()
    for tenant in "ab":
        service.enter(tenant)
    service.charge("a", 50.0)
    service.enter("a")
    chosen = []
    for _ in range(60):
        tenant = service.next(("a", "b"))
        service.charge(tenant, 1.0)
        chosen.append(tenant)
    assert "a" not in chosen[:50]


def test_after_a_rest_all_begin_equal():
    service = LeastService()
    service.enter("a")
    service.charge("a", 50.0)
    service.rest()
    service.enter("a")
    service.enter("b")
    assert service.of("a") == service.of("b")


def test_of_many_tenants_those_that_have_had_most_are_remembered():
    service = LeastService()
    service.enter("much")
    service.charge("much", 9.0)
    for number in range(4096):
        service.enter(f"tenant {number}")
        service.charge(f"tenant {number}", 1e-9)
    assert service.of("much") == 9.0
    assert len(service._service) <= 513
