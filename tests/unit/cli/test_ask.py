"""Commands that ask a running cluster, and `top`."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner, Result

from support.fakes.live_view import EXAMPLE
from support.processes.cluster import free_port
from triptych.apps.cli.app import app
from triptych.apps.client import Answer, Client, TokenVectors, Vectors
from triptych.base.errors import ConfigError
from triptych.base.types import Usage


def test_an_unreachable_server_is_one_sentence_with_the_remedy():
    url = f"http://127.0.0.1:{free_port()}"
    result = CliRunner().invoke(app, ["ask", "why?", "--url", url])
    assert result.exit_code == 1
    assert result.output.count("\n") == 1
    assert url in result.output and "triptych serve" in result.output


def test_a_file_that_is_no_picture_is_named(tmp_path: Path):
    notes = tmp_path / "notes.txt"
    notes.write_text("hello")
    result = CliRunner().invoke(app, ["ask", "why?", "--image", str(notes)])
    assert result.exit_code == 1
    assert "notes.txt: not an image" in result.output


def test_what_is_asked_can_be_chosen(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def chat(self: Client, messages: Any, **fields: Any) -> Answer:
        asked.append((messages, fields))
        return Answer("teal", "stop", Usage(1, 1), (), {"id": "a1"})

    monkeypatch.setattr(Client, "chat", chat)
    words = [
        "ask",
        "-",
        "--json",
        "--model",
        "m",
        "--system",
        "Be brief.",
        "--image",
        "https://a.example/b.png",
    ]
    result = CliRunner().invoke(app, [*words, "--temperature", "0.5", "--max-tokens", "9"], input="why?")
    assert json.loads(result.output) == {"id": "a1"}
    [(messages, fields)] = asked
    assert [message["role"] for message in messages] == ["system", "user"]
    picture, text = messages[1]["content"]
    assert (picture["image_url"]["url"], text["text"]) == ("https://a.example/b.png", "why?")
    assert fields == {"model": "m", "temperature": 0.5, "max_tokens": 9}


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked for, by the client's method; answered by two vectors."""
    asked: list[Any] = []

    def embed(self: Client, inputs: Any, **fields: Any) -> Vectors:
        asked.append(("embed", inputs, fields))
        return Vectors(((0.5, -1.0),), Usage(1, 0))

    def embed_tokens(self: Client, inputs: Any, **fields: Any) -> TokenVectors:
        asked.append(("embed_tokens", inputs, fields))
        return TokenVectors((((0.5, -1.0), (0.25, 1.0)),), Usage(2, 0))

    monkeypatch.setattr(Client, "embed", embed)
    monkeypatch.setattr(Client, "embed_tokens", embed_tokens)
    return asked


URL = "https://a.example/b.png"
PICTURE = {"type": "image_url", "image_url": {"url": URL}}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["A harbour"], ("embed", "A harbour", {"model": ""})),
        (["-", "--dimensions", "2"], ("embed", "typed", {"model": "", "dimensions": 2})),
        (
            ["--image", URL, "--model", "m"],
            ("embed", [{"role": "user", "content": [PICTURE]}], {"model": "m"}),
        ),
        (["A harbour", "--tokens"], ("embed_tokens", "A harbour", {"model": ""})),
        (
            ["Where?", "--tokens", "--query"],
            (
                "embed_tokens",
                [{"role": "query", "content": [{"type": "text", "text": "Where?"}]}],
                {"model": ""},
            ),
        ),
        (
            ["A port", "--tokens", "--image", URL, "--dimensions", "2"],
            (
                "embed_tokens",
                [{"role": "user", "content": [PICTURE, {"type": "text", "text": "A port"}]}],
                {"model": "", "dimensions": 2},
            ),
        ),
    ],
)
def test_vectors_come_one_a_line(embedded: list[Any], words: list[str], expected: Any) -> None:
    result = CliRunner().invoke(app, ["embed", *words], input="typed")
    assert result.exit_code == 0, result.output
    assert embedded == [expected]
    of_tokens = [[0.5, -1.0], [0.25, 1.0]]
    assert [json.loads(line) for line in result.output.splitlines()] == (
        of_tokens if "--tokens" in words else of_tokens[:1]
    )


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ([], "give a text or --image"),
        ([" "], "give a text or --image"),
        (["-"], "give a text or --image"),
        (["why?", "--query"], "--query goes with --tokens"),
        (["why?", "--query", "--tokens", "--image", URL], "without --query"),
    ],
)
def test_what_cannot_be_embedded_is_not_sent(embedded: list[Any], words: list[str], remedy: str) -> None:
    result = CliRunner().invoke(app, ["embed", *words], input="")
    assert isinstance(result.exception, ConfigError) and remedy in str(result.exception)
    assert not embedded


def test_a_picture_to_embed_that_is_none_is_named(embedded: list[Any], tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("hello")
    result = CliRunner().invoke(app, ["embed", "--image", str(notes)])
    assert result.exit_code == 1 and "notes.txt: not an image" in result.output
    assert not embedded


@pytest.mark.parametrize(
    ("scheme", "first_bytes", "remedy"),
    [
        ("http", b"\0\0\x06\x04\0\0\0\0\0\0\x05\0\0@\0", "the gRPC port"),
        ("https", b"HTTP/1.1 400 Bad Request\r\n\r\n", "write http://"),
        ("http", b"", "https://"),
    ],
    ids=["gRPC", "no TLS", "TLS"],
)
def test_a_port_of_another_kind_is_one_sentence_with_what_it_may_be(scheme, first_bytes, remedy):
    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = listener.accept()[0]
                connection.recv(1 << 16)
                connection.sendall(first_bytes)
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        result = CliRunner().invoke(app, ["ask", "why?", "--url", url])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    assert result.exit_code == 1
    assert url in result.output and remedy in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("url", ["ftp://x", "not a url", ""])
def test_an_invalid_address_is_a_clear_error(url: str):
    result = CliRunner().invoke(app, ["ask", "why?", "--url", url])
    assert result.exit_code == 1
    assert "is not the URL of a cluster" in result.output


def test_a_file_is_transcribed_or_the_error_is_shown(tmp_path: Path):
    url = f"http://127.0.0.1:{free_port()}"
    sound = tmp_path / "a.wav"
    sound.write_bytes(b"RIFF")
    result = CliRunner().invoke(app, ["transcribe", str(sound), "--url", url])
    assert result.exit_code == 1
    assert result.output.count("\n") == 1
    assert url in result.output and "triptych serve" in result.output
    result = CliRunner().invoke(app, ["transcribe", str(tmp_path / "none.wav")])
    assert result.exit_code == 2 and "does not exist" in result.output
    result = CliRunner().invoke(app, ["transcribe", str(sound), "--format", "xml"])
    assert result.exit_code == 2 and "verbose_json" in result.output


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
