"""Marking the audio demo: the figures of the report, and recordings sent over HTTP."""

import io
import json
import threading
from collections.abc import Iterator, Sequence
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import soundfile

from examples.demo_models.audio.evaluate import NOISES, cases, evaluate, report
from examples.demo_models.audio.inference import Http, Timed
from examples.demo_models.audio.recordings import held_out
from triptych.demo.tones import FloatArray


class Listener:
    """Hears all but what it shall not; its segments are late by `late` seconds."""

    def __init__(self, seed: int, n: int, deaf: int, late: float) -> None:
        self.recordings = cases(seed, n)
        self.deaf = deaf
        self.late = late

    def plain(self, sounds: Sequence[FloatArray]) -> list[str]:
        return [one.digits if k >= self.deaf else "" for k, one in enumerate(self.recordings)]

    def timed(self, sounds: Sequence[FloatArray]) -> list[Timed]:
        return [
            Timed(one.digits, one.tones[0].start + self.late, one.tones[-1].end) if k >= self.deaf
            else Timed("", None, None)
            for k, one in enumerate(self.recordings)
        ]  # fmt: skip


class _Server(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        form = message_from_bytes(f"Content-Type: {self.headers['Content-Type']}\n\n".encode() + body)
        parts = {part.get_param("name", header="content-disposition"): part for part in form.get_payload()}
        samples, rate = soundfile.read(io.BytesIO(parts["file"].get_payload(decode=True)))
        text = f" {self.path} {parts['model'].get_payload()} {len(samples) / rate}"
        reply = {"text": text}
        if parts["response_format"].get_payload() == "verbose_json":
            reply["segments"] = [
                {"start": 0.0, "end": 0.3, "text": " "},
                {"start": 0.5, "end": 1.5, "text": "7"},
            ]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

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


def test_cases_are_held_out_and_spread_over_lengths_and_noises() -> None:
    found = cases(1, 60)
    assert all(held_out(one.digits) for one in found)
    assert {(len(one.digits), one.snr) for one in found} == {(n, snr) for n in range(3, 9) for snr in NOISES}
    assert found == cases(1, 60) != cases(2, 60)


def test_the_report_counts_right_recordings_and_late_starts() -> None:
    listener = Listener(1, 30, deaf=3, late=0.25)
    marks = evaluate(listener, listener.recordings)
    lines = {line.split("|")[1].strip(): line for line in report(marks).splitlines()}
    assert lines["**all**"] == "| **all** | 30 | 90.0 % | 90.0 % | 0.25 / inf | 0.0 % | 0.00 / inf |"
    assert lines["3 digits"].startswith("| 3 digits | 5 | 80.0 % |")
    assert lines["no noise"].startswith("| no noise | 6 | 50.0 % |")
    assert lines["5 dB"] == "| 5 dB | 6 | 100.0 % | 100.0 % | 0.25 / 0.25 | 0.0 % | 0.00 / 0.00 |"


def test_a_server_gets_a_file_and_its_first_segment_with_text_counts(url: str) -> None:
    sounds = [np.zeros(8000, dtype=np.float32), np.zeros(16000, dtype=np.float32)]
    listener = Http(url, "some-model")
    texts = [f"/v1/audio/transcriptions some-model {seconds}" for seconds in (0.5, 1.0)]
    assert listener.plain(sounds) == texts
    assert listener.timed(sounds) == [Timed(text, 0.5, 1.5) for text in texts]
