from __future__ import annotations

import pytest

from support.engine.engine_requests import make_feature
from triptych.errors import InvalidRequest
from triptych.pd_worker.core.admission import Admission, distinct_bytes


def test_a_sum_above_the_capacity_is_refused_with_the_sizes_and_the_flag() -> None:
    features = [make_feature("a", 0, 40), make_feature("b", 50, 30)]
    with pytest.raises(InvalidRequest, match=r"640 B \+ 480 B = 1.1 KiB.*--encoder-cache-memory is 1.0 KiB"):
        Admission(1024).check(features)


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
