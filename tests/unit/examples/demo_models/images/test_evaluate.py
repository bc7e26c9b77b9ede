"""Marking: over HTTP as in process, and the report's figures."""

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from examples.demo_models.images.answers import KINDS
from examples.demo_models.images.evaluate import Case, cases, evaluate, report, request
from examples.demo_models.images.inference import Http, Request


class Oracle:
    """Says the truth about the pictures it was told of, and nothing about others."""

    def __init__(self, asked: Sequence[Case]) -> None:
        self._truths = {request(c.sample.pictures, c.question): c.truth for c in asked}

    def answer(self, requests: Sequence[Request]) -> list[str]:
        return [self._truths.get(r, "I do not know.") for r in requests]


class _Server(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        parts = body["messages"][0]["content"]
        said = f"{self.path} {len(parts) - 1} {parts[-1]['text']} {body['temperature']}"
        reply = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_cases_are_seeded_and_of_every_kind() -> None:
    asked = cases(1, 40)
    assert asked == cases(1, 40)
    assert {case.kind for case in asked} == set(KINDS) and len(asked) == 2 * len(KINDS)


def test_an_oracle_of_the_true_pictures_scores_full_marks_and_none_on_grey_ones() -> None:
    asked = cases(1, 1)
    marks = evaluate(Oracle(asked), asked)
    assert report(marks).splitlines()[-1].startswith(f"| **all** | {len(KINDS)} | 100.0 % | 0.0 %")


def test_questions_go_to_a_server_in_order(url: str) -> None:
    picture = b"a picture"
    asked = [Request((picture,) * k, f"question {k}?") for k in range(1, 5)]
    said = Http(url).answer(asked)
    assert said == [f"/v1/chat/completions {k} question {k}? 0" for k in range(1, 5)]
