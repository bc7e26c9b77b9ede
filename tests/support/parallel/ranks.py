"""Ranks as processes: jobs that all of them compute together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from support.parallel.batches import RankBatch

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("rank_program.py")


@dataclass(frozen=True)
class Job:
    """A checkpoint, how it is loaded, and the batch that it computes; `fault` is one that is put in."""

    path: Path
    batch: RankBatch
    dtype: str = "float32"
    quantization: str = "none"
    fault: str | None = None


@dataclass(frozen=True)
class Outputs:
    """Per job and rank the tensors of `compute`, and the bytes of its parameters as `held`."""

    jobs: list[list[dict[str, torch.Tensor]]]
    #: Of rank 0: the error of a collective to which nobody came, and of one whose other ranks had ended.
    errors: dict[str, str] = field(default_factory=dict)


def run_ranks(size: int, jobs: Sequence[Job], folder: Path, *, timeout: float = 500.0) -> Outputs:
    """What `size` gloo ranks compute; AssertionError with their logs where one fails."""
    lines = []
    for number, job in enumerate(jobs):
        job.batch.save(folder / f"batch-{number}.safetensors")
        lines.append(
            {
                "path": str(job.path),
                "dtype": job.dtype,
                "quantization": job.quantization,
                "fault": job.fault,
                "batch": f"batch-{number}.safetensors",
            }
        )
    (folder / "jobs.json").write_text(json.dumps(lines))
    start_ranks(size, folder, "gloo", timeout)
    found = [
        [load_file(folder / f"{number}-{rank}.safetensors") for rank in range(size)]
        for number in range(len(lines))
    ]
    return Outputs(found, json.loads((folder / "errors-0.json").read_text()))


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
