"""The worker as a process: ready, registered, healthy; drained and gone on SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import sys
import urllib.request

from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.data.checkpoints import build_checkpoint
from support.fakes.pd_client import PDClient
from triptych.base.cpu.threads import decoder_threads
from triptych.base.rpc.channels import make_channel
from triptych.registry.registry import Registry
from triptych.store.embedding_store import EmbeddingStore

_CHILD = """
import asyncio, sys
from triptych.base.log import setup_logging
setup_logging("pd-0")
from triptych.base.config import PDConfig
from triptych.pd_worker.service import run
asyncio.run(run(PDConfig(model=sys.argv[1], store=sys.argv[2], max_model_len=1024, kv_memory=32 << 20)))
"""


async def test_a_worker_registers_serves_drains_and_withdraws(store: EmbeddingStore, store_url: str) -> None:
    model = str(build_checkpoint("qwen3_vl"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CHILD, model, store_url, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    log = []
    try:
        async for line in process.stderr:
            log.append(line.decode())
            if "ready: pd" in log[-1]:
                break
        registry = Registry(store)
        async with asyncio.timeout(10):
            while not (workers := await registry.workers()):
                await asyncio.sleep(0.02)
        [info] = workers
        assert info.pool == "pd"
        assert info.capacity["max_model_len"] == 1024
        assert info.capacity["max_num_seqs"] == 64
        async with make_channel(info.address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            reply = await check(health_pb2.HealthCheckRequest(), timeout=5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            client = PDClient(channel, info.model_key)
            await client.attach()
            await client.submit(client.message("r1", "Tell me more", max_tokens=400, ignore_eos=True))
            await client.until("r1", tokens=1)
            url = f"http://127.0.0.1:{info.capacity['metrics_port']}/metrics"
            page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
            assert "vllm:num_requests_running" in page
            process.send_signal(signal.SIGTERM)
            answer = await client.until("r1")
            assert (len(answer.token_ids), answer.finished.reason) == (400, "length")
            await client.detach()
        await process.communicate()
        assert process.returncode == 0, log
        assert await registry.workers() == []
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def test_narrow_decoders_get_one_thread() -> None:
    assert decoder_threads(0, 160) == 1
    assert decoder_threads(0, 4096) >= 1
