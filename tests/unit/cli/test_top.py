"""`triptych top`: one sentence where there is no server, no key or no page; JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from click.testing import CliRunner, Result

from support.fakes.live_view import EXAMPLE
from support.processes.cluster import free_port
from triptych.apps.cli.app import app

KEY = "a-key-that-is-long-enough"


@contextmanager
def proxy(status: int = 200, body: object = EXAMPLE["snapshot"]) -> Iterator[str]:
    """A server whose every GET is answered so, where the right key comes with it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            right = self.headers.get("Authorization") == f"Bearer {KEY}" and self.path == "/cluster"
            data = json.dumps(body if right else {"error": {"message": "no key", "code": "invalid_api_key"}})
            self.send_response(status if right else 401)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is logged."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def top(url: str, *words: str) -> Result:
    return CliRunner().invoke(app, ["top", "--url", url, *words])


def test_a_server_that_is_not_there_is_one_sentence_with_the_remedy() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = top(url, "--once")
    assert result.exit_code == 1 and result.output.count("\n") == 1
    assert url in result.output and "triptych serve" in result.output and "--url" in result.output


def test_a_proxy_without_live_data_is_one_sentence_with_the_option() -> None:
    error = {"error": {"message": "GET /cluster is not served here", "code": "not_found"}}
    with proxy(404, error) as url:
        result = top(url, "--once", "--api-key", KEY)
    assert result.exit_code == 1 and result.output.count("\n") == 1
    assert "--no-page" in result.output


def test_once_as_json_is_one_snapshot(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    with proxy() as url:
        result = top(url, "--once", "--json", "--api-key-file", str(file))
    assert result.exit_code == 0
    assert json.loads(result.output) == EXAMPLE["snapshot"]


def test_what_is_no_terminal_gets_one_screen() -> None:
    with proxy() as url:
        result = top(url, "--api-key", KEY)
    assert result.exit_code == 0 and "PD workers: 2" in result.output


@pytest.mark.parametrize("words", [("--api-key", "x", "--api-key-file", "y"), ("--api-key-file", "/no/file")])
def test_keys_that_cannot_be_read_are_a_clear_error(words: tuple[str, ...]) -> None:
    result = top("http://127.0.0.1:1", "--once", *words)
    assert result.exit_code != 0
    assert "--api-key-file" in str(result.exception)
