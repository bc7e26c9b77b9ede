"""One rank as a process: calls the collectives, and checks what they give.

python rank_program.py RANK SIZE FOLDER gloo: writes what fails without the other ranks into
FOLDER/errors-RANK.json. With nccl it only calls the collectives, on its own CUDA device.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

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
    (folder / f"errors-{rank}.json").write_text(json.dumps(broken(parallel)))
    os._exit(0)  # Threads of a group that lost a rank may abort an interpreter that ends.


def check_collectives(parallel: TensorParallel, device: torch.device) -> None:
    """Sums, least values and gathered columns of all ranks, with values that each of them knows."""
    rank, size = parallel.rank, parallel.size
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        total = parallel.all_reduce(torch.full((3, 5), rank + 1.0, dtype=dtype, device=device))
        assert total.dtype == dtype
        assert total.tolist() == [[size * (size + 1) / 2] * 5] * 3
    minimum = parallel.all_reduce_min(torch.tensor([3 + rank, 9 - rank], device=device))
    assert minimum.tolist() == [3, 10 - size]
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


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
