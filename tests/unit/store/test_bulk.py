"""Error replies to bulk transfers."""

from __future__ import annotations

import pytest

from triptych.store.bulk import BulkNotServing, BulkRedirected, BulkRefused, refusal


@pytest.mark.parametrize(
    ("line", "slot", "host", "port", "ask"),
    [
        (b"MOVED 3999 10.0.0.2:6381", 3999, "10.0.0.2", 6381, False),
        (b"ASK 12 node-2.example:1", 12, "node-2.example", 1, True),
        (b"MOVED 3999 ::1:6381", 3999, "::1", 6381, False),
        (b"MOVED 3999 :6381", 3999, "", 6381, False),
        (b"MOVED 1 " + b"h" * 250 + b":6381", 1, "h" * 250, 6381, False),
    ],
)
def test_a_redirect_names_the_slot_and_the_server(
    line: bytes, slot: int, host: str, port: int, ask: bool
) -> None:
    error = refusal(line)
    assert isinstance(error, BulkRedirected)
    assert (error.slot, error.host, error.port, error.ask) == (slot, host, port, ask)


@pytest.mark.parametrize(
    "line",
    [
        b"TRYAGAIN Multiple keys request during rehashing of slot",
        b"CLUSTERDOWN Hash slot not served",
        b"LOADING Redis is loading the dataset in memory",
        b"MASTERDOWN Link with MASTER is down",
        b"READONLY You can't write against a read only replica.",
    ],
)
def test_a_server_that_cannot_answer_now_is_told_apart(line: bytes) -> None:
    assert isinstance(refusal(line), BulkNotServing)


@pytest.mark.parametrize(
    "line", [b"", b"ERR no", b"MOVED", b"MOVED x y", b"MOVED 1 host", b"ASK 1 h:p", b"\xff"]
)
def test_any_other_line_is_a_refusal(line: bytes) -> None:
    error = refusal(line)
    assert type(error) is BulkRefused
    assert len(str(refusal(b"ERR " + b"x" * 400))) < 120
