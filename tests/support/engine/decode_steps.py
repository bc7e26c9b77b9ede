"""Steps of decodes over a cache of random keys and values, with and without graphs, and poison for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from triptych.base.machine.graphs import GraphBackend
from triptych.models.base import DecoderSide
from triptych.pd_worker.attention.metadata import AttentionMetadata, CrossTables, PagedKVCache
from triptych.pd_worker.runner.batch import Batch
from triptych.pd_worker.runner.decode_graphs import DecodeGraphs, decode_sizes

BLOCK = 4
#: No token, slot, block or length: an operator that reads it raises.
NOWHERE = 1 << 40
NAN = float("nan")


@dataclass(frozen=True)
class Decoding:
    """One decoding sequence: its length with the new token, and the rows of its encoder output."""

    length: int
    rows: int = 0


class DecodeSteps:
    """A decoder over a cache whose last block is spare."""

    def __init__(
        self, decoder: DecoderSide, backend: GraphBackend, *, blocks: int = 260, attention: str = "sdpa"
    ) -> None:
        geometry = decoder.geometry
        self.decoder = decoder
        self.attention = attention
        self.num_blocks = blocks
        self.cache = PagedKVCache(
            num_layers=geometry.num_layers, num_blocks=blocks + 1, block_size=BLOCK,
            num_kv_heads=geometry.num_kv_heads, head_dim=geometry.head_dim,
            dtype=decoder.dtype, device=decoder.device,
        )  # fmt: skip
        torch.manual_seed(0)
        for tensor in self.tensors:
            tensor[:blocks].normal_()
        cross = 16 if decoder.cross is not None else 0
        self.graphs = DecodeGraphs(
            decoder, self.cache, backend, decode_sizes(8, 80, cross),
            spare_block=blocks, attention_backend=attention,
        )  # fmt: skip
        self.graphs.capture()

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.cache.keys, *self.cache.values]

    def batch(self, sequences: Sequence[Decoding], seed: int = 0) -> Batch:
        """A step of these sequences, each in blocks of its own, drawn at random."""
        draw = torch.Generator().manual_seed(seed)
        free = torch.randperm(self.num_blocks, generator=draw).tolist()

        def take(tokens: int) -> list[int]:
            return [free.pop() for _ in range(-(-tokens // BLOCK))]

        own = [take(s.length) for s in sequences]
        lengths = torch.tensor([s.length for s in sequences])
        ends = [table[(s.length - 1) // BLOCK] for s, table in zip(sequences, own, strict=True)]
        cross = None
        if self.decoder.cross is not None:
            rows = torch.tensor([s.rows for s in sequences])
            cross = CrossTables(_tables([take(s.rows) for s in sequences]), rows, prefills=())
        count = len(sequences)
        return Batch(
            token_ids=torch.randint(5, self.decoder.geometry.vocab_size, (count,), generator=draw),
            positions=(lengths - 1).expand(self.decoder.geometry.position_rows, -1),
            merged=None,
            attention=AttentionMetadata(
                cache=self.cache,
                slots=torch.tensor(ends) * BLOCK + (lengths - 1) % BLOCK,
                num_decodes=count,
                decode_tables=_tables(own),
                decode_lengths=lengths,
                prefills=(),
                cross=cross,
                bias=self.decoder.bias,
                backend=self.attention,
            ),
            last=torch.arange(count),
            sampling=[],
            chunks=[],
        )

    @torch.inference_mode()
    def eager(self, batch: Batch) -> torch.Tensor:
        """Hidden states as without graphs; the cache is as before afterwards."""
        with self.unchanged():
            self.cache.watch(len(batch.token_ids))
            embeds = self.decoder.embed(batch.token_ids)
            return self.decoder.forward(embeds, batch.positions, None, batch.attention)

    @torch.inference_mode()
    def replayed(self, batch: Batch) -> torch.Tensor:
        """Hidden states by the graph that fits."""
        size = self.graphs.fit(batch)
        assert size is not None, "no graph fits"
        return self.graphs.replay(size, batch)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """What is written to the cache meanwhile is taken back."""
        before = [tensor.clone() for tensor in self.tensors]
        try:
            yield
        finally:
            for tensor, saved in zip(self.tensors, before, strict=True):
                tensor.copy_(saved)

    def others(self, batch: Batch) -> list[int]:
        """Blocks that are none of this step's sequences', without the spare one."""
        kept = set(batch.attention.decode_tables.flatten().tolist())
        if batch.attention.cross is not None:
            kept |= set(batch.attention.cross.decode_tables.flatten().tolist())
        return [block for block in range(self.num_blocks) if block not in kept]

    def poison_others(self, batch: Batch) -> None:
        """NaN in every block that is none of this step's sequences', the spare one included."""
        for tensor in self.tensors:
            tensor[[*self.others(batch), self.num_blocks]] = NAN

    def others_are_poison(self, batch: Batch) -> bool:
        """Nothing was written to other requests' blocks since."""
        return all(bool(tensor[self.others(batch)].isnan().all()) for tensor in self.tensors)

    @torch.inference_mode()
    def poison_buffers(self) -> None:
        """Leaves nothing in the static buffers that a step could use."""
        for buffers, _ in self.graphs._graphs.values():
            for buffer in buffers.values.values():
                buffer.fill_(NOWHERE)
            buffers.hidden.fill_(NAN)
            buffers.finite.fill_(False)


def _tables(tables: Sequence[Sequence[int]]) -> torch.Tensor:
    """[D, blocks], each padded with its own first block."""
    longest = max(map(len, tables))
    return torch.tensor([[*table, *([table[0]] * (longest - len(table)))] for table in tables])
