"""KEDA's loops start and end real encoder processes of a real model; answers are those of a fixed pool."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from openai import AsyncOpenAI

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.fakes.fake_workers import TOKEN
from support.keda.hpa import Behavior
from support.keda.operator import KedaOperator, ScaledObject
from support.keda.process_fleet import ProcessFleet
from support.processes.cluster import PATIENCE, free_port
from support.processes.proxy_process import started_proxy, started_service
from support.waiting import until, within
from triptych.ec_connector.registry.registry import Registry
from triptych.ec_connector.store.embedding_store import EmbeddingStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: KEDA's seconds in one of ours, and the most processes on this machine.
SPEED, MOST = 10.0, 2
RULES = ("--min-encoders", "0", "--max-encoders", str(MOST), "--encoder-slo", "0.2", "--scale-window", "5")
SPEC = ScaledObject(
    {"pool": "encoder"},
    most=MOST,
    polling_interval=5.0,
    cooldown_period=5.0,
    behavior=Behavior(down_stabilization=0.0, up_pods=MOST),
)


def question(*seeds: int) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "what?"}]
    for seed in seeds:
        buffer = io.BytesIO()
        picture(seed).save(buffer, format="PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return [{"role": "user", "content": parts}]


@contextlib.contextmanager
def fleet(model: Path, store_url: str, log: Path) -> Iterator[ProcessFleet]:
    made = ProcessFleet(model, store_url, TOKEN, log)
    try:
        yield made
    finally:
        made.close()


async def answers(client: AsyncOpenAI) -> list[str]:
    """Answers to eight questions about two pictures each, asked at once."""
    asked: list[Any] = [
        client.chat.completions.create(
            model="tiny", messages=question(2 * n, 2 * n + 1), max_tokens=8, temperature=0
        )
        for n in range(8)
    ]
    replies = await within("all answers", asyncio.gather(*asked), PATIENCE)
    return [str(reply.choices[0].message.content) for reply in replies]


async def test_processes_come_with_a_burst_and_go_after_it_and_the_next_burst_is_answered_alike(
    store: EmbeddingStore, store_url: str, tmp_path: Path
) -> None:
    model = build_checkpoint("qwen3_vl", tmp_path / "tiny")
    port = free_port()
    decoder = ("pd", str(model), "--threads", "1", "--kv-memory", "64MiB", "--encoder-cache-memory", "32MiB")
    registry = Registry(store)
    with fleet(model, store_url, tmp_path / "encoders.log") as pods:
        async with (
            started_service(store_url, tmp_path / "pd.log", *decoder),
            started_proxy(
                store_url,
                tmp_path / "proxy.log",
                *RULES,
                "--scaler-port",
                str(port),
                "--request-timeout",
                "170",
            ) as (_, http_port, _),
            aio.insecure_channel(f"127.0.0.1:{port}") as channel,
            AsyncOpenAI(
                base_url=f"http://127.0.0.1:{http_port}/v1", api_key="-", max_retries=0, timeout=PATIENCE
            ) as client,
        ):

            async def served() -> bool:
                return bool((await client.models.list()).data)

            await within("the PD worker", _true(served), PATIENCE)
            async with KedaOperator(SPEC, pods, channel, SPEED).running():
                first = await answers(client)
                # The pool is idle for three cold starts first, and those take long on a busy machine.
                await until(lambda: pods.replicas == 0, "the way back to zero", 2 * PATIENCE)
                assert pods.steps[0] == 1 and max(pods.steps) <= MOST
                await store.control.execute("FLUSHDB")
                assert await answers(client) == first
            pods.scale(0)
            codes = await asyncio.to_thread(pods.codes)
        assert set(codes) == {0}, pods.log.read_text()[-2000:]
        assert not [info for info in await registry.workers() if info.pool == "encoder"]


async def _true(holds: Any) -> None:
    while True:
        with contextlib.suppress(Exception):
            if await holds():
                return
        await asyncio.sleep(0.2)
