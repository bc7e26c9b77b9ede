"""The encoder scheduler's decisions about look-ups, permission and batches."""

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
