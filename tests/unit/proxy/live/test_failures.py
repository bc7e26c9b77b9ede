"""Failures: plain words, bounded, and nothing of a tenant's request in them."""

from __future__ import annotations

import pytest

from triptych.errors import DeadlineExceeded, InternalError, RequestError, Unavailable
from triptych.proxy.live.failures import MOST_FAILURES, FailureLog, described


def test_equal_failures_are_one_entry_with_a_count_and_the_newest_time() -> None:
    log = FailureLog()
    log.add(1.0, "a", "do this", "w")
    log.add(2.0, "b", "do that")
    log.add(3.0, "a", "do this", "w")
    assert [(row.time, row.what, row.where, row.count) for row in log.read()] == [
        (3.0, "a", "w", 2),
        (2.0, "b", "", 1),
    ]


def test_only_the_newest_failures_are_kept() -> None:
    log = FailureLog()
    for index in range(MOST_FAILURES + 5):
        log.add(float(index), f"failure {index}", "help")
    rows = log.read()
    assert len(rows) == MOST_FAILURES
    assert rows[0].what == f"failure {MOST_FAILURES + 4}"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Unavailable("no encoder worker could be reached in time"), "no encoder worker"),
        (Unavailable("messages[0].content[2]: the store keeps losing this item's embedding"), "the store"),
        (DeadlineExceeded("the request took longer than its timeout"), "timeout"),
        (
            InternalError("3 PD workers ended while the request was at work (error id 0123456789abcdef)"),
            "ended",
        ),
        (InternalError("anything"), "an internal error"),
    ],
)
def test_a_failed_request_is_described_with_its_remedy(error: RequestError, words: str) -> None:
    what, remedy = described(error)
    assert words in what
    assert remedy


def test_an_error_id_is_kept() -> None:
    what, _ = described(InternalError("it broke (error id 0123456789abcdef)"))
    assert "0123456789abcdef" in what


@pytest.mark.parametrize("kind", [InternalError, Unavailable, DeadlineExceeded])
def test_the_text_of_an_error_is_never_shown(kind: type[RequestError]) -> None:
    log = FailureLog()
    log.add_request(1.0, kind("messages[0]: https://secret.example/a.png of alice", param="messages[0]"))
    row = log.read()[0]
    assert "secret" not in row.what + row.remedy + row.where
    assert "alice" not in row.what + row.remedy and "messages" not in row.what + row.remedy
    assert str(kind.status) in row.what
