"""A rolling restart of everything, by each launcher: every answer is whole and right.

TRIPTYCH_ROLLING_RESULT, a folder, gets the table and a time line of each launcher.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.chaos.rest import assert_at_rest
from support.chaos.rolling import BalancedClients, Restarts, draw, figures, ready
from support.chaos.soak import TOKENS
from support.data.traffic import expected, mixed_cases
from support.processes.cluster import PATIENCE, Cluster, free_port, start_cluster, wait_for
from support.processes.ray_nodes import ray_nodes
from support.waiting import within

RESULT = os.environ.get("TRIPTYCH_ROLLING_RESULT", "")
CLIENTS = 6
#: Answers without any restart, before the first one and after the last.
QUIET_SECONDS = 5.0
COUNTS = ("--encoders", "3", "--pd-workers", "2")
HEAD = (
    "launcher",
    "answered",
    "lost",
    "wrong",
    "ties",
    "sent to another proxy",
    "request, median / longest s",
    "restarts",
    "restart, median / longest s",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
_rows: dict[str, list[Any]] = {}


@dataclass(frozen=True)
class Rolled:
    """A cluster of 2 proxies, 3 encoders and 2 PD workers.

    `first` and `last` restart the two proxies and `store` the store; each waits until that is done.
    """

    cluster: Cluster
    urls: tuple[str, str]
    first: Callable[[Restarts], None]
    last: Callable[[Restarts], None]
    store: Callable[[Restarts], None]


@pytest.fixture
def local(checkpoint: Path) -> Iterator[Rolled]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rolling-")))
        cluster = start_cluster(checkpoint, folder / "run", *COUNTS, "--threads", "1")
        stack.callback(cluster.stop)
        words = ("proxy", "--port", str(free_port()), "--grpc-port", str(free_port()))
        second = f"http://127.0.0.1:{words[2]}"

        def start() -> None:
            for process in cluster.extra:
                process.terminate()
                process.wait(PATIENCE)
            cluster.extra.clear()
            cluster.add_worker(*words)

        start()
        wait_for("the second proxy", lambda: ready(second))
        yield Rolled(
            cluster,
            (cluster.url, second),
            lambda restarts: restarts.proxy(cluster, "proxy", cluster.url),
            lambda restarts: restarts.by("proxy-1", start, second),
            lambda restarts: restarts.proxy(cluster, "store", cluster.url),
        )


@pytest.fixture
def ray(checkpoint: Path, tmp_path: Path) -> Iterator[Rolled]:
    with ray_nodes(tmp_path, cpus=8) as nodes:
        cluster = nodes.start_cluster(checkpoint, tmp_path / "run", *COUNTS, "--proxies", "2")
        try:
            host, _, port = cluster.url.rpartition(":")
            second = f"{host}:{int(port) + 10}"
            wait_for("the second proxy", lambda: ready(second))
            yield Rolled(
                cluster,
                (cluster.url, second),
                lambda restarts: restarts.proxy(cluster, "proxy-0", cluster.url),
                lambda restarts: restarts.proxy(cluster, "proxy-1", second),
                lambda restarts: restarts.by("store", nodes.store.restart, cluster.url),
            )
        finally:
            cluster.stop()


@pytest.mark.parametrize("launcher", ["local", "ray"])
async def test_no_answer_is_lost_or_wrong_while_everything_is_restarted_in_turn(
    launcher: str, request: pytest.FixtureRequest, checkpoint: Path
) -> None:
    rolled: Rolled = request.getfixturevalue(launcher)
    cases = mixed_cases(24, seed=17)
    clients = BalancedClients(
        rolled.urls, cases, await asyncio.to_thread(expected, checkpoint, cases, TOKENS)
    )
    asking = asyncio.create_task(clients.run(CLIENTS))
    restarts = Restarts()
    await asyncio.sleep(QUIET_SECONDS)
    await asyncio.to_thread(_roll, rolled, restarts)
    await asyncio.sleep(QUIET_SECONDS)
    clients.end()
    await within("the last answers of the clients", asking, 2 * PATIENCE)
    await asyncio.to_thread(assert_at_rest, rolled.cluster)
    if RESULT:
        draw(Path(RESULT) / f"rolling_restart-{launcher}.png", launcher, clients, restarts)
        _rows[launcher] = figures(clients, restarts)
        _write(Path(RESULT) / "rolling_restart.md")
    assert not clients.tally.lost
    assert not clients.tally.wrong
    assert clients.tally.ties * 100 <= clients.tally.answered
    assert len(restarts.done) == 8
    # Each restart met requests in flight.
    assert clients.tally.answered > CLIENTS * len(restarts.done)


def _roll(rolled: Rolled, restarts: Restarts) -> None:
    for name in ("encoder-0", "encoder-1", "encoder-2", "pd-0", "pd-1"):
        restarts.worker(rolled.cluster, name)
    rolled.store(restarts)
    rolled.first(restarts)
    rolled.last(restarts)


def _write(path: Path) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], text=True, capture_output=True, check=True
    ).stdout.strip()
    rows = [HEAD, ["---"] * len(HEAD), *([launcher, *row] for launcher, row in _rows.items())]
    lines = [
        "# Rolling restart",
        "",
        "Command: `TRIPTYCH_ROLLING_RESULT=benchmarks/results "
        "python -m pytest tests/chaos/test_rolling_restart.py`",
        f"Date: {datetime.date.today()}. Commit: {commit}. {os.cpu_count()} cores ({platform.machine()}). "
        f"Load at the end: {os.getloadavg()[0]:.1f}.",
        "",
        "Two proxies, three encoders, two PD workers and the store are restarted one after the other, each",
        f"by SIGTERM and as soon as the one before is at work again. Meanwhile {CLIENTS} clients in a closed",
        f"loop stream {TOKENS} tokens each: text, one picture, three pictures, shared pictures, half of them",
        "new. A client whose proxy cannot be connected to or refuses goes to the other one, as behind a load",
        "balancer. Every answer is compared with `transformers.generate`, token for token.",
        "",
        *("| " + " | ".join(map(str, row)) + " |" for row in rows),
        "",
        *(f"![Time line, {launcher}](rolling_restart-{launcher}.png)\n" for launcher in _rows),
    ]
    path.write_text("\n".join(lines).rstrip() + "\n")
