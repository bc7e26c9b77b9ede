"""Decode attention over the paged KV cache on a CPU: bytes per second, beside plain reading of the same."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.result_page import RESULTS, fill, page_parser, publish, table
from triptych.kernels import cpu_attention as kernel
from triptych.pd_worker.attention.metadata import PagedKVCache

RESULT = RESULTS / "attention_reading.md"
BLOCK = 16
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
#: What the instruction sets are called: one row each, as far as the CPU has them.
SETS = {2: "AVX-512", 3: "AVX-512 with bfloat16", 4: "AMX"}


class Step:
    """Attention of one decode of each sequence in all layers, and reading what it reads."""

    def __init__(self, dtype: torch.dtype, args: dict[str, int]) -> None:
        heads, dim, batch = args["heads"], args["dim"], args["batch"]
        each = -(-args["context"] // BLOCK)
        self._cache = PagedKVCache(
            num_layers=args["layers"], num_blocks=batch * each, block_size=BLOCK, num_kv_heads=heads,
            head_dim=dim, dtype=dtype, device=torch.device("cpu"),
        )  # fmt: skip
        for pool in self._cache.pools:
            pool.fill_(0.5)
        order = torch.randperm(batch * each, generator=torch.Generator().manual_seed(0))
        tables = list(order.view(batch, each))
        self._sequences = kernel.Sequences.of(range(batch + 1), tables)
        self._bounds = np.array([(0, args["context"])] * batch, np.int32)
        self._query = torch.randn(batch, heads * args["groups"], dim).to(dtype).transpose(0, 1)
        self._out = torch.empty(batch, heads * args["groups"], dim, dtype=dtype)
        self.nbytes = sum(pool.nbytes for pool in self._cache.pools)
        storage = self._cache.pools[0].untyped_storage()
        self._plain = torch.empty(0, dtype=torch.float32).set_(storage)

    def attend(self, instructions: int) -> None:
        for keys, values in zip(self._cache.keys, self._cache.values, strict=True):
            kernel.attend(
                self._query, keys, values, self._sequences, self._bounds, self._out,
                scale=0.1, instructions=instructions,
            )  # fmt: skip

    def read(self) -> None:
        self._plain.sum()


def measured(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, in turn, in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, run in steps.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def rows_of(dtype: str, args: dict[str, int]) -> list[list[str]]:
    step = Step(DTYPES[dtype], args)
    sets = SETS if dtype == "bfloat16" else {2: SETS[2]}
    runs = {"reading": step.read} | {
        name: lambda number=number: step.attend(number) for number, name in sets.items()
    }
    for run in runs.values():
        run()
    seconds = measured(runs, args["rounds"])
    best = min(seconds["reading"])
    return [
        [
            dtype,
            name,
            f"{step.nbytes / min(took) / 1e9:.1f}",
            f"{step.nbytes / statistics.median(took) / 1e9:.1f}",
            f"{best / min(took):.2f}",
            f"{statistics.median(seconds['reading']) / statistics.median(took):.2f}",
        ]
        for name, took in seconds.items()
    ]


def main() -> None:
    numbers = {"batch": 16, "context": 480, "heads": 8, "groups": 2, "dim": 128, "layers": 14}
    parser = page_parser(__doc__, RESULT, **numbers, threads=2, rounds=15)
    args = vars(parser.parse_args())
    write = args.pop("write")
    torch.set_num_threads(args["threads"])
    head = ["KV cache", "kernel", "GB/s, best", "median", "of reading, best", "of reading, median"]
    rows = [row for dtype in DTYPES for row in rows_of(dtype, args)]
    publish(
        fill("attention_reading", table="\n".join(table(head, rows, (0, 1))), **args),
        Path(RESULT),
        write=write,
    )


if __name__ == "__main__":
    main()
