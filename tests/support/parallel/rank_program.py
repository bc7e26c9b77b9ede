"""One rank: computes the batches of a job file with its share of the models.

python rank_program.py RANK SIZE FOLDER gloo: reads FOLDER/jobs.json, writes FOLDER/NUMBER-RANK.safetensors,
and FOLDER/errors-RANK.json at the end. With nccl it only calls the collectives, on its own CUDA device.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from support.parallel.batches import RankBatch, compute, open_decoder
from triptych.models.parallel import plan
from triptych.models.parallel.layers import RowParallelLinear
from triptych.models.parallel.tensor_parallel import CollectiveError, TensorParallel

#: Seconds that a collective of the jobs may take, and the start and the end of one that nobody else comes to.
TIMEOUT, SHORT = 200, 4


def main(rank: int, size: int, folder: Path, backend: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    parallel = TensorParallel(rank, size)
    check_collectives(parallel, device)
    if device.type == "cuda":
        dist.destroy_process_group()
        return
    for number, job in enumerate(json.loads((folder / "jobs.json").read_text())):
        with fault(job["fault"]):
            decoder = open_decoder(Path(job["path"]), job["dtype"], job["quantization"], parallel)
            found = compute(decoder, RankBatch.load(folder / job["batch"]))
        held = sum(parameter.numel() * parameter.element_size() for parameter in decoder.module.parameters())
        found["held"] = torch.tensor(held)
        save_file(
            {name: tensor.contiguous() for name, tensor in found.items()},
            folder / f"{number}-{rank}.safetensors",
        )
    (folder / f"errors-{rank}.json").write_text(json.dumps(broken(parallel)))


def check_collectives(parallel: TensorParallel, device: torch.device) -> None:
    """Sums, least values and gathered columns of all ranks, with values that each of them knows."""
    rank, size = parallel.rank, parallel.size
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        total = parallel.all_reduce(torch.full((3, 5), rank + 1.0, dtype=dtype, device=device))
        assert total.dtype == dtype
        assert total.tolist() == [[size * (size + 1) / 2] * 5] * 3
    least = parallel.all_reduce_min(torch.tensor([3 + rank, 9 - rank], device=device))
    assert least.tolist() == [3, 10 - size]
    counts = [16 * (number + 1) for number in range(size)]
    columns = torch.full((2, counts[rank]), float(rank), device=device)
    whole = parallel.gather(columns, counts)
    if rank:
        assert whole is None
    else:
        assert whole is not None
        assert (
            whole.tolist() == [[float(number) for number in range(size) for _ in range(counts[number])]] * 2
        )


def broken(parallel: TensorParallel) -> dict[str, str]:
    """The errors of rank 0 where the others do not come to a collective, and where they have ended."""
    dist.barrier()
    group = dist.new_group(timeout=datetime.timedelta(seconds=SHORT))
    alone = TensorParallel(parallel.rank, parallel.size, group)
    late = "" if parallel.rank else error_of(alone)
    dist.barrier()
    if parallel.rank:
        sys.stdout.flush()
        os._exit(0)
    return {"late": late, "dead": error_of(parallel)}


def error_of(parallel: TensorParallel) -> str:
    try:
        parallel.all_reduce(torch.zeros(4))
    except CollectiveError as error:
        return str(error)
    return ""


@contextmanager
def fault(name: str | None) -> Iterator[None]:
    """A fault in the product that a comparison of ranks with one rank must find."""
    whole_bias = RowParallelLinear.forward

    def unsummed(layer: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = layer.linear(x)
        return out if layer.bias is None else out + layer.bias

    def bias_of_every_rank(layer: Any, x: torch.Tensor) -> torch.Tensor:
        out = whole_bias(layer, x)
        return out if layer.bias is None else out + layer.bias * (dist.get_world_size() - 1)

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


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
