"""A real PD worker in this process behind a real gRPC server, and items as encoder workers save them."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import torch
from PIL import Image

from support.channels import connected_channel
from support.data.checkpoints import build_checkpoint
from support.fakes.fake_workers import MODEL, FakeWorker
from support.fakes.pd_client import PDClient
from triptych.base.config import PDConfig
from triptych.base.hashing import framed_digest
from triptych.base.metrics import PDMetrics
from triptych.base.rpc.channels import make_server
from triptych.base.rpc.internal_token import InternalToken
from triptych.base.types import ItemPlan, WorkerInfo
from triptych.models.registry import load_encoder
from triptych.pd_worker.native import LoadedModel, NativeWorker, load_model
from triptych.protos import pd_pb2, pd_pb2_grpc
from triptych.protos.convert import plan_to_proto
from triptych.protos.error_replies import ErrorReplies


def tiny_model(family: str, **flags: Any) -> LoadedModel:
    return model_at(str(build_checkpoint(family)), **flags)


def model_at(folder: str, **flags: Any) -> LoadedModel:
    return load_model(_config(folder, **flags))


@asynccontextmanager
async def serving(
    model: LoadedModel, store_url: str, **flags: Any
) -> AsyncIterator[tuple[NativeWorker, PDClient]]:
    """The worker, and a client whose stream is open."""
    worker = NativeWorker(_config(str(model.path), store=store_url, **flags), model, PDMetrics("tiny"))
    server = make_server(interceptors=[ErrorReplies()])
    port = server.add_insecure_port("127.0.0.1:0")
    pd_pb2_grpc.add_PDServiceServicer_to_server(worker.servicer, server)
    worker.start()
    await server.start()
    try:
        async with connected_channel(f"127.0.0.1:{port}") as channel:
            client = PDClient(channel, model.identity.model_key)
            await client.attach()
            yield worker, client
            await client.detach()
    finally:
        worker.streams.shut_down()
        await server.stop(1.0)
        await worker.stop()


class ServedPD(FakeWorker):
    """The same among the scripted workers of a `FakeCluster`."""

    pool = "pd"

    def __init__(self, model: LoadedModel, store_url: str, role: str) -> None:
        super().__init__()
        self._model = model
        self._flags = {"store": store_url, "role": role, "served_model_name": MODEL}
        self.worker: NativeWorker | None = None

    def add_to(self, server: Any) -> None:
        model = replace(self._model, name=MODEL)
        config = _config(str(model.path), **self._flags)
        self.worker = NativeWorker(config, model, PDMetrics(MODEL), incarnation=f"i{self.incarnation}")
        pd_pb2_grpc.add_PDServiceServicer_to_server(self.worker.servicer, server)
        self.worker.start()

    @property
    def info(self) -> WorkerInfo:
        assert self.worker is not None, "it has been killed"
        return InternalToken(self.token).signed(self.worker.info(self.address, 0))

    @property
    def attaches(self) -> list[str]:
        """The proxies that have a stream."""
        return [] if self.worker is None else list(self.worker.streams._proxies)

    async def kill(self) -> None:
        """Connections end at once, and its requests with them."""
        await super().kill()
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.streams.shut_down()
            await worker.stop()


def _config(model: str, **flags: Any) -> PDConfig:
    return PDConfig(**{"model": model, "kv_memory": 32 << 20, "max_model_len": 512, "threads": 1, **flags})


@functools.cache
def served_model(family: str) -> LoadedModel:
    """The model with the default flags, loaded once."""
    return tiny_model(family)


def stored_items(
    family: str, pictures: Sequence[Image.Image], model: LoadedModel | None = None
) -> list[tuple[ItemPlan, bytes]]:
    """Plan and body of every picture, as an encoder worker saves them for the model."""
    encoder = load_encoder(build_checkpoint(family), device=torch.device("cpu"), dtype=torch.float32)
    namespace = (model or served_model(family)).identity.namespace
    items = [encoder.preprocess(image, {}) for image in pictures]
    made = []
    for number, (item, rows) in enumerate(zip(items, encoder.encode(items), strict=True)):
        key = framed_digest((("family", family.encode()), ("number", bytes([number]))))
        plan = ItemPlan(
            *(key, namespace, "image", item.rows, encoder.width, "float32", item.length),
            *(item.runs, item.grid_thw),
        )
        made.append((plan, rows.detach().numpy().tobytes()))
    return made


def slot(plan: ItemPlan, state: pd_pb2.ItemState = pd_pb2.ITEM_STATE_READY) -> pd_pb2.ItemSlot:
    return pd_pb2.ItemSlot(plan=plan_to_proto(plan), state=state)
