"""The status server, and the limits of requests."""

from __future__ import annotations

import json
import math
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge

from triptych.base.errors import ConfigError, InvalidRequest
from triptych.base.request import Seed, check_limits
from triptych.base.status_server import (
    MAX_CONNECTIONS,
    ProbeAnswer,
    ServicePhase,
    ServiceStatus,
    StatusServer,
    health_answer,
    ready_answer,
    status_server,
)
from triptych.base.types import RepetitionPenalty, Temperature, TopP


@pytest.fixture
def page() -> Iterator[StatusServer]:
    with status_server("127.0.0.1", 0, ServiceStatus()) as server:
        yield server


def get(host: str, port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_pages_are_there_before_the_process_is_ready(page: StatusServer) -> None:
    assert get("127.0.0.1", page.server_port, "/health") == (200, '{"status": "ok"}')
    assert get("127.0.0.1", page.server_port, "/ready") == (503, '{"status": "starting"}')
    assert get("127.0.0.1", page.server_port, "/metrics") == (200, "")
    assert get("127.0.0.1", page.server_port, "/v1/models")[0] == 404


def test_what_is_missing_is_said_by_a_page_that_stays_ready(page: StatusServer) -> None:
    page.status.follow(lambda: True, lambda: ("store",))
    page.status.ready()
    status, body = get("127.0.0.1", page.server_port, "/ready?verbose")
    assert (status, json.loads(body)) == (200, {"status": "ready", "degraded": ["store"]})


def test_metrics_are_those_of_the_registry_that_was_set_last(page: StatusServer) -> None:
    registry = CollectorRegistry()
    Gauge("triptych_example", "An example.", registry=registry).set(3)
    page.registry = registry
    assert "triptych_example 3.0" in get("127.0.0.1", page.server_port, "/metrics")[1]


def test_an_engines_own_metrics_are_beside_the_process_own(page: StatusServer) -> None:
    path = "/metrics/engine"
    assert get("127.0.0.1", page.server_port, path)[0] == 404
    page.engine_metrics = lambda: b'vllm:num_preemptions_total{engine="0"} 3.0\n'
    assert get("127.0.0.1", page.server_port, path) == (200, 'vllm:num_preemptions_total{engine="0"} 3.0\n')

    def silent() -> bytes:
        raise TimeoutError

    page.engine_metrics = silent
    assert get("127.0.0.1", page.server_port, path) == (503, '{"status": "the engine does not answer"}')


@pytest.mark.parametrize(("bound", "asked"), [("0.0.0.0", "127.0.0.1"), ("127.0.1.7", "127.0.1.7")])
def test_it_is_reached_where_it_is_bound(bound: str, asked: str) -> None:
    with status_server(bound, 0, ServiceStatus()) as page:
        assert get(asked, page.server_port, "/health")[0] == 200


def test_a_taken_port_is_a_config_error(page: StatusServer) -> None:
    with (
        pytest.raises(ConfigError, match="--metrics-port .* picks another"),
        status_server("127.0.0.1", page.server_port, ServiceStatus()),
    ):
        pass


def test_clients_that_never_finish_do_not_lock_a_probe_out(page: StatusServer) -> None:
    silent = [socket.create_connection(("127.0.0.1", page.server_port)) for _ in range(2 * MAX_CONNECTIONS)]
    try:
        for sock in silent:
            sock.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
        assert get("127.0.0.1", page.server_port, "/health")[0] == 200
        silent[0].settimeout(10)
        assert silent[0].recv(1) == b"", "the oldest connection is closed"
    finally:
        for sock in silent:
            sock.close()


def test_a_client_that_goes_away_leaves_no_trace_in_the_log(page, capfd):
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", page.server_port)) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert get("127.0.0.1", page.server_port, "/health")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",
        "text/plain;version=1.0.0;escaping=underscores,*/*;q=0.1",
        "*/*",
    ],
)
def test_no_scraper_gets_vllms_names_with_another_colon(page: StatusServer, accept: str) -> None:
    page.registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "requests", registry=page.registry).set(3)
    request = urllib.request.Request(
        f"http://127.0.0.1:{page.server_port}/metrics", headers={"Accept": accept}
    )
    with urllib.request.urlopen(request, timeout=10) as reply:
        assert "vllm:num_requests_running 3.0" in reply.read().decode()
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize(
    ("phase", "healthy", "expected"),
    [
        (ServicePhase.STARTING, True, ProbeAnswer(503, "starting")),
        (ServicePhase.READY, True, ProbeAnswer(200, "ready")),
        (ServicePhase.READY, False, ProbeAnswer(503, "stalled")),
        (ServicePhase.DRAINING, True, ProbeAnswer(503, "draining")),
        (ServicePhase.DRAINING, False, ProbeAnswer(503, "draining")),
    ],
)
def test_only_a_loaded_and_healthy_process_that_is_not_leaving_is_ready(phase, healthy, expected):
    assert ready_answer(phase, healthy=healthy) == expected


def test_a_process_without_its_store_is_ready_and_says_what_it_lacks() -> None:
    assert ready_answer(ServicePhase.READY, healthy=True, degraded=["store"]) == ProbeAnswer(
        200, "ready", ("store",)
    )


def test_a_process_that_alone_lacks_its_store_is_not_ready() -> None:
    answer = ready_answer(ServicePhase.READY, healthy=True, cut_off=True, degraded=["store"])
    assert answer == ProbeAnswer(503, "cut off from the store")


def test_liveness_follows_the_engines_and_nothing_else() -> None:
    status = ServiceStatus()
    healthy = True
    status.follow(lambda: healthy, lambda: ["store"])
    assert status.health_probe().status == 200
    status.ready()
    status.drain()
    assert status.health_probe() == health_answer(healthy=True)
    healthy = False
    assert status.health_probe().status == 503


def test_a_process_that_drains_does_not_become_ready_again() -> None:
    status = ServiceStatus()
    status.drain()
    status.ready()
    assert status.ready_probe() == ProbeAnswer(503, "draining")


@pytest.mark.parametrize("value", [None, 0, 0.5, 2])
def test_values_within_both_limits_pass_and_so_does_none(value: float | None) -> None:
    check_limits("temperature", value, Temperature)


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (2.1, Temperature, "at least 0 and at most 2"),
        (-0.1, Temperature, "at least 0 and at most 2"),
        (math.nan, Temperature, "at least 0 and at most 2"),
        (math.inf, Temperature, "at least 0 and at most 2"),
        (0, TopP, "above 0 and at most 1"),
        (0, RepetitionPenalty, "at least 0.01 and at most 10"),
        (1 << 63, Seed, f"at least {-(1 << 63)} and at most {(1 << 63) - 1}"),
    ],
)
def test_what_is_outside_is_refused_with_both_limits(value: float, kind: object, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"field must be {words}") as caught:
        check_limits("field", value, kind)
    assert caught.value.param == "field"


def test_optional_types_have_the_limits_of_the_type_that_is_not_none() -> None:
    with pytest.raises(InvalidRequest):
        check_limits("field", 3, Temperature | None)
