"""The display of a start, and the targets that are scraped."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
from pathlib import Path

import pytest

from support.options import serve_config
from triptych.apps.launch.cluster_state import TARGETS_FILE, keep_targets, scrape_targets, write_targets
from triptych.apps.launch.plan.cluster import plan_cluster
from triptych.apps.launch.plan.cores import share_cores
from triptych.apps.launch.supervisor import StartDisplay
from triptych.base.progress.progress import StepState
from triptych.base.progress.renderers import VARIABLE, LauncherRenderer, TerminalRenderer, encode
from triptych.base.progress.screen import CLEAR
from triptych.base.types import WorkerInfo
from triptych.store.control import StoreUnavailable


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Shown:
    """A display on a terminal that a test reads."""

    def __init__(self) -> None:
        self.terminal = Terminal()
        self.renderer = TerminalRenderer(self.terminal)
        self.display = StartDisplay(["pd-0", "encoder-0"], self.renderer)

    def frame(self) -> str:
        self.renderer.draw()
        return self.terminal.getvalue().rsplit(CLEAR, 1)[1]

    async def sees(self, text: str) -> None:
        async with asyncio.timeout(10):
            while text not in self.frame():
                await asyncio.sleep(0.01)


@pytest.fixture
async def shown():
    found = Shown()
    found.display.open()
    yield found
    found.display.close()


async def test_a_worker_of_this_process_s_environment_has_its_step_in_its_row(shown):
    worker = LauncherRenderer(Path(os.environ[VARIABLE]), "pd-0")
    worker.show(StepState("1", "loading weights", 5, 10))
    await shown.sees("pd-0: loading weights")
    assert "50 %" in shown.frame()
    worker.show(StepState("1", "loading weights", 10, 10, ended=True))
    await shown.sees("100 %")
    worker.ready()
    await shown.sees("pd-0: ready")
    assert shown.frame().count("pd-0") == 1
    worker.close()


async def test_a_stranger_and_noise_have_no_row(shown):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for data in (b"\xff" * 8000, b"{}", encode("stranger", StepState("1", "evil"))):
            sender.sendto(data, os.environ[VARIABLE])
        sender.sendto(encode("encoder-0", StepState("1", "warming up")), os.environ[VARIABLE])
    await shown.sees("encoder-0: warming up")
    assert "evil" not in shown.frame() and "stranger" not in shown.frame()


async def test_an_ended_display_leaves_no_bar_no_socket_and_no_variable(shown):
    path = Path(os.environ[VARIABLE])
    shown.frame()
    shown.display.close()
    shown.display.close()
    assert shown.terminal.getvalue().endswith(CLEAR)
    assert VARIABLE not in os.environ
    assert not path.parent.exists()


async def test_the_folder_of_the_socket_is_the_user_s_alone(shown):
    assert Path(os.environ[VARIABLE]).parent.stat().st_mode & 0o077 == 0


def _info(address: str, pool: str, port: int = 9100) -> WorkerInfo:
    return WorkerInfo(address, pool, "i", "k" * 64, "m", (), {"metrics_port": port}, "image")


def test_workers_are_named_by_the_port_of_their_metrics_and_their_pool():
    workers = [_info("127.0.0.1:50051", "pd", 9101), _info("[fd00::7]:50052", "encoder", 9102)]
    assert scrape_targets(workers, "127.0.0.1:8000") == [
        {"targets": ["127.0.0.1:8000"], "labels": {"component": "proxy"}},
        {"targets": ["127.0.0.1:9101"], "labels": {"component": "pd"}},
        {"targets": ["[fd00::7]:9102"], "labels": {"component": "encoder"}},
    ]


def test_the_file_is_replaced_only_when_it_says_something_else(tmp_path):
    write_targets(tmp_path, scrape_targets([], "a:1"))
    first = (tmp_path / TARGETS_FILE).stat().st_ino
    write_targets(tmp_path, scrape_targets([], "a:1"))
    assert (tmp_path / TARGETS_FILE).stat().st_ino == first
    write_targets(tmp_path, scrape_targets([], "b:1"))
    assert json.loads((tmp_path / TARGETS_FILE).read_text())[0]["targets"] == ["b:1"]
    assert [path.name for path in tmp_path.iterdir()] == [TARGETS_FILE]


async def test_while_the_store_is_away_the_file_stays(tmp_path):
    class Away:
        async def workers(self) -> list[WorkerInfo]:
            raise StoreUnavailable("switched off")

    write_targets(tmp_path, scrape_targets([_info("a:1", "pd")], "p"))
    before = (tmp_path / TARGETS_FILE).read_text()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await keep_targets(Away(), tmp_path, "p")  # type: ignore[arg-type]
    assert (tmp_path / TARGETS_FILE).read_text() == before


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ([], "127.0.0.1:8000"),
        (["--port", "9000", "--host", "0.0.0.0"], "127.0.0.1:9000"),
        (["--metrics-port", "9100"], "127.0.0.1:9100"),
        (["--metrics-port", "9100", "--metrics-host", "10.0.0.7"], "10.0.0.7:9100"),
        (["--metrics-port", "9100", "--host", "::"], "[::1]:9100"),
    ],
)
def test_the_proxy_is_asked_where_its_metrics_are(tmp_path, words, address):
    assert plan_cluster(share_cores(serve_config(*words), 2), tmp_path).proxy_metrics == address
