"""Our paged attention kernel by each of its launches: decodes and a chunk of a prompt, beside the default."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.engine_rounds import median_seconds
from benchmarks.gpu.part_page import PartPage
from triptych.base.machine.device import Device

_BLOCK, _ROUNDS = 16, 20
#: Sequences, their lengths, and the queries of each: of a step of decodes, and of a prompt's second half.
_WORK = {"decodes": (64, 2048, 1), "a prompt's chunk": (1, 4096, 2048)}
_SMALL = {"decodes": (2, 40, 1), "a prompt's chunk": (1, 40, 20)}
#: Query heads, kv heads and dims of a head of Qwen3-VL-8B.
_HEADS, _SMALL_HEADS = (32, 8, 128), (4, 2, 16)


def measure_launches(page: PartPage, device: str, dtype: torch.dtype, *, small: bool) -> None:
    """A row for each launch and kind of work; the results of all launches are compared."""
    page.table("paged attention", "ms", "of the default's")
    if importlib.util.find_spec("triton") is None:
        page.row("no triton is installed", "", "")
        return
    from triptych.kernels.paged_attention import LAUNCHES

    for name, (count, length, queries) in (_SMALL if small else _WORK).items():
        run = _work(count, length, queries, _SMALL_HEADS if small else _HEADS, device, dtype)
        outs = {launch: run(launch) for launch in LAUNCHES}
        rounds = 1 if small else _ROUNDS
        seconds = {launch: median_seconds(partial(run, launch), device, rounds) for launch in LAUNCHES}
        for launch, taken in seconds.items():
            page.row(f"{name}, {launch}", f"{taken * 1e3:.3f}", f"{taken / seconds['default']:.2f}")
            torch.testing.assert_close(outs[launch], outs["default"], rtol=0.05, atol=0.02)


def _work(
    count: int, length: int, queries: int, heads: tuple[int, int, int], device: str, dtype: torch.dtype
) -> Callable[[str], torch.Tensor]:
    """The kernel's result by the launch of a name, over drawn contents."""
    from triptych.kernels.paged_attention import LAUNCHES, PagedQueries, PagedScores, attend

    query_heads, kv_heads, dim = heads
    blocks = -(-length // _BLOCK)
    draw = torch.Generator(device).manual_seed(0)
    shape = (count * blocks, _BLOCK, kv_heads, dim)
    keys, values = (torch.randn(shape, generator=draw, device=device, dtype=dtype) for _ in range(2))
    query = torch.randn(count * queries, query_heads, dim, generator=draw, device=device, dtype=dtype)
    work = PagedQueries(
        starts=torch.arange(0, count * queries + 1, queries, dtype=torch.int32, device=device),
        lengths=torch.full((count,), length, dtype=torch.int32, device=device),
        tables=torch.randperm(count * blocks, generator=draw, device=device).int().view(count, blocks),
        longest=queries,
        processors=Device.of(torch.device(device)).processors,
    )

    def run(launch: str) -> torch.Tensor:
        out = torch.empty_like(query)
        attend(query, keys, values, work, PagedScores(dim**-0.5), out, LAUNCHES[launch])
        return out

    return run
