"""Our encoder worker as a process beside vLLM, and a client that has it encode pictures."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpc.aio import AioRpcError
from PIL import Image

from support.engine.encoder_bench import Job, png
from support.processes.cluster import wait_for
from support.waiting import within
from triptych.base.hashing import mm_hash
from triptych.base.parent import supervised
from triptych.base.rpc.channels import make_channel
from triptych.protos import encoder_pb2_grpc
from triptych.registry.registry import Registry
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore


@dataclass
class EncoderProcess:
    """`triptych encoder MODEL --store URL`."""

    model: Path
    store_url: str
    log: Path
    dtype: str = "float32"

    def start(self) -> None:
        """Starts it and waits until it is registered."""
        words = (
            "encoder",
            str(self.model),
            "--store",
            self.store_url,
            "--threads",
            "1",
            "--dtype",
            self.dtype,
        )
        command, environment = supervised([sys.executable, "-m", "triptych.apps.cli", *words])
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )
        wait_for("the encoder worker to register", self._registered)

    def _registered(self) -> bool:
        if self._process.poll() is not None:
            raise AssertionError(self.log.read_text()[-4000:])
        workers = asyncio.run(self._workers())
        if workers:
            self._address, self.namespace = workers[0].address, workers[0].namespaces[0]
        return bool(workers)

    async def _workers(self) -> list[Any]:
        try:
            store = await EmbeddingStore.connect(self.store_url)
        except StoreUnavailable:
            return []
        try:
            return list(await Registry(store).workers())
        finally:
            await store.close()

    def encode(self, *pictures: Image.Image) -> None:
        """Has the pictures encoded and saved; what fails and may be tried again is, as by a proxy."""
        asyncio.run(within("the pictures to be encoded", self._encode(pictures)))

    async def _encode(self, pictures: tuple[Image.Image, ...]) -> None:
        async with make_channel(self._address) as channel:
            bench = SimpleNamespace(stub=encoder_pb2_grpc.EncoderServiceStub(channel))
            for picture in pictures:
                while not await _ready(Job(bench, png(picture), namespace=self.namespace)):
                    # A worker does not know at once that a store which was away is there again.
                    await asyncio.sleep(0.1)

    def key(self, picture: Image.Image) -> str:
        """The picture's mm_hash."""
        return mm_hash(png(picture), namespace=self.namespace, modality="image")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)


async def _ready(job: Job) -> bool:
    """Whether the job has ended with an embedding, and not with an error after which it is tried again."""
    try:
        await job.start()
        await job.send_media()
        end = await job.event()
        if end.WhichOneof("body") == "planned":
            end = await job.finished()
    except AioRpcError as error:
        # The worker ended the job while its picture was on the way: grpc then has no event to give.
        assert error.details() == "Internal error from Core", error
        return False
    if end.WhichOneof("body") == "ready":
        return True
    assert end.failed.retryable, end
    return False
