"""The worker as a process: ready, registered, healthy; drained and gone on SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.engine.encoder_bench import Job, png
from triptych.base.config import EncoderConfig
from triptych.base.errors import ConfigError
from triptych.base.rpc.channels import make_channel
from triptych.encoder_worker.service import run
from triptych.protos import encoder_pb2_grpc
from triptych.registry.registry import Registry
from triptych.store import keys
from triptych.store.embedding_store import EmbeddingStore

_CHILD = """
import asyncio, sys
from triptych.base.log import setup_logging
setup_logging("encoder-0")
from triptych.base.config import EncoderConfig
from triptych.encoder_worker.service import run
asyncio.run(run(EncoderConfig(model=sys.argv[1], store=sys.argv[2], threads=1)))
"""


async def test_a_worker_registers_serves_and_withdraws(store: EmbeddingStore, store_url: str) -> None:
    model = str(build_checkpoint("qwen3_vl"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CHILD, model, store_url, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    log = []
    try:
        async for line in process.stderr:
            log.append(line.decode())
            if "ready: encoder" in log[-1]:
                break
        registry = Registry(store)
        async with asyncio.timeout(10):
            while not (workers := await registry.workers()):
                await asyncio.sleep(0.02)
        [info] = workers
        assert info.pool == "encoder"
        assert info.capacity["plan_credit"] == 16
        async with make_channel(info.address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            reply = await check(health_pb2.HealthCheckRequest(), timeout=5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            stub = encoder_pb2_grpc.EncoderServiceStub(channel)
            job = Job(SimpleNamespace(stub=stub), png(picture(1)), namespace=info.namespaces[0])
            assert (await (await job.planned()).finished()).WhichOneof("body") == "ready"
            assert await store.control.execute("EXISTS", keys.embedding(job.key))
        url = f"http://127.0.0.1:{info.capacity['metrics_port']}/metrics"
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
        assert "triptych_encoder_jobs" in page
        process.send_signal(signal.SIGTERM)
        await process.communicate()
        assert process.returncode == 0, log
        assert await registry.workers() == []
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"store": ""}, "--store"),
        ({"store": "unix:///nowhere/store.sock"}, "--store"),
        ({"host": "0.0.0.0"}, "--internal-token"),
        ({"host": "0.0.0.0", "internal_token": "t"}, "--advertise"),
        ({"advertise": "0.0.0.0:1"}, "--advertise"),
        ({"device": "toaster"}, "--device"),
        ({"device": "cuda:99"}, "--device"),
        ({"model": "/nowhere"}, "MODEL"),
    ],
)
async def test_what_cannot_work_is_refused_at_the_start(
    store_url: str, flags: dict[str, Any], named: str
) -> None:
    good = {"store": store_url, "model": str(build_checkpoint("qwen3_vl")), "threads": 1}
    with pytest.raises(ConfigError, match=named):
        await run(EncoderConfig(**{**good, **flags}))


@pytest.mark.parametrize("flag", ["port", "metrics_port"])
async def test_a_taken_port_is_refused_at_the_start(store_url: str, flag: str) -> None:
    model = str(build_checkpoint("qwen3_vl"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="taken"):
            await run(EncoderConfig(store=store_url, model=model, threads=1, **{flag: port}))
