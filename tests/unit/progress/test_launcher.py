"""Reports from a worker to its launcher: one datagram each, which nothing but a state gets through."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from triptych.base.progress.progress import BYTES, StepState
from triptych.base.progress.renderers import MAX_BYTES, LauncherRenderer, decode, encode

STATE = StepState("3", "loading weights", 5.0, 10.0, BYTES, "note", 2.5, ended=True, failed=False)
_HUGE = b'{"name": "a", "state": {"key": "1", "label": "x", "done": 1e999}}'


@pytest.fixture
def listener(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.setblocking(False)
        found.bind(str(tmp_path / "progress"))
        yield found


def test_a_state_comes_back_from_its_datagram():
    assert decode(encode("pd-0", STATE)) == ("pd-0", STATE)
    unknown = StepState("3", "compiling")
    assert decode(encode("pd-0", unknown)) == ("pd-0", unknown)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"{}", b"[" * 4000, _HUGE])
def test_what_is_no_datagram_of_a_state_is_none(data):
    assert decode(data) is None


def test_a_worker_reports_to_the_socket_of_its_launcher(listener, tmp_path):
    renderer = LauncherRenderer(tmp_path / "progress", "pd-0")
    renderer.show(STATE)
    renderer.ready()
    assert decode(listener.recv(MAX_BYTES)) == ("pd-0", STATE)
    found = decode(listener.recv(MAX_BYTES))
    assert found is not None and found[1].label == "ready" and found[1].ended
    renderer.close()


def test_a_launcher_that_does_not_read_holds_no_worker_up(listener, tmp_path):
    renderer = LauncherRenderer(tmp_path / "progress", "pd-0")
    for _ in range(5000):
        renderer.show(STATE)
    renderer.close()


def test_a_launcher_that_is_gone_ends_no_worker(listener, tmp_path):
    renderer = LauncherRenderer(tmp_path / "progress", "pd-0")
    listener.close()
    renderer.show(STATE)
    renderer.close()
