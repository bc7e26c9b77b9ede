"""Transfers and swaps that fail end no other request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from support.engine.engine_cell import Checkpoint, EngineCell, Prompt, engine_cell, reference
from support.engine.engine_events import kind
from support.engine.failing_copies import fail_each_in_turn, fail_swaps_of_cross_tables, swapping_cell
from support.engine.prompts import SIX
from support.matrix import matrix
from support.waiting import until
from triptych.ec_connector.connectors import host_buffers as host_memory
from triptych.ec_connector.connectors.host_buffers import DeviceCopier
from triptych.ec_connector.connectors.memory import MemoryConnectorWorker
from triptych.ec_connector.connectors.redis import RedisConnectorWorker
from triptych.pd_worker.core.request_events import EngineEvent
from triptych.pd_worker.runner import model_runner
from triptych.store.embedding_store import EmbeddingStore

TOKENS = 6
PROMPTS = [
    Prompt("What is this?", ((1, 96, 64),)),
    Prompt("And these?", ((2, 64, 96), (1, 96, 64), (3, 64, 64))),
    Prompt("One more.", ((4, 96, 96),)),
    Prompt("Say something about the weather, and then about the sea."),
]


@dataclass
class Fault:
    """Raises in the n-th of its calls; -1: never."""

    n: int = -1
    calls: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self) -> None:
        with self._lock:
            self.calls += 1
            if self.calls - 1 == self.n:
                raise RuntimeError("injected")


def fail_copies(patch: pytest.MonkeyPatch, fault: Fault) -> None:
    """The copy to the device fails when it is started."""
    to_device = DeviceCopier.to_device

    def failing(self: DeviceCopier, *args: Any) -> Any:
        fault()
        return to_device(self, *args)

    patch.setattr(DeviceCopier, "to_device", failing)


def fail_waits(patch: pytest.MonkeyPatch, fault: Fault) -> None:
    """The copy is beside the step, as on a device, and fails later: what it has written by then is wrong."""
    to_device = DeviceCopier.to_device

    def asynchronous(self: DeviceCopier, *args: Any) -> tuple[torch.Tensor, Callable[[], None]]:
        tensor = to_device(self, *args)[0].clone()
        whole = tensor.clone()
        tensor.fill_(1e4)

        def wait() -> None:
            fault()
            tensor.copy_(whole)

        return tensor, wait

    patch.setattr(DeviceCopier, "to_device", asynchronous)


def fail_memory(patch: pytest.MonkeyPatch, fault: Fault) -> None:
    """There is no host memory for an item."""
    empty = host_memory.ReusedMemory.empty

    def failing(self: host_memory.ReusedMemory, nbytes: int, *, kept: int) -> torch.Tensor:
        fault()
        return empty(self, nbytes, kept=kept)

    patch.setattr(host_memory.ReusedMemory, "empty", failing)


def fail_loads(patch: pytest.MonkeyPatch, fault: Fault) -> None:
    """The store's client fails in a way that nobody has thought of."""
    load = EmbeddingStore.load

    async def failing(self: EmbeddingStore, *args: Any) -> Any:
        fault()
        return await load(self, *args)

    patch.setattr(EmbeddingStore, "load", failing)


def fail_orders(patch: pytest.MonkeyPatch, fault: Fault) -> None:
    """A connector fails as a whole, before it has looked at any item."""
    for worker in (RedisConnectorWorker, MemoryConnectorWorker):
        start = worker.start_load_caches

        def failing(self: Any, metadata: Any, cache: Any, start: Any = start) -> None:
            if metadata.loads() or metadata.drops:
                fault()
            start(self, metadata, cache)

        patch.setattr(worker, "start_load_caches", failing)


FAULTS = [
    ("redis", fail_copies),
    ("redis", fail_waits),
    ("redis", fail_memory),
    ("redis", fail_loads),
    ("redis", fail_orders),
    ("memory", fail_copies),
    ("memory", fail_waits),
    ("memory", fail_orders),
]


@contextmanager
def cell_of(checkpoint: Checkpoint, connector: str, store_url: str) -> Iterator[EngineCell]:
    """An engine whose losses are made good at once, as by a proxy and an encoder."""
    # The memory of the largest request's items, to the last byte: what is not given back is missed.
    features = checkpoint.features(
        reference(checkpoint.path, PROMPTS[1], TOKENS).prompt_token_ids, PROMPTS[1]
    )
    total = sum(feature.plan.nbytes for feature in features)
    with engine_cell(checkpoint, url=store_url, connector=connector, encoder_cache_memory=total) as cell:
        take = cell.take

        def answer_losses(events: list[EngineEvent]) -> None:
            take(events)
            for event in events:
                if kind(event) == "item_missing":
                    cell.engine.items_ready([event.item_missing.mm_hash])

        cell.take = answer_losses  # type: ignore[method-assign]
        yield cell


@pytest.mark.parametrize(("connector", "inject"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
async def test_every_transfer_in_turn_may_fail(checkpoint, store, store_url, connector, inject):
    expected = [reference(checkpoint.path, prompt, TOKENS).token_ids for prompt in PROMPTS]
    prompts = [reference(checkpoint.path, prompt, TOKENS).prompt_token_ids for prompt in PROMPTS]
    for prompt, ids in zip(PROMPTS, prompts, strict=True):
        for feature in checkpoint.features(ids, prompt):
            data = checkpoint.rows(feature.mm_hash)
            await store.save(feature.plan, memoryview(data.numpy()).cast("B"), ttl=600.0)
    fault = Fault()
    n, lost = -1, 0
    while n < 20:
        with pytest.MonkeyPatch.context() as patch, cell_of(checkpoint, connector, store_url) as cell:
            fault = Fault(n)
            inject(patch, fault)
            assert cell.answer(PROMPTS, TOKENS) == expected
            cell.assert_at_rest()
            lost += sum(kind(event) == "item_missing" for event in cell.events)
            worker: Any = cell.engine.runner.get_ec_transfer()
            await until(lambda worker=worker: getattr(worker, "host_bytes", 0) == 0, "host memory")  # type: ignore[misc]
        if fault.calls <= n + 1:
            break
        n += 1
    assert n >= 2, "each transfer has failed once"
    # An order that only frees loses nothing.
    assert lost >= (2 if inject is fail_orders else n), "each failure was a loss that somebody was told of"


SWAPPED_TOKENS = 24


@pytest.mark.parametrize("prefix_caching", matrix([True, False]))
def test_pictures_and_texts_are_answered_alike_whichever_copy_fails(checkpoint, prefix_caching):
    expected = [reference(checkpoint.path, prompt, SWAPPED_TOKENS).token_ids for prompt in SIX]
    flags = {"block_size": 4, "max_model_len": 128, "max_num_batched_tokens": 64}
    fail_each_in_turn(
        lambda: swapping_cell(checkpoint, 40, prefix_caching=prefix_caching, **flags),
        lambda cell: cell.answer(SIX, SWAPPED_TOKENS),
        expected,
        at_least=2,
    )


@pytest.mark.slow
def test_texts_are_answered_alike_whichever_copy_of_a_cross_table_fails() -> None:
    fail_swaps_of_cross_tables("cpu")


def test_a_copy_that_loses_the_device_ends_the_engine(checkpoint, monkeypatch):

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    # All are submitted at once, or each may end before the next, and none is preempted.
    ids = [reference(checkpoint.path, prompt, SWAPPED_TOKENS).prompt_token_ids for prompt in SIX]
    with swapping_cell(checkpoint, 40, block_size=4, max_model_len=128) as cell:
        dead = threading.Event()
        cell.engine.beat.on_death(dead.set)
        monkeypatch.setattr(model_runner, "copy_blocks", fail)
        requests = [cell.request(*each, SWAPPED_TOKENS) for each in zip(SIX, ids, strict=True)]
        with cell.engine._condition:
            for request in requests:
                cell.engine.submit(request)
        assert dead.wait(30)
