"""Decode graphs: steps of one token per sequence, in static buffers of a few sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from triptych.base.machine.graphs import CapturedGraph, GraphBackend
from triptych.base.progress import each
from triptych.models.base import DecoderSide
from triptych.pd_worker.attention.metadata import AttentionMetadata, CrossTables, PagedKVCache
from triptych.pd_worker.runner.batch import Batch


@dataclass(frozen=True, slots=True, order=True)
class DecodeSize:
    """A step of `batch` sequences, whose block tables hold up to `blocks` KV blocks each.

    `cross_blocks` are those of an encoder output; 0 for decoder-only models. Attention reads no more of a
    table than a sequence has, so that every size has tables for the longest.
    """

    batch: int
    blocks: int
    cross_blocks: int = 0


def decode_sizes(max_num_seqs: int, blocks: int, cross_blocks: int = 0) -> list[DecodeSize]:
    """All sizes that are captured, smallest first: powers of two of sequences, and the maximum."""
    return [DecodeSize(batch, blocks, cross_blocks) for batch in powers_of_two(1, max_num_seqs)]


def powers_of_two(first: int, last: int) -> list[int]:
    """`first`, twice as many, and so on below `last`, and `last`; alone where it is not above `first`."""
    powers = []
    while first < last:
        powers.append(first)
        first *= 2
    return [*powers, last]


def smallest_fit(sizes: Iterable[DecodeSize], needed: DecodeSize) -> DecodeSize | None:
    """The smallest size that holds `needed`: first of batches, then of tables; None where none does."""
    fitting = [
        size
        for size in sizes
        if size.batch >= needed.batch
        and size.blocks >= needed.blocks
        and size.cross_blocks >= needed.cross_blocks
    ]
    return min(fitting, default=None)


def shown(sizes: Sequence[DecodeSize]) -> str:
    """For logs and errors: how many, and up to what."""
    last = sizes[-1]
    cross = f" and {last.cross_blocks} of an encoder output" if last.cross_blocks else ""
    return f"{len(sizes)} sizes up to {last.batch} sequences of {last.blocks} blocks{cross}"


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """Static tensors of one size: inputs by name in `values`, and the results, each written as a whole.

    token_ids [B], positions [rows, B], slots [B], tables [B, blocks], lengths [B], and for encoder-decoder
    models cross_tables [B, cross blocks] and cross_lengths [B], all int64; hidden [B, hidden_size]; finite
    [B] bool, of the keys and values where they may overflow.
    """

    size: DecodeSize
    values: dict[str, torch.Tensor]
    hidden: torch.Tensor
    finite: torch.Tensor

    @classmethod
    def allocate(cls, size: DecodeSize, decoder: DecoderSide) -> DecodeBuffers:
        batch, device = size.batch, decoder.device
        shapes = {
            "token_ids": (batch,),
            "positions": (decoder.geometry.position_rows, batch),
            "slots": (batch,),
            "tables": (batch, size.blocks),
            "lengths": (batch,),
        }
        if size.cross_blocks:
            shapes |= {"cross_tables": (batch, size.cross_blocks), "cross_lengths": (batch,)}
        return cls(
            size,
            {name: torch.zeros(shape, dtype=torch.int64, device=device) for name, shape in shapes.items()},
            torch.zeros(batch, decoder.geometry.hidden_size, dtype=decoder.dtype, device=device),
            torch.ones(batch, dtype=torch.bool, device=device),
        )

    def load(self, batch: Batch | None, spare_block: int, block_size: int) -> None:
        """Writes every input wholly: the step's sequences, then padding, which is all of it without a step.

        Padding is one token of the spare block, and a shorter table's further blocks are its own first: what
        is masked is read all the same, and must not be another request's.
        """
        values = self.values
        pads = {"slots": spare_block * block_size, "lengths": 1, "cross_lengths": 1}
        pads |= {"tables": spare_block, "cross_tables": spare_block}
        for name, buffer in values.items():
            buffer.fill_(pads.get(name, 0))
        if batch is None:
            return
        attention, count = batch.attention, len(batch.token_ids)
        values["token_ids"][:count] = batch.token_ids
        values["positions"][:, :count] = batch.positions
        values["slots"][:count] = attention.slots
        values["lengths"][:count] = attention.decode_lengths
        _load_tables(values["tables"], attention.decode_tables)
        if attention.cross is not None:
            values["cross_lengths"][:count] = attention.cross.decode_lengths
            _load_tables(values["cross_tables"], attention.cross.decode_tables)


def _load_tables(buffer: torch.Tensor, tables: torch.Tensor) -> None:
    count, width = tables.shape
    buffer[:count] = tables[:, :1]
    buffer[:count, :width] = tables


class DecodeGraphs:
    """The decoder over static buffers, captured once for each size.

    A captured function takes all that differs between steps from its buffers; the attention metadata that it
    makes of them has the size's numbers alone.
    """

    def __init__(
        self,
        decoder: DecoderSide,
        cache: PagedKVCache,
        backend: GraphBackend,
        sizes: Sequence[DecodeSize],
        *,
        spare_block: int,
        attention_backend: str = "sdpa",
    ) -> None:
        """`spare_block` of the cache is no request's."""
        self._decoder = decoder
        self._cache = cache
        self._backend = backend
        self._spare = spare_block
        # The CPU's kernel reads lengths on the host, which a capture forbids.
        self._attention_backend = "sdpa" if attention_backend == "cpu" else attention_backend
        self._graphs: dict[DecodeSize, tuple[DecodeBuffers, CapturedGraph]] = {}
        self.sizes = tuple(sizes)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all static buffers."""
        tensors = [t for b, _ in self._graphs.values() for t in (*b.values.values(), b.hidden, b.finite)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def capture(self) -> None:
        """Captures all sizes, largest first: smaller ones fit into the pool of the first."""
        for size in each("capturing decode graphs", sorted(self.sizes, reverse=True), "graphs"):
            self.capture_size(size)

    @torch.inference_mode()
    def capture_size(self, size: DecodeSize) -> None:
        """Captures one size."""
        buffers = DecodeBuffers.allocate(size, self._decoder)
        buffers.load(None, self._spare, self._cache.block_size)
        self._graphs[size] = buffers, self._backend.capture(partial(self._forward, buffers))
        self._cache.finite = None

    def fit(self, batch: Batch) -> DecodeSize | None:
        """The size that this step is replayed in; None where it is computed without a graph.

        Graphs are for steps of one known token per sequence; their keys are gathered from blocks.
        """
        attention = batch.attention
        if attention.prefills or batch.merged is not None or batch.inputs:
            return None
        cross = 0 if attention.cross is None else attention.cross.decode_tables.shape[1]
        if (self._decoder.cross is not None) != bool(cross):
            return None
        needed = DecodeSize(len(batch.token_ids), attention.decode_tables.shape[1], cross)
        return smallest_fit(self._graphs, needed)

    def replay(self, size: DecodeSize, batch: Batch) -> torch.Tensor:
        """Hidden states [T, hidden_size] of the step. As without a graph, `finite` of the cache is set."""
        buffers, graph = self._graphs[size]
        buffers.load(batch, self._spare, self._cache.block_size)
        graph.replay()
        count = len(batch.token_ids)
        if self._cache.may_overflow:
            self._cache.finite = buffers.finite[:count].clone()
        return buffers.hidden[:count].clone()

    def _forward(self, buffers: DecodeBuffers) -> None:
        """The captured function."""
        values, cache = buffers.values, self._cache
        cache.watch(buffers.size.batch)
        embeds = self._decoder.embed(values["token_ids"])
        attention = self._attention(buffers)
        buffers.hidden.copy_(self._decoder.forward(embeds, values["positions"], None, attention))
        if cache.finite is not None:
            buffers.finite.copy_(cache.finite)

    def _attention(self, buffers: DecodeBuffers) -> AttentionMetadata:
        """Made anew at every run: what it keeps for all layers is of one step."""
        size, values = buffers.size, buffers.values
        cross = None
        if size.cross_blocks:
            cross = CrossTables(
                decode_tables=values["cross_tables"], decode_lengths=values["cross_lengths"], prefills=()
            )
        return AttentionMetadata(
            cache=self._cache,
            slots=values["slots"],
            num_decodes=size.batch,
            decode_tables=values["tables"],
            decode_lengths=values["lengths"],
            prefills=(),
            cross=cross,
            bias=self._decoder.bias,
            layer_rules=self._decoder.layer_rules,
            backend=self._attention_backend,
        )
