"""One side of a comparison of transfer paths: the program `transfer_side.py STORE_URL`.

For each line that it reads it transfers one embedding of each size by each path, from the tower's output to a
checked tensor in a PD worker's process, and prints what that took, by the code on its PYTHONPATH.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

import msgpack
import redis
import torch

from triptych.base.config import MIB
from triptych.base.types import EmbeddingSource, ItemPlan
from triptych.ec_connector.base import DirectTransfer, ECConnectorOutput, ECTransferConfig, EncoderOutput
from triptych.ec_connector.connectors.redis import RedisConnectorWorker
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata

#: Rows and their width in bf16: a 1080p picture and one of 448 pixels of Qwen3-VL 8B, one of a small model.
SIZES = {"1080p, 66.8 MB": (2040, 16384), "448 px, 6.4 MB": (196, 16384), "448 px, 0.4 MB": (196, 1024)}
PATHS = ("store", "peer", "shm")
_PATIENCE = 60.0


def plan_of(name: str, rows: int, width: int) -> ItemPlan:
    mm_hash = hashlib.sha256(name.encode()).hexdigest()
    return ItemPlan(mm_hash, "benchmark", "image", rows, width, "bfloat16", rows)


class Engine:
    """A worker role and the wait for its reports, as an engine waits: a busy one would take the interpreter
    from the connector's own thread for up to 5 ms at a time."""

    def __init__(self, config: ECTransferConfig) -> None:
        self._progress = threading.Event()
        self.worker = RedisConnectorWorker(config, self._progress.set)

    def until(self, done: Callable[[ECConnectorOutput], object]) -> ECConnectorOutput:
        """The first report that is `done`."""
        while self._progress.wait(_PATIENCE):
            self._progress.clear()
            if done(out := self.worker.get_finished()):
                return out
        raise TimeoutError("the transfer did not end")


def _read(url: str, pipe: Connection) -> None:
    """The PD worker's process: loads what comes, answers (moment, path, CPU seconds so far)."""
    engine = Engine(ECTransferConfig(store_url=url, ec_role="consumer", direct=DirectTransfer()))
    generation = 0
    while (order := msgpack.unpackb(pipe.recv_bytes())) is not None:
        generation += 1
        fetch = Fetch(ItemPlan(*order[0]), generation, order[1] and EmbeddingSource(*order[1]))
        engine.worker.start_load_caches(TransferMetadata(1, fetches=(fetch,)), {})
        out = engine.until(lambda out: out.fetched or out.failed)
        moment, path = time.monotonic(), out.paths.get(fetch.plan.mm_hash, "")
        pipe.send_bytes(msgpack.packb((moment, path, time.process_time())))
        drops = (LoadId(fetch.plan.mm_hash, generation),)
        engine.worker.start_load_caches(TransferMetadata(2, drops=drops), {})
    engine.worker.shutdown()


class Side:
    """An encoder worker's connectors, by the store alone and by all paths, and a PD worker's process."""

    def __init__(self, url: str) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._reader = context.Process(target=_read, args=(url, theirs), daemon=True)
        self._reader.start()
        self._store = redis.Redis.from_url(url)
        config = ECTransferConfig(store_url=url, ec_role="producer")
        direct = DirectTransfer(memory=256 * MIB, host="127.0.0.1")
        self._engines = [Engine(config), Engine(replace(config, direct=direct))]
        self._reader_cpu = 0.0

    def transfer(self, plan: ItemPlan, path: str) -> tuple[float, float]:
        """Milliseconds until the reader has the embedding, and of CPU of all processes until it is stored."""
        output = EncoderOutput(plan, torch.randn(plan.rows, plan.width).to(torch.bfloat16))
        engine = self._engines[path != "store"]
        cpu, began = self._cpu(), time.monotonic()
        # As in the encoder's engine: the pass that serves it checks it, where there is one.
        serve = getattr(engine.worker, "serve", lambda _: None)
        if serve(output) is None and not output.data.aminmax().max.isfinite():
            raise RuntimeError("the output is not finite")
        engine.worker.save_caches({plan.mm_hash: output}, plan.mm_hash)
        out = engine.until(lambda out: out.saved if path == "store" else out.offered)
        source = None
        if path != "store":
            offered = out.offered[plan.mm_hash]
            source = (offered.name, offered.socket if path == "shm" else "", offered.address)
        self._pipe.send_bytes(msgpack.packb((_fields(plan), source)))
        moment, taken, self._reader_cpu = msgpack.unpackb(self._pipe.recv_bytes())
        if taken != path:
            raise RuntimeError(f"the item came by {taken!r}, not by {path}")
        if not out.saved:
            engine.until(lambda out: out.saved)
        return (moment - began) * 1e3, (self._cpu() - cpu) * 1e3

    def _cpu(self) -> float:
        store = self._store.info("cpu")
        return time.process_time() + self._reader_cpu + float(store["used_cpu_user"] + store["used_cpu_sys"])

    def close(self) -> None:
        """Ends the processes and connections."""
        self._pipe.send_bytes(msgpack.packb(None))
        self._reader.join(_PATIENCE)
        for engine in self._engines:
            engine.worker.shutdown()
        self._store.close()


def _fields(plan: ItemPlan) -> tuple[object, ...]:
    return plan.mm_hash, plan.namespace, plan.modality, plan.rows, plan.width, plan.dtype, plan.length


def _serve(url: str) -> None:
    side = Side(url)
    try:
        for line in sys.stdin:
            turn = [
                side.transfer(plan_of(f"{os.getpid()} {line} {size} {path}", *shape), path)
                for size, shape in SIZES.items()
                for path in PATHS
            ]
            sys.stdout.write(json.dumps(turn) + "\n")
            sys.stdout.flush()
    finally:
        side.close()


if __name__ == "__main__":
    _serve(sys.argv[1])
