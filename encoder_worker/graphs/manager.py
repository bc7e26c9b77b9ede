"""Captures a tower's graphs, and encodes batches by replaying them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from triptych.base.config import format_size
from triptych.base.machine.graphs import CapturedGraph, GraphBackend
from triptych.base.progress import each
from triptych.encoder_worker.graphs.packing import GraphLimits, ItemSize, pack
from triptych.models.base import PreparedItem
from triptych.models.encoder_graph import EncoderCudaGraphConfig, SupportsEncoderCudaGraph


@dataclass(frozen=True, slots=True)
class BudgetGraphMetadata:
    """A captured tower call over `token_budget` output rows, and the buffers that it reads and writes.

    It holds the buffers, whose addresses the graph knows: they live as long as it does.
    """

    token_budget: int
    max_batch_size: int
    max_frames_per_batch: int
    graph: CapturedGraph
    input_buffers: dict[str, torch.Tensor]
    output_buffer: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers; without what a graph's own pool holds."""
        return sum(tensor.nbytes for tensor in (*self.input_buffers.values(), self.output_buffer))


def check_keys(what: str, keys: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """ValueError, naming the keys, where the two do not have the same."""
    missing, extra = sorted(expected.keys() - keys.keys()), sorted(keys.keys() - expected.keys())
    if missing or extra:
        raise ValueError(f"{what}: missing {missing}, not expected {extra}")


def write_buffers(
    buffers: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor], config: EncoderCudaGraphConfig
) -> None:
    """Writes every buffer as a whole: the batch's value, then padding. ValueError for values that do not fit.

    Nothing is written before all values are checked. A buffer that was left out would keep another request's
    data, which the tower would compute with.
    """
    check_keys("values of a replay", values, buffers)
    for key, buffer in buffers.items():
        value = values[key]
        if value.shape[1:] != buffer.shape[1:] or len(value) > len(buffer):
            raise ValueError(
                f"{key}: values {tuple(value.shape)} do not fit the buffer {tuple(buffer.shape)}"
            )
        if value.is_floating_point() != buffer.is_floating_point():
            raise ValueError(f"{key}: values of {value.dtype} for a buffer of {buffer.dtype}")
    for key, buffer in buffers.items():
        used = len(values[key])
        buffer[:used].copy_(values[key])
        config.padding(key)(buffer, used)


def poison(buffers: Mapping[str, torch.Tensor]) -> None:
    """Fills buffers with what no computation survives: NaN, or an index far beyond any table. For tests."""
    for buffer in buffers.values():
        buffer.fill_(torch.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).max)


logger = logging.getLogger(__name__)


class GraphTower(SupportsEncoderCudaGraph, Protocol):
    """An encoder side whose tower has a form of fixed shape."""

    device: torch.device
    dtype: torch.dtype

    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]: ...


class GraphCounter(Protocol):
    """Counts what becomes of items."""

    def hit(self, budget: int, items: int, rows: int) -> None:
        """Counts one replay of this budget, with its number of items and their rows in total."""
        ...

    def miss(self, items: int) -> None:
        """So many items were above a limit, and encoded eagerly."""
        ...


@dataclass(slots=True)
class GraphCounts:
    """Plain counts: items by replays (hits) and eager (misses), replays per budget, rows of padding."""

    hits: int = 0
    misses: int = 0
    padding_rows: int = 0
    replays: dict[int, int] = field(default_factory=dict)

    def hit(self, budget: int, items: int, rows: int) -> None:
        self.hits += items
        self.padding_rows += budget - rows
        self.replays[budget] = self.replays.get(budget, 0) + 1

    def miss(self, items: int) -> None:
        self.misses += items


class EncoderCudaGraphManager:
    """The graphs of one tower, one per budget of `limits`. Used by one thread at a time.

    `poisoned`: all buffers are filled with NaN before each replay, so that a test sees whatever a replay
    leaves unwritten.
    """

    def __init__(
        self,
        tower: GraphTower,
        backend: GraphBackend,
        limits: GraphLimits,
        *,
        poisoned: bool = False,
    ) -> None:
        self.limits = limits
        self.counts: GraphCounter = GraphCounts()
        self._tower = tower
        self._backend = backend
        self._config = tower.get_encoder_cudagraph_config()
        self._graphs: dict[int, BudgetGraphMetadata] = {}
        self._poisoned = poisoned
        #: What the device lost to the capture: the buffers, the memory pool and the driver's graphs.
        self.device_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all static buffers."""
        return sum(graph.nbytes for graph in self._graphs.values())

    def capture(self) -> None:
        """Captures each budget once, the largest first: smaller ones fit its memory pool.

        Raises what the tower or the device raises; then there are no graphs.
        """
        start = time.monotonic()
        graphs = {}
        budgets = sorted(self.limits.budgets, reverse=True)
        with torch.inference_mode():
            for budget in each("capturing encoder graphs", budgets, "graphs"):
                graphs[budget] = self._capture_budget_graph(budget)
        self._graphs = graphs
        logger.info(
            "encoder graphs (%s) of %s rows, at most %d items: captured in %.1f s, %s of buffers",
            self._backend.mode,
            ", ".join(map(str, self.limits.budgets)),
            self.limits.max_batch_size,
            time.monotonic() - start,
            format_size(self.nbytes),
        )

    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        """One [rows, width] tensor per item, in their order, each with storage of its own."""
        sizes = [ItemSize(item.rows, self._frames(item)) for item in items]
        packing = pack(sizes, self.limits)
        outputs: dict[int, torch.Tensor] = {}
        with torch.inference_mode():
            for batch in packing.batches:
                rows = self._run_budget_graph(self._graphs[batch.budget], [items[i] for i in batch.items])
                outputs.update(zip(batch.items, rows, strict=True))
            if packing.eager:
                rows = self._tower.encode([items[i] for i in packing.eager])
                outputs.update(zip(packing.eager, rows, strict=True))
                self.counts.miss(len(packing.eager))
        return [outputs[index] for index in range(len(items))]

    def _frames(self, item: PreparedItem) -> int:
        """Of a picture or frames as pictures; items of another getter fit no graph."""
        if item.apart not in ("", *self._config.modalities):
            return self.limits.max_frames_per_batch + 1
        return self._tower.encoder_cudagraph_item_frames(item)

    def _capture_budget_graph(self, budget: int) -> BudgetGraphMetadata:
        tower, limits = self._tower, self.limits
        items, frames = limits.max_batch_size, limits.max_frames_per_batch
        inputs = tower.prepare_encoder_cudagraph_capture_inputs(
            budget, items, frames, tower.device, tower.dtype
        ).values
        check_keys("capture inputs", inputs, dict.fromkeys(self._config.buffer_keys))
        shape = (budget, self._config.out_hidden_size)
        output = torch.empty(shape, dtype=tower.dtype, device=tower.device)

        def run() -> None:
            # A copy: the tower may take values out of its dict.
            rows = tower.encoder_cudagraph_forward(dict(inputs))
            if rows.shape != output.shape:
                raise ValueError(f"the tower gave {tuple(rows.shape)} for {tuple(output.shape)}")
            output.copy_(rows)

        # One call, whatever the backend: a tower that cannot do it fails here, not at the first request.
        run()
        graph = self._backend.capture(run)
        return BudgetGraphMetadata(budget, items, frames, graph, inputs, output)

    def _run_budget_graph(
        self, graph: BudgetGraphMetadata, items: Sequence[PreparedItem]
    ) -> list[torch.Tensor]:
        limits = self.limits
        values = self._tower.prepare_encoder_cudagraph_replay_buffers(
            items, limits.max_batch_size, limits.max_frames_per_batch
        ).values
        if self._poisoned:
            poison({**graph.input_buffers, "output": graph.output_buffer})
        write_buffers(graph.input_buffers, values, self._config)
        graph.graph.replay()
        rows = self._tower.split_encoder_cudagraph_output(graph.output_buffer, items)
        self.counts.hit(graph.token_budget, len(items), sum(item.rows for item in items))
        # The next replay overwrites the buffer.
        return [row.clone(memory_format=torch.contiguous_format) for row in rows]
