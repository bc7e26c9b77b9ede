"""A PD worker in front of a scripted vLLM server, behind a real gRPC server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from support.channels import connected_channel
from support.data.checkpoints import build_checkpoint
from support.fakes.pd_client import PDClient
from support.vllm.scripted_server import ScriptedServer
from triptych.base.config import PDConfig
from triptych.base.metrics import PDMetrics
from triptych.base.rpc.channels import make_server
from triptych.pd_worker.vllm.adapters import Adapter
from triptych.pd_worker.vllm.connection import EngineConnection
from triptych.pd_worker.vllm.health import EngineHealth
from triptych.pd_worker.vllm.http.client import VLLMClient
from triptych.pd_worker.vllm.pooled import probe_of
from triptych.pd_worker.vllm.worker import VLLMWorker, load_front_model, proven_tickets
from triptych.pd_worker.worker import PDModel
from triptych.protos import pd_pb2_grpc
from triptych.protos.error_replies import ErrorReplies
from triptych.store.embedding_store import EmbeddingStore

_MODELS: dict[str, PDModel] = {}


def front_config(family: str = "qwen3_vl", **flags: Any) -> PDConfig:
    return PDConfig(
        **{
            "model": str(build_checkpoint(family)),
            "engine": "vllm",
            "dtype": "float32",
            "threads": 1,
            **flags,
        }
    )


def front_model(family: str = "qwen3_vl", **flags: Any) -> PDModel:
    config = front_config(family, **flags)
    if config.model not in _MODELS:
        _MODELS[config.model] = load_front_model(config, 512)
    return _MODELS[config.model]


class Served:
    """What a test drives: the worker, its health, its client's stream, its metrics."""

    def __init__(
        self, worker: VLLMWorker, health: EngineHealth, client: PDClient, metrics: PDMetrics
    ) -> None:
        self.worker = worker
        self.health = health
        self.client = client
        self.metrics = metrics

    async def until_up(self, up: bool) -> None:
        async with asyncio.timeout(45):
            while self.health.up is not up:
                await asyncio.sleep(0.01)

    async def settled(self) -> None:
        """Waits until no request is held, and no call of vLLM is open."""
        async with asyncio.timeout(45):
            while self.worker.engine.num_requests:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def fronting(
    server: ScriptedServer,
    store: EmbeddingStore,
    family: str = "qwen3_vl",
    adapters: Sequence[Adapter] = (),
    **flags: Any,
) -> AsyncIterator[Served]:
    """The worker in front of `server`, and a client whose stream is open."""
    config = front_config(family, engine_url=server.url, **flags)
    model = front_model(family, model=config.model)
    vllm, metrics = VLLMClient(server.url, probe=probe_of(model.pooling.task)), PDMetrics("tiny")
    health = EngineHealth(vllm, config.stall_timeout)
    connection = EngineConnection(vllm, health, await health.first_answer())
    tickets = await proven_tickets(config, connection, config.internal_token)
    worker = VLLMWorker(config, model, connection, store, metrics, tickets=tickets, adapters=adapters)
    grpc_server = make_server(interceptors=[ErrorReplies()])
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    pd_pb2_grpc.add_PDServiceServicer_to_server(worker.servicer, grpc_server)
    worker.start()
    await grpc_server.start()
    try:
        async with connected_channel(f"127.0.0.1:{port}") as channel:
            client = PDClient(channel, model.identity.model_key)
            await client.attach()
            yield Served(worker, health, client, metrics)
            await client.detach()
    finally:
        worker.streams.shut_down()
        await grpc_server.stop(1.0)
        await worker.stop()
        await vllm.close()
