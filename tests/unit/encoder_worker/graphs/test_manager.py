"""Graphs by budget: how items are packed and replayed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.base.machine.graphs import EagerStatic
from triptych.encoder_worker.graphs.manager import EncoderCudaGraphManager, GraphCounts
from triptych.encoder_worker.graphs.packing import GraphLimits, ItemSize, PackedBatch, pack, smallest_fitting
from triptych.models.base import PreparedItem
from triptych.models.encoder_graph import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    SupportsEncoderCudaGraph,
    pad_repeat_last,
    padded_buffers,
)

WIDTH = 3


class GraphTowerFake(SupportsEncoderCudaGraph):
    """Adds the mean of an item's rows to each of them. `captured` and `eager` are the sizes of its calls.

    With `pops` its forward takes values out of the dict, as some towers do. Keys in `lost` are missing in the
    values of replays, those in `added` are too many.
    """

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, *, pops: bool = False) -> None:
        self.captured: list[int] = []
        self.eager: list[int] = []
        self.lost: set[str] = set()
        self.added: dict[str, torch.Tensor] = {}
        self.replaced: dict[str, torch.Tensor] = {}
        self._pops = pops

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        padding = {"cu_seqlens": pad_repeat_last}
        return EncoderCudaGraphConfig(("image",), ("pixel_values", "cu_seqlens"), WIDTH, padding)

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> EncoderCudaGraphCaptureInputs:
        self.captured.append(token_budget)
        shapes = {
            "pixel_values": ((token_budget, WIDTH), dtype),
            "cu_seqlens": ((max_batch_size + 1,), torch.int32),
        }
        return padded_buffers(self.get_encoder_cudagraph_config(), shapes, device)

    def prepare_encoder_cudagraph_replay_buffers(
        self, items: Sequence[PreparedItem], max_batch_size: int, max_frames_per_batch: int
    ) -> EncoderCudaGraphReplayBuffers:
        offsets = torch.tensor([0, *(item.rows for item in items)], dtype=torch.int32).cumsum(0)
        values = {
            "pixel_values": torch.cat([item.tensors["pixel_values"] for item in items]),
            "cu_seqlens": offsets.int(),
        }
        values |= self.added | self.replaced
        return EncoderCudaGraphReplayBuffers(
            {key: value for key, value in values.items() if key not in self.lost}
        )

    def encoder_cudagraph_forward(self, values: dict[str, torch.Tensor]) -> torch.Tensor:
        take = values.pop if self._pops else values.__getitem__
        pixels, offsets = take("pixel_values"), take("cu_seqlens")
        ids = torch.searchsorted(offsets[1:].contiguous(), torch.arange(len(pixels)).int(), right=True)
        same = (ids[:, None] == ids[None, :]).to(pixels.dtype)
        # NaN times zero is NaN: whatever a buffer holds beyond its batch shows.
        return pixels + same @ pixels / same.sum(1, keepdim=True)

    def encoder_cudagraph_item_frames(self, item: PreparedItem) -> int:
        return item.grid_thw[0] if item.grid_thw else 1

    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        """As the tower does it without buffers."""
        self.eager.append(len(items))
        pixels = [item.tensors["pixel_values"] for item in items]
        return [each + each.mean(0, keepdim=True) for each in pixels]


def graph_item(rows: int, seed: int = 0, frames: int = 1) -> PreparedItem:
    """An item of so many rows with random pixels."""
    pixels = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed * 1000 + rows))
    return PreparedItem(rows, rows, (frames, rows, 1), rows, {"pixel_values": pixels})


LIMITS = GraphLimits((8, 16, 32), max_batch_size=4, max_frames_per_batch=6)


def managed(tower: GraphTowerFake, *, poisoned: bool = True) -> EncoderCudaGraphManager:
    manager = EncoderCudaGraphManager(tower, EagerStatic(), LIMITS, poisoned=poisoned)
    manager.capture()
    return manager


def assert_eager(items: list[PreparedItem], outputs: list[torch.Tensor]) -> None:
    expected = GraphTowerFake().encode(items)
    assert [tuple(output.shape) for output in outputs] == [(item.rows, WIDTH) for item in items]
    for output, own in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, own)


def test_each_budget_is_captured_once_and_the_largest_first() -> None:
    tower = GraphTowerFake()
    managed(tower)
    assert tower.captured == [32, 16, 8]


def test_outputs_come_in_the_order_of_their_items_with_large_ones_among_them() -> None:
    rng = random.Random(3)
    tower = GraphTowerFake()
    manager = managed(tower)
    for seed in range(50):
        items = [graph_item(rng.choice([1, 5, 9, 20, 32, 33, 60]), seed + n) for n in range(rng.randrange(9))]
        assert_eager(items, manager.encode(items))


def test_hits_and_misses_are_counted() -> None:
    tower = GraphTowerFake()
    manager = managed(tower)
    manager.encode([graph_item(33), graph_item(4), graph_item(3), graph_item(20), graph_item(2, frames=7)])
    assert manager.counts == GraphCounts(hits=3, misses=2, padding_rows=5, replays={32: 1})
    manager.encode([graph_item(7)])
    assert manager.counts == GraphCounts(hits=4, misses=2, padding_rows=6, replays={32: 1, 8: 1})
    assert tower.eager == [2], "what no graph holds is one eager call"


def test_a_tower_that_takes_values_out_of_its_dict_can_be_captured_and_replayed_again_and_again() -> None:
    manager = managed(GraphTowerFake(pops=True))
    manager.capture()
    for seed in range(3):
        items = [graph_item(5, seed), graph_item(9, seed)]
        assert_eager(items, manager.encode(items))
    assert all(
        list(graph.input_buffers) == ["pixel_values", "cu_seqlens"] for graph in manager._graphs.values()
    )


def test_a_misspelt_key_is_an_error_and_never_the_previous_request_s_data() -> None:
    tower = GraphTowerFake()
    manager = managed(tower, poisoned=False)
    manager.encode([graph_item(4, 1)])
    tower.lost, tower.added = {"cu_seqlens"}, {"cu_seqlen": torch.ones(1)}
    with pytest.raises(ValueError, match=r"missing \['cu_seqlens'\], not expected \['cu_seqlen'\]"):
        manager.encode([graph_item(4, 2)])
    tower.lost, tower.added = set(), {}
    assert_eager([graph_item(4, 2)], manager.encode([graph_item(4, 2)]))


def test_offsets_padded_with_zeros_would_be_wrong() -> None:
    class Zeros(GraphTowerFake):
        def get_encoder_cudagraph_config(self) -> object:  # type: ignore[override]
            config = super().get_encoder_cudagraph_config()
            return type(config)(config.modalities, config.buffer_keys, config.out_hidden_size)

    items = [graph_item(3, 1), graph_item(2, 2)]
    outputs = managed(Zeros()).encode(items)
    with pytest.raises(AssertionError):
        assert_eager(items, outputs)


def test_a_tower_whose_buffers_are_not_those_of_its_config_is_not_captured() -> None:
    class Misspelt(GraphTowerFake):
        def prepare_encoder_cudagraph_capture_inputs(self, *given: object) -> object:  # type: ignore[override]
            inputs = super().prepare_encoder_cudagraph_capture_inputs(*given)  # type: ignore[arg-type]
            inputs.values["cu_seqlen"] = inputs.values.pop("cu_seqlens")
            return inputs

    manager = EncoderCudaGraphManager(Misspelt(), EagerStatic(), LIMITS)
    with pytest.raises(
        ValueError, match=r"capture inputs: missing \['cu_seqlens'\], not expected \['cu_seqlen'\]"
    ):
        manager.capture()
    assert manager._graphs == {}


PACKED = GraphLimits((128, 256, 512), max_batch_size=4, max_frames_per_batch=6)


def packed(*tokens: int, limits: GraphLimits = PACKED) -> list[tuple[int, tuple[int, ...]]]:
    """Budget and rows of each item of the replays."""
    packing = pack([ItemSize(each) for each in tokens], limits)
    return [(batch.budget, tuple(tokens[i] for i in batch.items)) for batch in packing.batches]


@pytest.mark.parametrize(
    ("tokens", "replays"),
    [
        ((), []),
        ((10,), [(128, (10,))]),
        ((128,), [(128, (128,))]),
        ((129,), [(256, (129,))]),
        # Smallest first, whatever their order.
        ((100, 20, 100), [(256, (20, 100, 100))]),
        # The fifth item is one too many.
        ((10, 10, 10, 10, 10), [(128, (10, 10, 10, 10)), (128, (10,))]),
        # Together more rows than the largest graph has.
        ((300, 300), [(512, (300,)), (512, (300,))]),
        # 128 + 128 and one replay of 256 are the same rows: one launch is saved.
        ((100, 100), [(256, (100, 100))]),
        # The cliff: 300 rows need 512, alone they take 256 and 128.
        ((200, 100), [(128, (100,)), (256, (200,))]),
        # Where both need 256, a replay of 512 costs the same.
        ((200, 200), [(512, (200, 200))]),
    ],
)
def test_items_are_packed_as_the_table_says(tokens, replays):
    assert packed(*tokens) == replays


def test_what_no_graph_holds_is_encoded_eagerly() -> None:
    sizes = [ItemSize(513), ItemSize(10), ItemSize(20, frames=7), ItemSize(512, frames=6)]
    packing = pack(sizes, PACKED)
    assert packing.eager == (0, 2)
    assert packing.batches == (PackedBatch(128, (1,)), PackedBatch(512, (3,)))


def test_frames_of_a_replay_are_bounded() -> None:
    packing = pack([ItemSize(8, frames=3), ItemSize(8, frames=3), ItemSize(8, frames=1)], PACKED)
    assert [batch.items for batch in packing.batches] == [(0, 1), (2,)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[ItemSize], GraphLimits]:
    budgets = tuple(sorted(draw(st.sets(st.integers(1, 600), min_size=1, max_size=5))))
    limits = GraphLimits(budgets, draw(st.integers(1, 6)), draw(st.integers(1, 12)))
    size = st.builds(ItemSize, st.integers(1, 700), st.integers(1, 5))
    return draw(st.lists(size, max_size=12)), limits


@settings(deadline=None, max_examples=50)
@given(cases())
def test_every_item_is_taken_once_and_every_replay_keeps_the_limits(case):
    sizes, limits = case
    packing = pack(sizes, limits)
    taken = [*packing.eager, *(index for batch in packing.batches for index in batch.items)]
    assert sorted(taken) == list(range(len(sizes)))
    for batch in packing.batches:
        rows = sum(sizes[index].tokens for index in batch.items)
        assert 1 <= len(batch.items) <= limits.max_batch_size
        assert sum(sizes[index].frames for index in batch.items) <= limits.max_frames_per_batch
        assert batch.budget == smallest_fitting(limits.budgets, rows)
    for index in packing.eager:
        size = sizes[index]
        assert size.tokens > limits.budgets[-1] or size.frames > limits.max_frames_per_batch


@settings(deadline=None, max_examples=50)
@given(cases())
def test_no_packing_computes_more_rows_than_each_item_by_itself(case):
    sizes, limits = case
    packing = pack(sizes, limits)
    for batch in packing.batches:
        alone = [smallest_fitting(limits.budgets, sizes[index].tokens) or 0 for index in batch.items]
        assert batch.budget <= sum(alone)
