"""What a new user does: serve the audio demo, dial a number, have it written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.demo_models.audio.evaluate import cases, evaluate
from examples.demo_models.audio.inference import Http
from support.options import triptych
from support.processes.cluster import Cluster, running_cluster
from triptych import Client

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    words = ("--demo", "audio", "--threads", "1")
    with running_cluster(None, tmp_path_factory.mktemp("audio"), *words) as cluster:
        yield cluster


def test_the_pasted_lines_are_told_and_the_number_is_written(served: Cluster, tmp_path: Path) -> None:
    told = served.log.read_text()
    assert "tones 5551234 -o tones.wav" in told
    assert f"transcribe tones.wav --url {served.url}" in told
    assert f"curl -s {served.url}/v1/audio/transcriptions -F file=@tones.wav" in told
    file = tmp_path / "tones.wav"
    assert triptych("tones", "5551234", "-o", str(file)).returncode == 0
    with Client(served.url) as client:
        plain = client.transcribe(file, response_format="json")
        timed = client.transcribe(file, response_format="verbose_json")
    assert (plain.text, timed.text) == ("5551234", "5551234")
    first = timed.segments[0]
    assert (first.text.strip(), first.start) == ("5551234", pytest.approx(0.4, abs=0.2))
    assert first.end == pytest.approx(2.05, abs=0.2)


def test_held_out_recordings_are_written_without_times_and_with_them(served: Cluster) -> None:
    marks = evaluate(Http(served.url), cases(seed=4, n=6))
    assert [mark.plain for mark in marks] == [mark.recording.digits for mark in marks]
    assert [mark.timed.text for mark in marks] == [mark.recording.digits for mark in marks]
    for mark in marks:
        assert mark.start_error is not None and mark.start_error <= 0.2
        assert mark.end_error is not None and mark.end_error <= 0.2
