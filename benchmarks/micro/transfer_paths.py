"""One embedding from the tower's output to a checked tensor in a PD worker's process, by each path.

As a program, `transfer_paths.py STORE_URL`, it is one side of a comparison: for each line that it reads it
transfers one embedding of each size by each path and prints what that took, by the code on its PYTHONPATH.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import msgpack
import redis
import torch

from triptych.base.config import MIB
from triptych.base.types import EmbeddingSource, ItemPlan
from triptych.ec_connector.base import DirectTransfer, ECConnectorOutput, ECTransferConfig, EncoderOutput
from triptych.ec_connector.connectors.redis import RedisConnectorWorker
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata

#: Rows of 16384 in bf16: a 1080p picture and one of 448 pixels.
SIZES = {"1080p, 66.8 MB": 2040, "448 px, 6.4 MB": 196}
PATHS = ("store", "peer", "shm")
ROOT = Path(__file__).resolve().parents[2]
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
                side.transfer(plan_of(f"{os.getpid()} {line} {size} {path}", rows), path)
                for size, rows in SIZES.items()
                for path in PATHS
            ]
            sys.stdout.write(json.dumps(turn) + "\n")
            sys.stdout.flush()
    finally:
        side.close()


@dataclass(frozen=True, slots=True)
class Transfer:
    """All turns of one size by one path: milliseconds, and those of CPU."""

    milliseconds: list[float]
    cpu: list[float]


#: The transfers of one checkout, by (size, path).
Transfers = dict[tuple[str, str], Transfer]


@contextmanager
def _side(url: str, checkout: Path) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, str(Path(__file__).resolve()), url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(_PATIENCE)


def _turn(process: subprocess.Popen[str], number: int) -> list[tuple[float, float]]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{number}\n")
    process.stdin.flush()
    if not (line := process.stdout.readline()):
        raise RuntimeError("a side of the comparison has ended")
    return [tuple(pair) for pair in json.loads(line)]


def measure(url: str, repeats: int, before: Path | None) -> list[Transfers]:
    """The transfers of this checkout, and of the one `before`, by turns; the save goes on beside them."""
    checkouts = [ROOT] if before is None else [ROOT, before]
    keys = [(size, path) for size in SIZES for path in PATHS]
    measured: list[Transfers] = [{key: Transfer([], []) for key in keys} for _ in checkouts]
    with ExitStack() as stack:
        sides = [stack.enter_context(_side(url, checkout)) for checkout in checkouts]
        for number in range(repeats + 1):
            for transfers, process in zip(measured, sides, strict=True):
                turn = _turn(process, number)
                if not number:  # connections are made, and memory is touched
                    continue
                for key, (milliseconds, cpu) in zip(keys, turn, strict=True):
                    transfers[key].milliseconds.append(milliseconds)
                    transfers[key].cpu.append(cpu)
    return measured


def _ratio(before: Sequence[float], now: Sequence[float]) -> str:
    """The median over the turns: neighbours on the machine meet both sides of a turn."""
    return f"{statistics.median(b / n for b, n in zip(before, now, strict=True)):.2f}"


def rows(measured: Sequence[Transfers]) -> str:
    """The lines of a table: median and best time, CPU time, and the ratios before / now of both."""
    now, before = measured[0], measured[-1] if len(measured) > 1 else None
    lines = []
    for (size, path), transfer in now.items():
        times = transfer.milliseconds
        ratios = ["", ""]
        if before is not None:
            other = before[size, path]
            ratios = [_ratio(other.milliseconds, times), _ratio(other.cpu, transfer.cpu)]
        cpu = statistics.median(transfer.cpu)
        cells = [size, path, f"{statistics.median(times):.1f} ({min(times):.1f})", f"{cpu:.1f}", *ratios]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    _serve(sys.argv[1])
