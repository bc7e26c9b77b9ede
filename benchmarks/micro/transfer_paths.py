"""One embedding from the tower's output to a checked tensor in a PD worker's process, by each path."""

from __future__ import annotations

import hashlib
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

import msgpack
import torch

from triptych.base.config import MIB
from triptych.base.types import EmbeddingSource, ItemPlan
from triptych.ec_connector.base import DirectTransfer, ECConnectorOutput, ECTransferConfig, EncoderOutput
from triptych.ec_connector.connectors.redis import RedisConnectorWorker
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata

#: Rows of 16384 in bf16: a 1080p picture and one of 448 pixels.
SIZES = {"66.8 MB": 2040, "6.4 MB": 196}
PATHS = ("store", "peer", "shm")
_WIDTH = 16384
_PATIENCE = 60.0


def plan_of(name: str, rows: int) -> ItemPlan:
    mm_hash = hashlib.sha256(name.encode()).hexdigest()
    return ItemPlan(mm_hash, "benchmark", "image", rows, _WIDTH, "bfloat16", rows)


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
    """The PD worker's process: loads what comes, answers (moment, path)."""
    config = ECTransferConfig(store_url=url, ec_role="consumer", direct=DirectTransfer())
    engine = Engine(config)
    worker = engine.worker
    generation = 0
    while (order := msgpack.unpackb(pipe.recv_bytes())) is not None:
        generation += 1
        fetch = Fetch(ItemPlan(*order[0]), generation, order[1] and EmbeddingSource(*order[1]))
        worker.start_load_caches(TransferMetadata(1, fetches=(fetch,)), {})
        out = engine.until(lambda out: out.fetched or out.failed)
        pipe.send_bytes(msgpack.packb((time.monotonic(), out.paths.get(fetch.plan.mm_hash, ""))))
        worker.start_load_caches(TransferMetadata(2, drops=(LoadId(fetch.plan.mm_hash, generation),)), {})
    worker.shutdown()


def milliseconds(url: str, repeats: int) -> dict[tuple[str, str], list[float]]:
    """Of every repeat by (size, path); one of each per round. The save goes on beside the direct paths."""
    ours, theirs = multiprocessing.Pipe()
    reader = multiprocessing.get_context("spawn").Process(target=_read, args=(url, theirs), daemon=True)
    reader.start()
    config = ECTransferConfig(store_url=url, ec_role="producer")
    by_store = Engine(config)
    direct = Engine(replace(config, direct=DirectTransfer(memory=256 * MIB, host="127.0.0.1")))
    spent: dict[tuple[str, str], list[float]] = {(size, path): [] for size in SIZES for path in PATHS}
    try:
        for turn in range(repeats + 1):
            for (size, path), values in spent.items():
                plan = plan_of(f"{turn} {size} {path}", SIZES[size])
                output = EncoderOutput(plan, torch.randn(plan.rows, plan.width).to(torch.bfloat16))
                engine = by_store if path == "store" else direct
                began = time.monotonic()
                engine.worker.save_caches({plan.mm_hash: output}, plan.mm_hash)
                values.append((_transferred(engine, plan, path, ours) - began) * 1e3)
            if turn == 0:  # connections are made, and memory is touched
                for values in spent.values():
                    values.clear()
    finally:
        ours.send_bytes(msgpack.packb(None))
        reader.join(_PATIENCE)
        by_store.worker.shutdown()
        direct.worker.shutdown()
    return spent


def _transferred(engine: Engine, plan: ItemPlan, path: str, pipe: Connection) -> float:
    """When the reader had it; returns once its save has ended, too."""
    source = None
    saved = False
    if path == "store":
        engine.until(lambda out: out.saved)
    else:
        out = engine.until(lambda out: out.offered)
        offered, saved = out.offered[plan.mm_hash], bool(out.saved)
        source = (offered.name, offered.socket if path == "shm" else "", offered.address)
    pipe.send_bytes(msgpack.packb((_fields(plan), source)))
    moment, taken = msgpack.unpackb(pipe.recv_bytes())
    if taken != path:
        raise RuntimeError(f"the item came by {taken!r}, not by {path}")
    if path != "store" and not saved:
        engine.until(lambda out: out.saved)
    return float(moment)


def _fields(plan: ItemPlan) -> tuple[object, ...]:
    return plan.mm_hash, plan.namespace, plan.modality, plan.rows, plan.width, plan.dtype, plan.length


def rows(spent: dict[tuple[str, str], list[float]]) -> str:
    """The lines of a table: medians and bests of each path."""
    cells = {key: f"{statistics.median(values):.1f} ({min(values):.1f})" for key, values in spent.items()}
    return "\n".join(f"| {path} | {' | '.join(cells[size, path] for size in SIZES)} |" for path in PATHS)
