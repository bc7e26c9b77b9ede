"""CUDA graphs of every family's tower against its ordinary call on the same device."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from support.encoder_graphs.adapters import ADAPTERS, Adapter
from support.encoder_graphs.replays import ChangedTower, Replays, assert_rows, replays
from triptych.base.machine.graphs import CudaGraph, GraphBackend

pytestmark = pytest.mark.gpu

EVERY = pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
DEVICE = "cuda"
#: Kernels of other shapes sum in another order.
ROUNDING = 1e-4


def backend() -> GraphBackend:
    return CudaGraph(torch.device(DEVICE))


def graphs_of(adapter: Adapter, **options: Any) -> Replays:
    return replays(adapter, backend=backend(), device=DEVICE, **options)


@EVERY
def test_padded_replays_equal_the_ordinary_call_for_each_number_of_items_at_each_budget(adapter):
    made = graphs_of(adapter, poisoned=True)
    for count in range(1, len(made.items) + 1):
        items = made.items[:count]
        wanted = made.eager(items)
        for budget in made.graphs:
            if sum(item.rows for item in items) <= budget:
                assert_rows(made.at(budget, items), wanted, ROUNDING)


@EVERY
def test_a_replay_follows_from_its_items_alone_and_what_it_gave_stays(adapter: Adapter) -> None:
    made = graphs_of(adapter)
    one, other = made.items[:2], made.items[2:]
    first = made.manager.encode(one)
    held = [rows.clone() for rows in first]
    made.manager.encode(other)
    again = made.manager.encode(one)
    for rows, before, after in zip(first, held, again, strict=True):
        assert torch.equal(rows, before) and torch.equal(rows, after)


@EVERY
def test_what_runs_between_two_replays_changes_neither(adapter: Adapter) -> None:
    """Larger replays share its pool's memory, ordinary calls and others the device's."""
    made = graphs_of(adapter, poisoned=True)
    small, large = made.items[:1], made.items
    least, most = min(made.graphs), max(made.graphs)
    first = made.at(least, small)
    for _ in range(3):
        assert_rows(made.at(most, large), made.eager(large), ROUNDING)
        junk = torch.full((1 << 24,), torch.nan, device=DEVICE)
        del junk
        gc.collect()
        torch.cuda.empty_cache()
        for rows, again in zip(first, made.at(least, small), strict=True):
            assert torch.equal(rows, again)


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_in_half_precision_a_replay_is_as_near_to_fp32_as_the_ordinary_call(adapter, dtype):
    exact = adapter.open(device=DEVICE, dtype=torch.float32)
    made = graphs_of(adapter, poisoned=True, dtype=dtype)
    reference = torch.cat(exact.encode(adapter.items(exact, len(made.items))))
    graphs, eager = (
        _error(torch.cat(rows), reference)
        for rows in (made.manager.encode(made.items), made.eager(made.items))
    )
    assert graphs <= 2 * eager + 1e-3, f"graphs {graphs:.4f}, ordinary call {eager:.4f}"


@EVERY
def test_a_replay_runs_no_code_of_the_tower(adapter: Adapter) -> None:
    encoder: Any = adapter.open(device=DEVICE)
    calls: list[int] = []

    def forward(values: dict[str, torch.Tensor]) -> Any:
        calls.append(1)
        return encoder.encoder_cudagraph_forward(values)

    made = graphs_of(adapter, tower=ChangedTower(encoder, encoder_cudagraph_forward=forward))
    captured = len(calls)
    assert_rows(made.manager.encode(made.items), made.eager(made.items), ROUNDING)
    assert len(calls) == captured, "the tower was called"


def _error(rows: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference, as a share of the largest element."""
    assert torch.isfinite(rows).all()
    return float((rows.float() - reference).abs().max() / reference.abs().max())
