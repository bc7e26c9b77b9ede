"""The supervisor keeps its cluster, whatever becomes of the folder in which it tells of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

from support.processes.processes import lives, survivors
from support.waiting import until, within
from triptych.apps.launch import children, supervisor
from triptych.apps.launch.children import Child
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.apps.launch.supervisor import ClusterPlan, Supervisor

_SLEEP = (
    sys.executable,
    "-c",
    "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()} '); time.sleep(600)",
)


async def test_a_folder_that_is_gone_ends_neither_the_cluster_nor_its_restarts(tmp_path: Path):
    told = tmp_path / "pids"
    plan = ClusterPlan(
        workers=(("pd-0", (*_SLEEP, str(told))),),
        worker_secrets={},
        proxy=(*_SLEEP, str(tmp_path / "proxy")),
        proxy_secrets={},
        proxy_address=("127.0.0.1", 1),
        pools={"pd": 1},
        run_dir=tmp_path / "gone",
        store_url=f"unix://{tmp_path}/no.sock",
        store=None,
    )

    def pids() -> list[int]:
        return [int(pid) for pid in told.read_text().split()] if told.exists() else []

    run = asyncio.create_task(Supervisor(plan, lambda: None).run())
    try:
        await until(lambda: len(pids()) == 1 or run.done(), "the first start")
        os.kill(pids()[0], signal.SIGKILL)
        await until(lambda: len(pids()) == 2 or run.done(), "the second start")
        assert not run.done()
    finally:
        if not run.done():
            os.kill(os.getpid(), signal.SIGTERM)
        code = await within("the end of all", run)
    assert code == 0


async def test_the_cluster_is_announced_where_nothing_can_be_written_about_it(tmp_path, monkeypatch, caplog):
    """A full disk, or a folder that was removed, is told once."""

    async def ready(*_: object, **__: object) -> bool:
        return True

    monkeypatch.setattr(supervisor, "answers_ready", ready)
    plan = ClusterPlan(
        workers=(),
        worker_secrets={},
        proxy=(*_SLEEP, str(tmp_path / "proxy")),
        proxy_secrets={},
        proxy_address=("127.0.0.1", 1),
        pools={},
        run_dir=tmp_path / "gone",
        store_url=f"unix://{tmp_path}/no.sock",
        store=None,
    )
    announced = asyncio.Event()
    run = asyncio.create_task(Supervisor(plan, announced.set).run())
    try:
        await within("the greeting", asyncio.create_task(announced.wait()))
        await until(lambda: (tmp_path / "proxy").exists(), "the proxy's start")
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        await within("the end of all", run)
    assert sum(message.startswith("cluster.json is out of date") for message in caplog.messages) == 1


_SLEEPER = "import time; time.sleep(600)"


async def test_a_start_that_the_system_refuses_is_tried_again(monkeypatch, caplog):
    refusals = [OSError(28, "No space left on device")]

    def full(**options: str) -> TemporaryDirectory[str]:
        if refusals:
            raise refusals.pop()
        return TemporaryDirectory(**options)

    monkeypatch.setattr(children, "TemporaryDirectory", full)
    child = Child("pd-0", [sys.executable, "-c", _SLEEPER])
    watch = asyncio.create_task(child.watch())
    try:
        await until(lambda: child.pid is not None or watch.done(), "the second try")
    finally:
        await child.end(grace=10.0)
        assert await within("the end of the watch", watch) == 0
    assert "pd-0 could not be started: [Errno 28] No space left on device; it starts again" in caplog.text


async def test_a_store_that_the_system_does_not_start_is_tried_again(tmp_path, monkeypatch, caplog):
    store = EmbeddedStore(tmp_path, 32 << 20)
    monkeypatch.setattr(EmbeddedStore, "start", Mock(side_effect=OSError(11, "Resource unavailable")))
    await store.keep_running()
    assert "the embedding store could not be started, and is tried again: [Errno 11]" in caplog.text


async def test_every_start_and_every_end_of_a_child_is_told():
    told: list[int | None] = []
    child = Child("pd-0", [sys.executable, "-c", _SLEEPER], on_change=lambda: told.append(child.pid))
    watch = asyncio.create_task(child.watch())
    try:
        await until(lambda: len(told) == 1, "the first start")
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: len(told) == 3, "the second start")
        second = child.pid
    finally:
        await child.end(grace=10.0)
        await within("the end of the watch", watch)
    assert told == [first, None, second, None]
    assert first != second


async def test_why_a_child_cannot_work_as_configured_is_the_supervisors_last_line(tmp_path, caplog):
    command = (sys.executable, "-m", "triptych.apps.cli", "pd", str(tmp_path / "none"))
    plan = ClusterPlan(
        workers=(("pd-0", command),),
        worker_secrets={},
        proxy=(sys.executable, "-c", _SLEEPER),
        proxy_secrets={},
        proxy_address=("127.0.0.1", 1),
        pools={"pd": 1},
        run_dir=tmp_path,
        store_url=f"unix://{tmp_path}/no.sock",
        store=None,
    )
    with caplog.at_level("INFO", logger="launch"):
        assert await within("the end of all", asyncio.create_task(Supervisor(plan, lambda: None).run())) == 2
    assert caplog.messages[-1].startswith("pd-0: --store is missing: give")


_SUPERVISOR = """
import sys, time
from pathlib import Path
from triptych.apps.launch.embedded_store import EmbeddedStore

store = EmbeddedStore(Path(sys.argv[1]), 32 << 20)
store.start()
print(store.pid, flush=True)
time.sleep(600)
"""


def test_the_embedded_store_ends_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with supervisor:
        pid = int(supervisor.stdout.readline())
        assert lives(pid)
        supervisor.kill()
    left = survivors([pid])
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    assert not (tmp_path / "store.sock").exists()
