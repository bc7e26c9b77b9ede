"""An encoder worker of two ranks as processes: it serves, and a rank that is killed takes it along."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.engine.encoder_bench import Job, png
from support.processes.cluster import scrape
from support.ranks.groups import children
from support.waiting import within
from triptych.base.rpc.channels import make_channel
from triptych.base.types import WorkerInfo
from triptych.base.watchdog import ENGINE_EXIT
from triptych.protos import encoder_pb2_grpc
from triptych.registry.registry import Registry
from triptych.store.embedding_store import EmbeddingStore

_WORKER = """
import asyncio, sys
from triptych.base.log import setup_logging
setup_logging("encoder-0")
from triptych.base.config import EncoderConfig
from triptych.encoder_worker.service import run
model, store = sys.argv[1:]
asyncio.run(run(EncoderConfig(model=model, store=store, threads=1, encoder_data_parallel=2)))
"""


async def _registered(store: EmbeddingStore) -> list[WorkerInfo]:
    """A worker says that it is ready shortly before it registers."""
    while not (workers := await Registry(store).workers()):
        await asyncio.sleep(0.05)
    return workers


@pytest.mark.timeout(240)
async def test_two_ranks_serve_and_a_rank_that_is_killed_ends_the_worker(
    store: EmbeddingStore, store_url: str
) -> None:
    words = (sys.executable, "-c", _WORKER, str(build_checkpoint("qwen3_vl")), store_url)
    process = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        while b"ready: encoder" not in (line := await within("the worker", process.stderr.readline())):
            assert line, "the worker has ended"
        [info] = await within("its registration", _registered(store))
        assert info.capacity["tower_credit"] == 2 * 8
        assert info.kind.endswith(" x2 ranks")
        async with make_channel(info.address) as channel:
            stub = encoder_pb2_grpc.EncoderServiceStub(channel)
            for seed in range(6):
                job = Job(SimpleNamespace(stub=stub), png(picture(seed)), namespace=info.namespaces[0])
                assert (await (await job.planned()).finished()).WhichOneof("body") == "ready"
        page = await asyncio.to_thread(scrape, f"http://127.0.0.1:{info.capacity['metrics_port']}/metrics")
        assert page["triptych_encoder_ranks"] == 2
        assert page["triptych_encoder_rank_items_total"] == 6
        (rank,) = children(process.pid)
        os.kill(rank, signal.SIGKILL)
        _, log = await within("the end of the worker", process.communicate())
        assert process.returncode == ENGINE_EXIT
        assert b"rank 1 has ended with SIGKILL" in log
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
