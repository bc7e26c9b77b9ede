"""The chart's laptop example as processes: every pod ready, one picture answered, nothing left at the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.kubernetes.chart import example, render
from support.kubernetes.cluster import MiniCluster
from support.processes.processes import lives
from support.stores.server import StoreServer
from triptych.demo import examples

pytestmark = pytest.mark.timeout(240)

#: Little memory for the test's machine.
SMALL = {"encoder": ["--threads", "1"], "pd": ["--threads", "1", "--kv-memory", "64MiB"]}


def laptop() -> dict[str, Any]:
    """The example's values, with the words of SMALL."""
    values = example("laptop-kind")
    for component, words in SMALL.items():
        values[component]["args"] = words
    values["proxy"]["preStopSeconds"] = 1
    return values


def api_key(manifests: list[dict[str, Any]]) -> str:
    (secret,) = [one for one in manifests if one["kind"] == "Secret" and "key" in one.get("stringData", {})]
    return str(secret["stringData"]["key"])


@pytest.fixture
def store_server(tmp_path: Path) -> Iterator[StoreServer]:
    server = StoreServer(tmp_path / "store")
    server.start()
    yield server
    server.kill()


async def ask(url: str, key: str) -> str:
    body = json.loads(examples.EXAMPLE_REQUEST.read_text())
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session,
        session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply,
    ):
        return str((await reply.json())["choices"][0]["message"]["content"])


async def test_the_laptop_example_answers_a_picture_and_leaves_nothing(
    tmp_path: Path, store_server: StoreServer
) -> None:
    """Over the certificate that the chart makes. The store is outside: that of the test speaks no TLS."""
    values = laptop()
    values["store"] = {"mode": "external", "acl": False, "external": {"url": store_server.url}}
    manifests = render(values)
    async with MiniCluster(tmp_path, manifests) as cluster:
        url = "http://" + cluster.address("triptych-proxy", 8000)
        assert await ask(url, api_key(manifests)) == examples.EXPECTED_ANSWER
        pids = [process.pid for pod in cluster.pods for process in pod.processes.values()]
        assert len(pids) == 3
        codes = await asyncio.wait_for(cluster.stop(), 60)
        assert set(sum(codes.values(), [])) == {0}, codes
        assert not [pid for pid in pids if lives(pid)]
