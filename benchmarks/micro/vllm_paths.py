"""Embeddings from the tower's output to rows in vLLM, by its connector's loader: time by path, as ratios."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from benchmarks.micro.transfer_paths import Workers, plan_of
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.base.source_tickets import SourceTickets
from triptych.base.types import EmbeddingSource
from triptych.integrations.vllm.copy_loader import CopyLoader
from triptych.integrations.vllm.host_copies import CopyFolder, HostCopies
from triptych.integrations.vllm.options import ConnectorOptions
from triptych.integrations.vllm.rows import read_rows, source_of

#: Rows and their width in bf16.
SIZES = {"66.8 MB": (2040, 16384), "1 MB": (64, 8192)}
PATHS = ("store", "peer", "shm")
_TOKEN = "t" * 32
#: As the engine's steps, which take up reports.
_STEP_SECONDS = 0.001


def read_as_vllm(url: str, pipe: Connection) -> None:
    """The engine's process: loads what comes, answers (moment, path, CPU seconds so far)."""
    options = ConnectorOptions(url, ("benchmark",), token=_TOKEN)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        loaders = {
            width: CopyLoader(options, HostCopies(1 << 30, CopyFolder(folder)), width)
            for _, width in SIZES.values()
        }
        number = 0
        while (order := msgspec.msgpack.decode(pipe.recv_bytes())) is not None:
            number += 1
            plan, loader = plan_of(*order[0]), loaders[order[0][2]]
            if order[1]:
                call = f"{number:032}"
                entry = SourceTickets(_TOKEN).entry(plan, EmbeddingSource(*order[1]), call)
                loader.note(call, {plan.mm_hash: entry})
            loader.start(plan.mm_hash)
            while not (reports := loader.reports()):
                time.sleep(_STEP_SECONDS)
            copy = reports[0].copy
            if copy is None:
                raise RuntimeError(reports[0].reason)
            read_rows(source_of(copy), torch.device("cpu"), torch.bfloat16)
            moment = time.monotonic()
            path = ("shm" if order[1][1] else "peer") if order[1] else "store"
            pipe.send_bytes(msgspec.msgpack.encode((moment, path, time.process_time())))
            loader.drop(copy)
        for loader in loaders.values():
            loader.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, EmbeddedStore(Path(folder), 1 << 30) as server:
        workers = Workers(server.url, read_as_vllm)
        for turn in range(options.rounds + 1):
            times: dict[tuple[str, str], list[float]] = {(s, p): [] for s in SIZES for p in PATHS}
            for number in range(options.repeats if turn else 2):
                for (size, path), taken in times.items():
                    taken.append(workers.transfer(f"{turn} {number} {size} {path}", SIZES[size], path)[0])
            for size in SIZES if turn else ():
                middle = {path: statistics.median(times[size, path]) for path in PATHS}
                shares = ", ".join(
                    f"{path} {ms:.1f} ms ({ms / middle['store']:.2f})" for path, ms in middle.items()
                )
                print(f"round {turn}, {size}: {shares}")
        workers.close()


if __name__ == "__main__":
    main()
