"""An encoder worker's whole path, from a file's first frame to ItemReady, with a tower that costs nothing."""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.base import hashing
from triptych.base.config import MIB, EncoderConfig
from triptych.base.metrics import EncoderMetrics
from triptych.base.rpc.channels import MEDIA_FRAME_BYTES, make_channel, make_server
from triptych.encoder_worker.media import jpeg
from triptych.encoder_worker.service import EncoderWorker, WorkerIdentity
from triptych.kernels.functions import PictureKernel
from triptych.models.base import EncoderSide, Media, PreparedItem
from triptych.models.images import PatchRecipe
from triptych.protos import encoder_pb2, encoder_pb2_grpc
from triptych.store.embedding_store import EmbeddingStore

#: Who prepares the picture: transformers' processor, ours without what is compiled, and ours.
WAYS = ("transformers", "Pillow and numpy", "kernel and simplejpeg")
#: Qwen3-VL's: patches of 16, four to a row, rows of 4,096 with three DeepStack levels.
SETTINGS: dict[str, Any] = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SIZE = {"shortest_edge": 65536, "longest_edge": 16777216}
WIDTH, DTYPE = 16384, torch.bfloat16
_NAMESPACE = "ab" * 32
_AT_ONCE = 4
_PATIENCE = 60.0


class ResidentTower(EncoderSide):
    """Makes the tower's input and answers with rows of the right shape that it holds."""

    def __init__(self, way: str) -> None:
        self.width, self.dtype, self.device = WIDTH, DTYPE, torch.device("cpu")
        self.module = torch.nn.Identity()
        self._processor = Qwen2VLImageProcessorPil(size=SIZE, **SETTINGS)
        self._recipe = None if way == WAYS[0] else PatchRecipe.of(self._processor)
        self._rows = torch.randn(4096, WIDTH).to(DTYPE)

    @classmethod
    def load(cls, path: Path, **options: Any) -> EncoderSide:
        raise NotImplementedError

    def preprocess(self, media: Media, options: object) -> PreparedItem:
        if self._recipe is None:
            inputs = self._processor(images=[media], return_tensors="pt")
            pixels, grid = inputs["pixel_values"], inputs["image_grid_thw"][0].tolist()
        else:
            pixels, grid = self._recipe.levels(media)
        rows = math.prod(grid) // 4
        return PreparedItem(rows, rows, tuple(grid), 4 * rows, {"pixels": pixels})

    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        pixels = torch.cat([item.tensors["pixels"] for item in items])
        if self._recipe is None:
            pixels.to(DTYPE)
        else:
            self._recipe.values(pixels, self.device, DTYPE)
        return [self._rows[: item.rows] for item in items]


def _serve(way: str, url: str, pipe: Connection) -> None:
    """The worker's process; it ends with its parent's word."""
    if way != WAYS[2]:
        PictureKernel.load = classmethod(lambda cls: None)  # type: ignore[method-assign,assignment]
        jpeg._codec = lambda: None  # type: ignore[assignment]
    torch.set_num_threads(1)
    asyncio.run(_serving(way, url, pipe))


async def _serving(way: str, url: str, pipe: Connection) -> None:
    server = make_server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    store = await EmbeddingStore.connect(url)
    identity = WorkerIdentity(_NAMESPACE, "cd" * 32, "resident", address, uuid.uuid4().hex)
    config = EncoderConfig(store=url, threads=1)
    worker = EncoderWorker(config, identity, ResidentTower(way), store, metrics=EncoderMetrics("resident"))
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(worker.servicer, server)
    worker.start()
    await server.start()
    pipe.send(address)
    await asyncio.to_thread(pipe.recv)
    await server.stop(None)
    await worker.stop()
    await store.close()


@contextmanager
def worker_process(way: str, url: str) -> Iterator[tuple[int, str]]:
    """(process id, address) of a worker of one way."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(way, url, theirs), daemon=True
    )
    process.start()
    try:
        if not ours.poll(_PATIENCE):
            raise TimeoutError(f"the worker of {way} did not start")
        assert process.pid is not None
        yield process.pid, ours.recv()
        ours.send("end")
        process.join(_PATIENCE)
    finally:
        process.kill()


async def _encode(stub: encoder_pb2_grpc.EncoderServiceStub, media: bytes) -> None:
    """One item, as the proxy sends it; returns at ItemReady."""
    key = hashing.mm_hash(media, namespace=_NAMESPACE, modality="image")
    call = stub.Encode(timeout=_PATIENCE)
    job = encoder_pb2.EncodeJob(
        job_id="job",
        mm_hash=key,
        namespace=_NAMESPACE,
        modality="image",
        media_bytes=len(media),
        timeout=30.0,
    )
    await call.write(encoder_pb2.EncodeRequest(job=job))
    for start in range(0, len(media), MEDIA_FRAME_BYTES):
        frame = media[start : start + MEDIA_FRAME_BYTES]
        await call.write(encoder_pb2.EncodeRequest(media=frame))
    await call.write(encoder_pb2.EncodeRequest(run=encoder_pb2.RunJob()))
    while (body := (event := await call.read()).WhichOneof("body")) != "ready":
        if body not in ("planned", "waits"):
            raise RuntimeError(f"no embedding: {event}")


async def _round(address: str, files: Sequence[bytes]) -> None:
    channel, places = make_channel(address), asyncio.Semaphore(_AT_ONCE)
    stub = encoder_pb2_grpc.EncoderServiceStub(channel)

    async def one(file: bytes) -> None:
        async with places:
            await _encode(stub, file)

    await asyncio.gather(*map(one, files))
    await channel.close()


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def whole_path(file: bytes, repeats: int, pictures: int) -> dict[str, tuple[float, float]]:
    """(pictures per second, CPU ms of the worker per picture) of each way, medians of rounds in turn.

    A file's bytes end in a number, so that no picture is one that the worker or the store knows.
    """
    numbers = itertools.count()
    seen: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with (
        tempfile.TemporaryDirectory(prefix="triptych-") as folder,
        EmbeddedStore(Path(folder), 512 * MIB) as store,
        ExitStack() as stack,
    ):
        workers = {way: stack.enter_context(worker_process(way, store.url)) for way in WAYS}
        for turn in range(repeats + 1):
            for way, (pid, address) in workers.items():
                files = [file + next(numbers).to_bytes(8) for _ in range(pictures)]
                cpu, began = _cpu_seconds(pid), time.monotonic()
                asyncio.run(_round(address, files))
                rate = pictures / (time.monotonic() - began)
                time.sleep(0.5)  # the saves beside the answers are the worker's, too
                if turn:
                    seen[way].append((rate, (_cpu_seconds(pid) - cpu) * 1e3 / pictures))
    return {
        way: (statistics.median(r for r, _ in each), statistics.median(c for _, c in each))
        for way, each in seen.items()
    }
