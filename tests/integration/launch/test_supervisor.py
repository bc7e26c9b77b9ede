"""The supervisor keeps its cluster, whatever becomes of the folder in which it tells of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from support.waiting import until, within
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
