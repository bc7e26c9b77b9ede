from __future__ import annotations

from dataclasses import dataclass

import pytest

from support.engine.engine_requests import make_feature
from triptych.base.errors import InvalidRequest
from triptych.pd_worker.core.admission import Admission, AdmissionQueue, distinct_bytes


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


@dataclass(frozen=True)
class Waiter:
    name: str
    order: tuple[bool, float, str]
    nbytes: int


def queue_of(*sizes: int) -> AdmissionQueue[Waiter]:
    """Waiters `0`, `1`, ... of these sizes, the last one queued first."""
    queue = AdmissionQueue[Waiter]()
    for number, nbytes in reversed(list(enumerate(sizes))):
        name = str(number)
        queue.add(Waiter(name, (True, float(number), name), nbytes), has_items=nbytes > 0)
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
