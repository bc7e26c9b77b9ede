"""The chart's colocated pool as processes: one replica under its own user of the store answers a picture."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest

from support.kubernetes.chart import example, render
from support.kubernetes.cluster import MiniCluster
from triptych.demo import examples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


async def test_a_pool_of_replicas_answers_a_picture(tmp_path: Path) -> None:
    values = example("one-gpu-node") | {"model": {"source": "demo"}, "apiKeys": {"enabled": False}}
    values["tls"] = {"enabled": False}  # the store's server of the test speaks none
    values["store"]["maxMemory"] = "128Mi"
    values["colocatedPools"] = [
        {"name": "cpu", "device": "cpu", "args": ["--threads", "1", "--kv-memory", "64MiB"]}
    ]
    async with MiniCluster(tmp_path, nodes=1, tempo=0.2, endpoint_delay=0.1) as cluster:
        cluster.apply(render(values))
        await cluster.wait_until_rolled_out()
        url = f"http://{cluster.address('triptych-proxy', 8000)}/v1/chat/completions"
        body = json.loads(examples.EXAMPLE_REQUEST.read_text())
        timeout = aiohttp.ClientTimeout(120)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, json=body) as reply:
            answer = await reply.json()
        assert answer["choices"][0]["message"]["content"] == examples.EXPECTED_ANSWER
