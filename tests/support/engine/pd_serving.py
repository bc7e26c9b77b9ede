"""A real PD worker in the test's process, behind a real gRPC server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from support.data.checkpoints import build_checkpoint
from support.fakes.pd_client import PDClient
from triptych.base.config import PDConfig
from triptych.base.metrics import PDMetrics
from triptych.base.rpc.channels import make_channel, make_server
from triptych.pd_worker.native import LoadedModel, NativeWorker, load_model
from triptych.protos import pd_pb2_grpc


def tiny_model(family: str, **flags: Any) -> LoadedModel:
    return load_model(_config(str(build_checkpoint(family)), **flags))


@asynccontextmanager
async def serving(
    model: LoadedModel, store_url: str, **flags: Any
) -> AsyncIterator[tuple[NativeWorker, PDClient]]:
    """The worker, and a client whose stream is open."""
    worker = NativeWorker(_config(str(model.path), store=store_url, **flags), model, PDMetrics("tiny"))
    server = make_server()
    port = server.add_insecure_port("127.0.0.1:0")
    pd_pb2_grpc.add_PDServiceServicer_to_server(worker.servicer, server)
    worker.start()
    await server.start()
    try:
        async with make_channel(f"127.0.0.1:{port}") as channel:
            client = PDClient(channel, model.identity.model_key)
            await client.attach()
            yield worker, client
            await client.detach()
    finally:
        worker.streams.shut_down()
        await server.stop(1.0)
        await worker.stop()


def _config(model: str, **flags: Any) -> PDConfig:
    return PDConfig(**{"model": model, "kv_memory": 32 << 20, "max_model_len": 512, "threads": 1, **flags})
