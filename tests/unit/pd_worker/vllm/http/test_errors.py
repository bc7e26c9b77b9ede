"""What a failure of vLLM means for the request."""

from __future__ import annotations

import pytest

from triptych.pd_worker.vllm.http.replies import (
    EngineBusy,
    EngineFailed,
    EngineGarbage,
    EngineRejected,
    error_of_status,
    printable,
)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, EngineRejected),
        (404, EngineRejected),
        (429, EngineBusy),
        (503, EngineBusy),
        (500, EngineFailed),
        (302, EngineGarbage),
    ],
)
def test_a_status_says_whether_to_try_again(status, kind):
    assert type(error_of_status(status, "why")) is kind


def test_a_foreign_message_is_one_short_line():
    assert printable("a\nb\x1b[31m" + "x" * 1000) == ("a b?[31m" + "x" * 1000)[:500]
