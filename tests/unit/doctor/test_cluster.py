"""What a proxy's answers say, and what is made of answers that are none."""

from __future__ import annotations

import pytest

from triptych.apps.doctor.cluster import PageReply, check_health, check_models, check_ready, look_at_cluster
from triptych.apps.doctor.finding import CheckOutcome


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (PageReply(200, '{"status": "ready"}'), CheckOutcome.OK),
        (PageReply(200, '{"status": "ready", "degraded": "store"}'), CheckOutcome.FAIL),
        (PageReply(503, '{"status": "no PD worker is live"}'), CheckOutcome.FAIL),
        (PageReply(503, "<html>"), CheckOutcome.FAIL),
        (PageReply(503, "[]"), CheckOutcome.FAIL),
        (PageReply(error="timed out"), CheckOutcome.FAIL),
    ],
)
def test_a_proxy_that_is_not_ready_says_why(answer, verdict):
    assert check_ready(answer).verdict is verdict


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (PageReply(200, '{"data": [{"id": "demo"}]}'), CheckOutcome.OK),
        (PageReply(200, '{"data": []}'), CheckOutcome.FAIL),
        (PageReply(401, "{}"), CheckOutcome.NOTE),
        (PageReply(200, "{}"), CheckOutcome.FAIL),
        (PageReply(200, '{"data": [1]}'), CheckOutcome.FAIL),
        (PageReply(502, "<html>"), CheckOutcome.FAIL),
    ],
)
def test_models_are_listed(answer, verdict):
    assert check_models(answer).verdict is verdict


def test_another_server_is_no_proxy():
    assert check_health(PageReply(404)).verdict is CheckOutcome.FAIL


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "file:///etc/passwd", "10.0.0.5:8000", "http://[::1:8000"]
)
def test_an_address_that_is_none_or_does_not_answer_is_one_failure(url):
    (finding,) = look_at_cluster(url)
    assert finding.verdict is CheckOutcome.FAIL and finding.remedy
