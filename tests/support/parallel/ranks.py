"""Tensor-parallel ranks: as threads that compute a model together, and as processes of `rank_program.py`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from support.parallel.batches import RankBatch, compute, open_decoder
from triptych.models.base import DecoderSide
from triptych.models.parallel import plan
from triptych.models.parallel.sharding import RowParallelLinear
from triptych.models.parallel.tensor_parallel import TensorParallel

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("rank_program.py")
_SECONDS = 120.0


@dataclass(frozen=True)
class Job:
    """A checkpoint, how it is loaded, and the batch that it computes; `fault` is one that is put in."""

    path: Path
    batch: RankBatch
    dtype: str = "float32"
    quantization: str = "none"
    fault: str | None = None


class Meeting:
    """Where the threads of all ranks exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_SECONDS)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, part: torch.Tensor) -> list[torch.Tensor]:
        """The parts of all ranks, by rank."""
        self._parts[rank] = part
        self.barrier.wait()
        parts = list(self._parts)
        self.barrier.wait()
        return parts


@dataclass(frozen=True, slots=True)
class ThreadRank(TensorParallel):
    """A rank that is a thread; its collectives are those of `TensorParallel` without a process group."""

    meeting: Meeting | None = None

    def _all(self, part: torch.Tensor) -> list[torch.Tensor]:
        assert self.meeting is not None
        return self.meeting.exchange(self.rank, part)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(partial.float())).sum(0).to(partial.dtype)

    def all_reduce_min(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(values)).amin(0)

    def gather(self, columns: torch.Tensor, counts: list[int]) -> torch.Tensor | None:
        parts = self._all(columns)
        return None if self.rank else torch.cat(parts, -1)


def run_ranks(size: int, job: Job) -> list[dict[str, torch.Tensor]]:
    """What each of `size` ranks computes."""
    meeting = Meeting(size)

    def rank_computes(decoder: DecoderSide) -> dict[str, torch.Tensor]:
        try:
            return compute(decoder, job.batch)
        except BaseException:
            meeting.barrier.abort()
            raise

    with fault(job.fault, size), ThreadPoolExecutor(size) as pool:
        ranks = [ThreadRank(rank, size, None, meeting) for rank in range(size)]
        # One after the other: transformers sets the process's default dtype while it loads a model.
        decoders = [open_decoder(job.path, job.dtype, job.quantization, rank) for rank in ranks]
        return list(pool.map(rank_computes, decoders))


@contextmanager
def fault(name: str | None, size: int) -> Iterator[None]:
    """A fault in the product that a comparison of ranks with one rank must find."""
    whole_bias = RowParallelLinear.forward

    def unsummed(layer: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = layer.linear(x)
        return out if layer.bias is None else out + layer.bias

    def bias_of_every_rank(layer: Any, x: torch.Tensor) -> torch.Tensor:
        out = whole_bias(layer, x)
        return out if layer.bias is None else out + layer.bias * (size - 1)

    def first_heads(plan: Any, rank: int, size: int) -> tuple[int, int]:
        return 0, plan.kv_heads // size

    patches = {
        "no all-reduce": (RowParallelLinear, "forward", unsummed),
        "bias of every rank": (RowParallelLinear, "forward", bias_of_every_rank),
        "KV heads of rank 0": (plan, "kv_heads", first_heads),
    }
    if name is None:
        yield
        return
    owner, attribute, replacement = patches[name]
    with mock.patch.object(owner, attribute, replacement):
        yield


def start_ranks(size: int, folder: Path, backend: str, timeout: float) -> None:
    """Runs the program of `size` ranks to its end; AssertionError with their logs where one fails."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    logs = [folder / f"log-{rank}" for rank in range(size)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, str(PROGRAM), str(rank), str(size), str(folder), backend]
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
                )
        codes = [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * size, "\n".join(log.read_text()[-2000:] for log in logs)
