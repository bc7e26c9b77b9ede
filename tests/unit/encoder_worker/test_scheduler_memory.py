"""The encoder scheduler's decisions about memory: places, dropped pixels, media asked for again."""

from __future__ import annotations

from support.fakes.encoder_items import plan, run, scheduler


def test_over_the_memory_the_oldest_pixels_without_permission_are_dropped() -> None:
    s = scheduler(memory=20)
    plan(s, "a")
    plan(s, "b")
    run(s, "a")
    plan(s, "c")
    assert s.pop_dropped() == ["b"]
    assert s.counts.prepared_bytes == 20


def test_dropped_pixels_are_asked_for_again_when_the_item_may_run() -> None:
    s = scheduler(memory=10)
    plan(s, "a")
    plan(s, "b")
    assert s.pop_dropped() == ["a"]
    assert s.next_media_request() is None
    run(s, "a")
    assert s.next_media_request() == "a"
    assert s.pop_dropped() == ["b"]
    assert s.next_media_request() is None


def test_media_are_asked_for_again_only_when_there_is_room() -> None:
    s = scheduler(memory=10)
    plan(s, "a")
    plan(s, "b")
    run(s, "b", "a")
    assert s.next_media_request() is None
    assert s.next_batch() == ["b"]
    s.remove("b")
    assert s.next_media_request() == "a"


def test_an_item_larger_than_the_memory_is_held_alone() -> None:
    s = scheduler(memory=10)
    plan(s, "huge", nbytes=1000)
    assert s.pop_dropped() == []
    run(s, "huge")
    assert s.next_batch() == ["huge"]


def test_media_that_are_not_needed_are_not_accepted() -> None:
    s = scheduler()
    plan(s, "a")
    assert not s.needs_media("a")


def test_media_lost_on_the_way_are_asked_for_again() -> None:
    s = scheduler(memory=10)
    plan(s, "a")
    plan(s, "b")
    run(s, "a")
    assert s.next_media_request() == "a"
    s.media_lost("a")
    assert s.next_media_request() == "a"


def test_no_more_items_than_the_credit_hold_pixels_whichever_proxy_permits_them() -> None:
    s = scheduler(memory=40, patches=1, credit=2)
    for key in "abcd":
        plan(s, key)
    run(s, *"abcd")
    assert sorted(s.waiting()) == list("abcd")
    plan(s, "new", nbytes=20)
    assert s.pop_dropped() == ["c", "d"]
    assert s.next_media_request() is None
    assert s.next_batch() == ["a"]
    s.remove("a")
    assert s.next_media_request() == "c"
    assert s.next_media_request() is None


def test_places_go_to_re_encodes_first_and_then_in_order_of_permission() -> None:
    s = scheduler(credit=1, patches=1)
    for key in "abc":
        plan(s, key, re_encode=key == "c")
    run(s, *"bac")
    order = []
    for _ in range(3):
        (key,) = s.next_batch()
        order.append(key)
        s.remove(key)
    assert order == ["b", "c", "a"]


def test_a_place_is_free_again_when_its_item_leaves_or_loses_permission() -> None:
    s = scheduler(credit=1)
    for key in "abc":
        plan(s, key)
    run(s, *"abc")
    s.withdraw("a")
    assert s.next_batch() == ["b"]
    s.remove("b")
    assert s.next_batch() == ["c"]


def test_an_item_that_is_not_planned_takes_no_place() -> None:
    s = scheduler(credit=1)
    s.add("late")
    s.permit("late")
    plan(s, "here")
    run(s, "here")
    assert s.next_batch() == ["here"]
