"""Releases of the chart as processes: the laptop example from start to end, and upgrades under load."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.engine.encoder_bench import png
from support.kubernetes.chart import example, render, render_upgrade
from support.kubernetes.cluster import MiniCluster
from support.processes.processes import lives
from support.stores.server import StoreServer
from support.waiting import until
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


async def test_the_laptop_example_answers_a_picture_and_leaves_nothing(tmp_path, store_server):
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


TOKENS = 60
OLD = {"name": "old"}
NEW = {"name": "new", "model": {"path": "two", "revision": "two"}}


def values(store: str, vllm: str, pools: list[dict[str, Any]]) -> dict[str, Any]:
    given = laptop()
    given["store"] = {"mode": "external", "acl": False, "external": {"url": store}}
    given["model"] = {
        "source": "pvc",
        "name": "m",
        "path": "one",
        "revision": "one",
        "pvc": {"existingClaim": "models"},
    }
    given["encoder"]["args"] = ["--threads", "1", "--dtype", "float32"]
    engine = {"image": f"registry.example/vllm:{vllm}", "dtype": "float32"}
    engine["env"] = [{"name": "FAKE_VERSION", "value": vllm}]
    given["pd"] |= {"args": ["--threads", "1"], "engine": "vllm", "vllm": engine}
    return given | {"encoderPools": pools, "pdPools": pools}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`vllm` and `triptych` as the images have them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, module in (("vllm", "support.vllm.program"), ("triptych", "triptych.apps.cli")):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    yield folder


class Load:
    """Requests with pictures, some at a time, over and over; every one is streamed to its end."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._headers = url, {"Authorization": f"Bearer {key}"}
        self._stop = False
        self.done = 0
        self.lost: list[str] = []

    async def run(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
            await asyncio.gather(*(self._client(session, number) for number in range(4)))

    def stop(self) -> None:
        self._stop = True

    async def _client(self, session: aiohttp.ClientSession, client: int) -> None:
        number = 0
        while not self._stop:
            number += 1
            lost = await self._ask(session, png(picture(100 * client + number, 64, 64)))
            self.lost += [f"request {number} of client {client}: {lost}"] if lost else []
            self.done += 1

    async def _ask(self, session: aiohttp.ClientSession, image: bytes) -> str:
        """Why the answer is not whole; "" if it is."""
        url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
        body = {
            "model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS,
            "ignore_eos": True, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        path = f"{self._url}/v1/chat/completions"
        async with session.post(path, json=body, headers=self._headers) as reply:
            text = await reply.text()
        if reply.status != 200:
            return f"{reply.status} {text[:200]}"
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        usage = [json.loads(one).get("usage") for one in events[:-1]]
        whole = events[-1] == "[DONE]" and usage[-1] and usage[-1]["completion_tokens"] == TOKENS
        return "" if whole else f"{events[-2:]}"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_versions_of_vllm_and_of_the_model_change_under_load_and_nothing_is_lost(
    tmp_path: Path, store_server: StoreServer, programs: Path
) -> None:
    models = tmp_path / "models"
    build_checkpoint("qwen3_vl", models / "one")
    build_checkpoint("qwen3_vl", models / "two", variant="tied")
    before = render(values(store_server.url, "0.32.0", [OLD]))
    async with MiniCluster(tmp_path / "pods", before, {"models": models}) as cluster:
        load = Load("http://" + cluster.address("triptych-proxy", 8000), api_key(before))
        running = asyncio.create_task(load.run())

        async def upgraded(step: str, vllm: str, pools: list[dict[str, Any]]) -> list[str]:
            done = load.done
            await until(lambda: load.done > done + 4 or running.done(), "requests before the upgrade", 120)
            manifests = render_upgrade(tmp_path / step, before, values(store_server.url, vllm, pools))
            codes = await cluster.apply(manifests)
            assert set(sum(codes.values(), [])) <= {0}, codes
            return sorted(codes)

        assert await upgraded("vllm", "0.33.0", [OLD]) == ["triptych-pd-old"]
        assert await upgraded("beside", "0.33.0", [OLD, NEW]) == []
        assert await upgraded("after", "0.33.0", [NEW]) == ["triptych-encoder-old", "triptych-pd-old"]
        done = load.done
        await until(lambda: load.done > done + 4 or running.done(), "requests after the upgrades", 120)
        load.stop()
        await asyncio.wait_for(running, 120)
        assert load.lost == []
        logs = {pod.name: pod.log() for pod in cluster.pods}
        assert sorted(logs) == ["triptych-encoder-new", "triptych-pd-new", "triptych-proxy"]
        assert "vLLM 0.33.0 serves" in logs["triptych-pd-new"]
