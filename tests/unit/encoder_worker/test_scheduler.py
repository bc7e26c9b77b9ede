"""The encoder scheduler: order, permission, and pixels within the memory."""

from __future__ import annotations

from support.fakes.encoder_items import _key, plan, run, scheduler


def test_a_new_item_is_looked_up_once_and_before_it_is_preprocessed() -> None:
    s = scheduler()
    s.add("a", looked_up=False)
    s.items["a"].looked_up = None
    s.media_arrived("a")
    assert s.next_preparation() is None
    assert _key(s.scheduler.next_look_up()) == "a"
    assert s.scheduler.next_look_up() is None
    assert s.next_preparation() is None
    s.items["a"].looked_up = True
    assert s.next_preparation() == "a"


def test_an_item_without_permission_is_not_encoded() -> None:
    s = scheduler()
    plan(s, "a")
    assert s.next_batch() == []
    run(s, "a")
    assert s.next_batch() == ["a"]


def test_permission_before_the_media_is_kept() -> None:
    s = scheduler()
    s.add("a")
    run(s, "a")
    s.media_arrived("a")
    s.next_preparation()
    s.prepared("a", nbytes=1, cost=1)
    assert s.next_batch() == ["a"]


def test_batches_follow_run_order_and_not_arrival() -> None:
    s = scheduler()
    for key in "abc":
        plan(s, key)
    run(s, "c", "a", "b")
    assert s.next_batch() == ["c", "a", "b"]


def test_re_encodes_are_encoded_first() -> None:
    s = scheduler()
    plan(s, "a")
    plan(s, "b", re_encode=True)
    run(s, "a", "b")
    assert s.next_batch() == ["b", "a"]


def test_re_encodes_are_preprocessed_first() -> None:
    s = scheduler(preparations=1)
    for key in "ab":
        s.add(key, re_encode=key == "b")
        s.media_arrived(key)
    assert s.next_preparation() == "b"


def test_no_more_items_are_in_preprocessing_than_allowed() -> None:
    s = scheduler(preparations=1)
    for key in "ab":
        s.add(key)
        s.media_arrived(key)
    assert s.next_preparation() == "a"
    assert s.next_preparation() is None
    s.prepared("a", nbytes=1, cost=1)
    assert s.next_preparation() == "b"


def test_a_batch_stays_within_the_patch_budget() -> None:
    s = scheduler(patches=10)
    for key, cost in {"a": 6, "b": 4, "c": 1}.items():
        plan(s, key, cost=cost)
    run(s, "a", "b", "c")
    assert s.next_batch() == ["a", "b"]
    assert s.next_batch() == ["c"]


def test_an_item_above_the_budget_runs_alone_and_is_not_overtaken() -> None:
    s = scheduler(patches=10)
    for key, cost in {"a": 1, "big": 50, "c": 1}.items():
        plan(s, key, cost=cost)
    run(s, "a", "big", "c")
    assert [s.next_batch() for _ in range(3)] == [["a"], ["big"], ["c"]]


def test_withdrawn_permission_keeps_the_item_from_the_tower() -> None:
    s = scheduler()
    plan(s, "a")
    run(s, "a")
    s.withdraw("a")
    assert s.next_batch() == []
    assert s.counts.planned == 1


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
