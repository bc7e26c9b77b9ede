"""Rows as tensors: host copies into vLLM's encoder cache, and back into bytes to save."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from triptych.base.types import ItemPlan
from triptych.integrations.vllm.host_copies import HostCopy
from triptych.integrations.vllm.requests import SaveOrder

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class CopySource:
    """Where a worker finds a host copy: in the file `path`, or in `memory` of its own process."""

    identifier: str
    rows: int
    width: int
    dtype: str
    path: str = ""
    memory: memoryview | None = field(default=None, repr=False)


def source_of(copy: HostCopy) -> CopySource:
    """The copy as the step's metadata names it."""
    plan = copy.plan
    memory = None if copy.path else copy.memory
    return CopySource(plan.mm_hash, plan.rows, plan.width, plan.dtype, copy.path, memory)


def read_rows(source: CopySource, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The rows in memory of the device's own: the host copy may be freed afterwards."""
    memory: memoryview | mmap.mmap
    if source.memory is not None:
        memory = source.memory
    else:
        file = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Private and writable, which a tensor's memory must be; the file is never written.
            memory = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(file)
    if not source.rows:
        return torch.empty(0, source.width, dtype=dtype, device=device)
    flat = torch.frombuffer(memory, dtype=DTYPES[source.dtype])
    return flat.view(source.rows, source.width).to(device=device, dtype=dtype, copy=True)


def host_body(rows: torch.Tensor) -> Callable[[], memoryview]:
    """Copies an encoder output to host memory, from another thread: it waits until the rows are computed."""
    computed = None
    if rows.is_cuda:
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(rows.device))

    def body() -> memoryview:
        if computed is not None:
            computed.synchronize()
        host = rows.detach().to("cpu", copy=True).contiguous()
        return host.reshape(-1).view(torch.uint8).numpy().data

    return body


def plan_to_save(order: SaveOrder, namespace: str, rows: torch.Tensor) -> ItemPlan | None:
    """The plan of an encoder output; None for a shape or dtype that the store does not hold."""
    name = _NAMES.get(rows.dtype)
    if rows.dim() != 2 or name is None:
        return None
    return ItemPlan(
        mm_hash=order.identifier,
        namespace=namespace,
        modality=order.modality,
        rows=rows.shape[0],
        width=rows.shape[1],
        dtype=name,
        length=order.length,
        runs=order.runs,
        grid_thw=order.grid,
    )
