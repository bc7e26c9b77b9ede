"""The images' HEALTHCHECK: where it asks, and what counts as healthy."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator

import pytest

from deploy.docker.healthcheck import address, healthy
from triptych.base.status.status_server import ServiceStatus, status_server


@pytest.mark.parametrize(
    ("command", "environment", "expected"),
    [
        ("triptych proxy", {"TRIPTYCH_METRICS_PORT": "9100"}, ("127.0.0.1", 9100)),
        ("triptych proxy", {}, ("127.0.0.1", 9100)),
        ("triptych pd --metrics-port 9200", {"TRIPTYCH_METRICS_PORT": "9100"}, ("127.0.0.1", 9200)),
        ("triptych pd --metrics-port=9200 --host=10.0.0.7", {}, ("10.0.0.7", 9200)),
        ("triptych pd --host 0.0.0.0", {}, ("127.0.0.1", 9100)),
        ("triptych pd", {"TRIPTYCH_HOST": "::"}, ("127.0.0.1", 9100)),
        ("triptych proxy --host 0.0.0.0 --metrics-host 127.0.1.7", {}, ("127.0.1.7", 9100)),
        ("init -- triptych proxy --metrics-port 1 --metrics-port 2", {}, ("127.0.0.1", 2)),
    ],
)
def test_it_asks_where_the_service_listens(command, environment, expected):
    assert address(command.split(), environment) == expected


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    """Answers 200 to GET /health and 503 to all else."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == self.server.healthy_path else 503)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.healthy_path = "/health"
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_a_service_is_healthy_where_it_answers_200(server):
    assert healthy("127.0.0.1", server.server_port)
    server.healthy_path = ""
    assert not healthy("127.0.0.1", server.server_port)


def test_a_service_s_own_answer_counts_while_it_starts_drains_and_stalls():
    status, healthy_now = ServiceStatus(), [True]
    status.follow(lambda: healthy_now[0])
    with status_server("127.0.0.1", 0, status) as server:
        assert healthy("127.0.0.1", server.server_port)
        status.ready()
        status.drain()
        assert healthy("127.0.0.1", server.server_port)
        healthy_now[0] = False
        assert not healthy("127.0.0.1", server.server_port)


def test_a_service_that_does_not_listen_is_not_healthy():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        assert not healthy("127.0.0.1", probe.getsockname()[1])
