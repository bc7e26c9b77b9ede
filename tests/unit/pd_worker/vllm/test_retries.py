"""A failed call is repeated a few times, a busy server for as long as the request lives."""

from __future__ import annotations

from triptych.pd_worker.vllm.run import MAX_FAILURES, Retries


def test_failures_in_a_row_end_a_request():
    retries = Retries()
    pauses = [retries.pause(busy=False) for _ in range(MAX_FAILURES)]
    assert pauses == [0.1, 0.2, 0.4, None]


def test_a_request_that_comes_further_has_all_its_tries_again():
    retries = Retries()
    for _ in range(MAX_FAILURES - 1):
        retries.pause(busy=False)
    retries.reset()
    assert retries.pause(busy=False) == 0.1


def test_a_busy_server_is_asked_ever_more_rarely_and_never_given_up():
    retries = Retries()
    pauses = [retries.pause(busy=True) for _ in range(100)]
    assert pauses[:6] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0] and set(pauses[5:]) == {2.0}
    assert retries.failures == 0
