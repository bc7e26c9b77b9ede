"""Embeddings from the tower's output to a checked tensor in a PD worker's process: time and CPU by path."""

from __future__ import annotations

import hashlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import redis
import torch

from benchmarks.result_page import RESULTS, fill, page_parser, publish, table
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.base.config import MIB
from triptych.base.types import EmbeddingSource, ItemPlan
from triptych.ec_connector.base import DirectTransfer, ECTransferConfig, EncoderOutput
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata
from triptych_bench.simulator.profile.encoder import TransferRole

RESULT = RESULTS / "transfer_paths.md"
#: Rows and their width in bf16: a 1080p picture and one of 448 pixels of Qwen3-VL 8B, one of a small model.
SIZES = {"1080p, 66.8 MB": (2040, 16384), "448 px, 6.4 MB": (196, 16384), "448 px, 0.4 MB": (196, 1024)}
PATHS = ("store", "peer", "shm")
_PATIENCE = 60.0


def plan_of(name: str, rows: int, width: int) -> ItemPlan:
    mm_hash = hashlib.sha256(name.encode()).hexdigest()
    return ItemPlan(mm_hash, "benchmark", "image", rows, width, "bfloat16", rows)


def _read(url: str, pipe: Connection) -> None:
    """The PD worker's process: loads what comes, answers (moment, path, CPU seconds so far)."""
    role = TransferRole(ECTransferConfig(store_url=url, ec_role="consumer", direct=DirectTransfer()))
    generation = 0
    while (order := msgspec.msgpack.decode(pipe.recv_bytes())) is not None:
        generation += 1
        fetch = Fetch(plan_of(*order[0]), generation, order[1] and EmbeddingSource(*order[1]))
        role.worker.start_load_caches(TransferMetadata(1, fetches=(fetch,)), {})
        out = role.until(lambda out: out.fetched)
        moment, path = time.monotonic(), out.paths.get(fetch.plan.mm_hash, "")
        pipe.send_bytes(msgspec.msgpack.encode((moment, path, time.process_time())))
        drops = (LoadId(fetch.plan.mm_hash, generation),)
        role.worker.start_load_caches(TransferMetadata(2, drops=drops), {})
    role.worker.shutdown()


class Workers:
    """An encoder worker's connectors, by the store alone and by all paths, and a PD worker's process."""

    def __init__(
        self, url: str, read: Callable[[str, Connection], None] = _read, host: str = "127.0.0.1"
    ) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._reader = context.Process(target=read, args=(url, theirs), daemon=True)
        self._reader.start()
        self._store = redis.Redis.from_url(url)
        config = ECTransferConfig(store_url=url, ec_role="producer")
        direct = DirectTransfer(memory=256 * MIB, host=host)
        self._roles = [TransferRole(config), TransferRole(replace(config, direct=direct))]
        self._reader_cpu = 0.0

    def transfer(self, name: str, shape: tuple[int, int], path: str) -> tuple[float, float]:
        """Milliseconds until the reader has the embedding, and of CPU of all processes until it is stored."""
        plan = plan_of(name, *shape)
        output = EncoderOutput(plan, torch.randn(shape).to(torch.bfloat16))
        role = self._roles[path != "store"]
        cpu, began = self._cpu(), time.monotonic()
        # As in the encoder's engine: the pass that serves it checks it, where there is one.
        if role.worker.serve(output) is None and not output.data.aminmax().max.isfinite():
            raise RuntimeError("the output is not finite")
        role.worker.save_caches({plan.mm_hash: output}, plan.mm_hash)
        out = role.until(lambda out: out.saved if path == "store" else out.offered)
        source = None
        if path != "store":
            offered = out.offered[plan.mm_hash]
            source = (offered.name, offered.socket if path == "shm" else "", offered.address)
        self._pipe.send_bytes(msgspec.msgpack.encode(((name, *shape), source)))
        moment, taken, self._reader_cpu = msgspec.msgpack.decode(self._pipe.recv_bytes())
        if taken != path:
            raise RuntimeError(f"the item came by {taken!r}, not by {path}")
        if not out.saved:
            role.until(lambda out: out.saved)
        return (moment - began) * 1e3, (self._cpu() - cpu) * 1e3

    def _cpu(self) -> float:
        store = self._store.info("cpu")
        return time.process_time() + self._reader_cpu + float(store["used_cpu_user"] + store["used_cpu_sys"])

    def close(self) -> None:
        """Ends the processes and connections."""
        self._pipe.send_bytes(msgspec.msgpack.encode(None))
        self._reader.join(_PATIENCE)
        for role in self._roles:
            role.worker.shutdown()
        self._store.close()


#: Turns by size and path: milliseconds, and those of CPU.
Turns = dict[tuple[str, str], list[tuple[float, float]]]


def measure(url: str, repeats: int) -> Turns:
    """The transfers by size and path, which take turns; the save goes on beside them."""
    measured: Turns = {(size, path): [] for size in SIZES for path in PATHS}
    workers = Workers(url)
    try:
        for number in range(repeats + 1):
            for (size, path), turns in measured.items():
                taken = workers.transfer(f"{number} {size} {path}", SIZES[size], path)
                if number:  # connections were made, and memory was touched
                    turns.append(taken)
    finally:
        workers.close()
    return measured


def rows(measured: Turns) -> Iterator[tuple[str, str, str, str]]:
    """Of a table: size, path, milliseconds (median and best), CPU milliseconds."""
    for (size, path), turns in measured.items():
        times, cpu = zip(*turns, strict=True)
        yield (
            size,
            path,
            f"{statistics.median(times):.1f} ({min(times):.1f})",
            f"{statistics.median(cpu):.1f}",
        )


def main() -> None:
    options = page_parser(__doc__, RESULT, repeats=20).parse_args()
    with tempfile.TemporaryDirectory() as folder, EmbeddedStore(Path(folder), 1 << 30) as server:
        measured = measure(server.url, options.repeats)
    paths = table(("embedding", "path", "ms, median (best)", "CPU ms"), rows(measured), (0, 1))
    command = f"python -m benchmarks micro transfer_paths --repeats {options.repeats}"
    publish(fill("transfer_paths", command=command, paths="\n".join(paths)), RESULT, write=options.write)
