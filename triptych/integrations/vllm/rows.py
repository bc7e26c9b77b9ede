"""Rows of embeddings: host copies as vLLM's tensors, and saves of its outputs into the store."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as concurrent_wait
from dataclasses import dataclass, field

import torch

from triptych.base.errors import TriptychError
from triptych.base.log import log_fields, short
from triptych.base.machine.copy_stream import CopyStream
from triptych.base.types import SCALE_BYTES, ItemPlan
from triptych.ec_connector.connectors.host_buffers import DTYPES
from triptych.ec_connector.connectors.store_client import StoreClient
from triptych.ec_connector.int8_rows import unpacked
from triptych.integrations.vllm.host_copies import LARGE_BYTES, HostCopy
from triptych.integrations.vllm.mapped_copies import MappedCopies
from triptych.integrations.vllm.options import ConnectorOptions
from triptych.integrations.vllm.requests import SaveOrder
from triptych.store.control import StoreUnavailable

logger = logging.getLogger(__name__)

_TIMEOUT = 30.0
#: Seconds that a shutdown waits for the saves under way, all together.
_LAST_SAVES = 5.0

#: Copies an item's rows to host memory: once they are computed, in a thread of its own.
HostBody = Callable[[], memoryview]


class RowSaver:
    """The saves of one worker, one per item, within a byte budget: above it an item is not saved.

    What is not saved is encoded again by the instance that needs it, so no save is worth an engine's memory.
    """

    def __init__(self, options: ConnectorOptions) -> None:
        self._limit = options.host_memory_bytes
        self._ttl = options.ttl_seconds
        self._client = StoreClient(options.store)
        self._lock = threading.Lock()
        self._saves: dict[str, Future[None]] = {}
        self._used = 0
        self._failing = False

    def save(self, plan: ItemPlan, body: HostBody) -> bool:
        """Starts a save, unless one of the item is running or there is no room; whether it did.

        Never blocks. A value that is stored already only has its TTL renewed.
        """
        with self._lock:
            if plan.mm_hash in self._saves or self._used + plan.nbytes > self._limit:
                return False
            try:
                saving = self._client.submit(self._save(plan, body))
            except StoreUnavailable:
                return False
            self._saves[plan.mm_hash] = saving
            self._used += plan.nbytes
        saving.add_done_callback(lambda done: self._end(plan))
        return True

    async def _save(self, plan: ItemPlan, body: HostBody) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT):
                store = await self._client.store()
                (stored,) = await store.look_up([(plan.mm_hash, plan.namespace)])
                if stored is None:
                    await store.save(plan, await asyncio.to_thread(body), ttl=self._ttl)
        except TimeoutError:
            self._failed(plan, f"not stored within {_TIMEOUT:g} s")
        except TriptychError as error:
            self._failed(plan, str(error))
        except Exception as error:
            logger.exception("save of %s failed", short(plan.mm_hash))
            self._failed(plan, f"unexpected: {error!r}")
        else:
            self._failing = False

    def _failed(self, plan: ItemPlan, reason: str) -> None:
        """Logged once until a save succeeds again: while the store is down, every item fails."""
        level = logging.DEBUG if self._failing else logging.WARNING
        self._failing = True
        logger.log(
            level, "%s is not saved: %s", short(plan.mm_hash), reason, extra=log_fields(mm_hash=plan.mm_hash)
        )

    def _end(self, plan: ItemPlan) -> None:
        with self._lock:
            del self._saves[plan.mm_hash]
            self._used -= plan.nbytes

    def close(self) -> None:
        """Waits a moment for the saves under way, then ends the thread. Idempotent."""
        if self._client.closed:
            return
        with self._lock:
            self._client.closed = True
            running = list(self._saves.values())
        _, late = concurrent_wait(running, timeout=_LAST_SAVES)
        if late:
            logger.warning("%d saves did not end in %g s", len(late), _LAST_SAVES)
        self._client.close()


_NAMES = {dtype: name for name, dtype in DTYPES.items() if dtype.is_floating_point}


@dataclass(frozen=True, slots=True)
class CopySource:
    """Where a worker finds a host copy: in the file `path`, or in its own process: `memory`, or `pieces`."""

    identifier: str
    rows: int
    columns: int
    dtype: str
    scales: int = 0
    path: str = ""
    memory: memoryview | None = field(default=None, repr=False)
    pieces: Sequence[torch.Tensor] = field(default=(), repr=False)


def source_of(copy: HostCopy) -> CopySource:
    """The copy as the step's metadata names it."""
    plan = copy.plan
    memory = copy.memory if isinstance(copy.memory, memoryview) and not copy.path else None
    return CopySource(
        plan.mm_hash, plan.rows, plan.columns, plan.dtype, plan.scales, copy.path, memory, copy.pieces
    )


def read_rows(
    source: CopySource,
    device: torch.device,
    dtype: torch.dtype,
    stream: CopyStream | None = None,
    mapped: MappedCopies | None = None,
) -> torch.Tensor:
    """The rows on the device, [rows, width]: the host copy may be freed afterwards.

    Files are read by the mappings that `mapped` keeps. Page-locked pieces come by `stream`, beside what the
    model computes: they stay until the step is over.

    On a CPU they are the host copy's own memory where it has the model's dtype. Nobody else gets that memory
    while they live, and vLLM does not write into its encoder cache.
    """
    if not source.rows:
        width = source.columns - SCALE_BYTES * source.scales
        return torch.empty(0, width, dtype=dtype, device=device)
    kept = DTYPES[source.dtype]
    nbytes = source.rows * source.columns * kept.itemsize
    if source.pieces:
        flat = _copied(source.pieces, nbytes, device, stream or CopyStream()).view(kept)
        stored = flat.view(source.rows, source.columns)
        return unpacked(stored, source.scales, dtype) if source.scales else stored.to(dtype)
    memory = source.memory
    if memory is None:
        memory = (mapped or MappedCopies()).view(source.path, nbytes)
    stored = torch.frombuffer(memory, dtype=kept, count=source.rows * source.columns)
    stored = stored.view(source.rows, source.columns)
    if source.scales:
        # On the device, after half of the transfer.
        return unpacked(stored.to(device), source.scales, dtype)
    small = bool(source.path) and nbytes < LARGE_BYTES
    return stored.to(device=device, dtype=dtype, copy=small)


def _copied(
    pieces: Sequence[torch.Tensor], nbytes: int, device: torch.device, stream: CopyStream
) -> torch.Tensor:
    """The bytes on the device, for the model's stream; no thread waits for them."""
    with stream.beside_model():
        whole = torch.empty(nbytes, dtype=torch.uint8, device=device)
        start = 0
        for piece in pieces:
            whole[start : start + piece.numel()].copy_(piece, non_blocking=True)
            start += piece.numel()
    stream.keep(whole, model=True)
    stream.block_model()
    return whole


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
