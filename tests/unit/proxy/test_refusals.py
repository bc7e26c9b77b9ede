"""Refusals: counted by few labels, and logged once a minute per kind, however many come."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from triptych.base.metrics import ProxyMetrics
from triptych.proxy.http.refusals import OTHER, PeriodicLog, RefusalMiddleware, Refusals
from triptych.proxy.live.failures import MAX_REFUSALS, FailureLog

ROUTES = ("/v1/models", "/v1/models/{model:path}", "/v1/chat/completions", "/page/{name}")


class Later:
    """The timers of a loop, which a test ends."""

    def __init__(self) -> None:
        self.timers: list[Callable[[], None]] = []

    def __call__(self, seconds: float, call: Callable[[], None]) -> None:
        assert seconds == 60
        self.timers.append(call)

    def over(self) -> None:
        for call in self.timers[:]:
            self.timers.remove(call)
            call()


def test_the_first_of_a_kind_is_logged_at_once_and_the_rest_in_one_line_a_minute(caplog):
    later = Later()
    log = PeriodicLog(logging.getLogger("test"), later)
    with caplog.at_level(logging.INFO):
        for index in range(1000):
            log.add("a", f"a{index}\nforged")
        log.add("b", "b0", logging.WARNING)
        assert caplog.messages == ["a: a0?forged", "b: b0"]
        later.over()
        assert caplog.messages[2:] == ["a: 999 more in 60 s, the last: a999?forged"]
        later.over()
        log.add("a", "again")
        assert caplog.messages[3:] == ["a: again"]
    assert len(later.timers) == 1


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/models", "/v1/models"),
        ("/v1/models/some/name", "/v1/models/{model:path}"),
        ("/page/x.js", "/page/{name}"),
        ("/v1/chat/completions/", OTHER),
        ("/" + "x" * 10_000, OTHER),
        ("", OTHER),
    ],
)
def test_a_path_is_one_of_the_routes_or_other(path: str, route: str) -> None:
    async def app(*_: object) -> None: ...

    middleware = RefusalMiddleware(app, ROUTES, Refusals(ProxyMetrics()))
    assert middleware.route_of(path) == route


def test_refusals_are_shown_by_status_and_route_with_a_remedy_and_few_at_a_time() -> None:
    refusals = FailureLog(MAX_REFUSALS)
    for index in range(100):
        refusals.add_refusal(1000.0 + index, 404, f"/route/{index % 10}")
    rows = refusals.read()
    assert [row.what for row in rows[:2]] == [
        "requests to /route/9 are refused with 404",
        "requests to /route/8 are refused with 404",
    ]
    assert "GET /v1/models" in rows[0].remedy
    assert len(rows) == MAX_REFUSALS
