"""The tensors of a step's batch: built as lists, then copied to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from triptych.base.machine.device import Device
from triptych.ec_connector.base import EncoderCacheMap
from triptych.ec_connector.int8_rows import rows_of
from triptych.models.base import DecoderSide, MergedEmbeds
from triptych.pd_worker.attention.metadata import (
    AttentionMetadata,
    CrossSpan,
    CrossTables,
    PagedKVCache,
    PrefillSpan,
)
from triptych.pd_worker.core.outputs import ScheduledChunk
from triptych.pd_worker.core.request import EngineRequest


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of the decoder for one step: `token_ids` [T] and `positions` [rows, T] of `chunks`, in order.

    `last` [N] are the batch indices of the tokens whose logits are sampled, in the order of `sampling`.
    `inputs` [T, ...] are further inputs of the decoder, where it takes some.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    merged: MergedEmbeds | None
    attention: AttentionMetadata
    last: torch.Tensor
    sampling: list[ScheduledChunk]
    chunks: list[ScheduledChunk]
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)


class BatchBuilder:
    """Builds batches for one device; on CUDA through pinned memory, without waiting for the copy."""

    def __init__(self, cache: PagedKVCache, decoder: DecoderSide, *, backend: str = "sdpa") -> None:
        self._cache = cache
        self._decoder = decoder
        self._rows = decoder.geometry.position_rows
        self._device = decoder.device
        self._dtype = decoder.dtype
        self._backend = backend

    def build(self, chunks: Sequence[ScheduledChunk], embeddings: EncoderCacheMap) -> Batch:
        """The batch of `chunks`: those of one token first."""
        decodes, others = in_batch_order(chunks)
        chunks = [*decodes, *others]
        tokens: list[int] = []
        slots: list[int] = []
        last: list[int] = []
        sampling: list[ScheduledChunk] = []
        firsts: list[int] = []
        for chunk in chunks:
            firsts.append(len(tokens))
            tokens.extend(chunk_tokens(chunk.state.request, chunk.start, chunk.end))
            slots.extend(self._slots(chunk))
            if chunk.samples:
                last.append(len(tokens) - 1)
                sampling.append(chunk)
        return Batch(
            token_ids=self._move(torch.tensor(tokens)),
            positions=self._move(self._positions(chunks)),
            merged=self._merged(chunks, firsts, embeddings),
            attention=self._attention(chunks, firsts, slots),
            last=self._move(torch.tensor(last, dtype=torch.int64)),
            sampling=sampling,
            chunks=chunks,
            inputs=self._inputs(chunks, tokens) if self._decoder.takes_inputs else {},
        )

    def _slots(self, chunk: ScheduledChunk) -> list[int]:
        size = self._cache.block_size
        return [chunk.block_ids[i // size] * size + i % size for i in range(chunk.start, chunk.end)]

    def _positions(self, chunks: Sequence[ScheduledChunk]) -> torch.Tensor:
        """Positions [rows, T] of the batch; consecutive decodes become one tensor."""
        parts: list[torch.Tensor] = []
        flat: list[int] = []
        for chunk in chunks:
            request = chunk.state.request
            prompt_end = min(chunk.end, request.num_prompt_tokens)
            if chunk.start < prompt_end:
                self._close(flat, parts)
                parts.append(request.positions[:, chunk.start : prompt_end])
            output = range(max(chunk.start, request.num_prompt_tokens), chunk.end)
            flat.extend(i + request.position_delta for i in output)
        self._close(flat, parts)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _inputs(self, chunks: Sequence[ScheduledChunk], tokens: Sequence[int]) -> dict[str, torch.Tensor]:
        """Further inputs of the batch: captured ones of prompts, and those of the tokens generated since."""
        parts: list[Mapping[str, torch.Tensor]] = []
        first = 0
        for chunk in chunks:
            request, last = chunk.state.request, first + chunk.count
            prompt_end = max(chunk.start, min(chunk.end, request.num_prompt_tokens))
            if chunk.start < prompt_end:
                parts.append({name: x[chunk.start : prompt_end] for name, x in request.inputs.items()})
            if prompt_end < chunk.end:
                parts.append(self._decoder.generated_inputs(tokens[last - (chunk.end - prompt_end) : last]))
            first = last
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _close(self, flat: list[int], parts: list[torch.Tensor]) -> None:
        if flat:
            parts.append(torch.tensor(flat).expand(self._rows, -1))
            flat.clear()

    def _merged(
        self, chunks: Sequence[ScheduledChunk], firsts: Sequence[int], embeddings: EncoderCacheMap
    ) -> MergedEmbeds | None:
        index: list[int] = []
        rows: list[torch.Tensor] = []
        for chunk, first in zip(chunks, firsts, strict=True):
            for part in sorted(chunk.rows, key=lambda gathered: gathered.at):
                index.extend(range(first + part.at, first + part.at + part.count))
                rows.append(rows_of(embeddings[part.mm_hash], part.first, part.count))
        if not rows:
            return None
        merged = torch.cat(rows).to(device=self._device, dtype=self._dtype)
        return MergedEmbeds(self._move(torch.tensor(index)), merged)

    def _attention(
        self, chunks: Sequence[ScheduledChunk], firsts: Sequence[int], slots: list[int]
    ) -> AttentionMetadata:
        decodes = [chunk for chunk in chunks if is_decode(chunk)]
        lengths = [chunk.end for chunk in decodes]
        prefills = [
            self._prefill(chunk, first)
            for chunk, first in zip(chunks, firsts, strict=True)
            if not is_decode(chunk)
        ]
        return AttentionMetadata(
            cache=self._cache,
            slots=self._move(torch.tensor(slots)),
            num_decodes=len(decodes),
            decode_tables=self._tables([chunk.block_ids for chunk in decodes]),
            decode_lengths=self._move(torch.tensor(lengths, dtype=torch.int64)),
            prefills=prefills,
            decode_blocks=[len(chunk.block_ids) for chunk in decodes],
            cross=self._cross(chunks, decodes) if any(chunk.cross_length for chunk in chunks) else None,
            bias=self._decoder.bias,
            layer_rules=self._decoder.layer_rules,
            backend=self._backend,
        )

    def _tables(self, tables: Sequence[Sequence[int]]) -> torch.Tensor:
        """Block tables [D, blocks].

        A row is padded with its own first block, never with another request's: masked keys are read too.
        """
        longest = max(map(len, tables), default=0)
        rows = [[*table, *([table[0]] * (longest - len(table)))] for table in tables]
        return self._move(torch.tensor(rows, dtype=torch.int64))

    def _cross(self, chunks: Sequence[ScheduledChunk], decodes: Sequence[ScheduledChunk]) -> CrossTables:
        lengths = [chunk.cross_length for chunk in decodes]
        return CrossTables(
            decode_tables=self._tables([chunk.cross_blocks for chunk in decodes]),
            decode_lengths=self._move(torch.tensor(lengths, dtype=torch.int64)),
            prefills=[
                CrossSpan(self._move(torch.tensor(chunk.cross_blocks)), chunk.cross_length)
                for chunk in chunks
                if not is_decode(chunk)
            ],
            decode_blocks=[len(chunk.cross_blocks) for chunk in decodes],
        )

    def _prefill(self, chunk: ScheduledChunk, first: int) -> PrefillSpan:
        atomic = tuple(chunk.state.spans)
        table = self._move(torch.tensor(chunk.block_ids))
        return PrefillSpan(first, first + chunk.count, chunk.start, table, atomic)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return Device.of(self._device).upload(tensor)


def in_batch_order(chunks: Sequence[ScheduledChunk]) -> tuple[list[ScheduledChunk], list[ScheduledChunk]]:
    """One-token chunks, those that share an encoder output side by side; and all others."""
    decodes = sorted(filter(is_decode, chunks), key=lambda chunk: chunk.cross_blocks)
    return decodes, [chunk for chunk in chunks if not is_decode(chunk)]


def is_decode(chunk: ScheduledChunk) -> bool:
    """One token that attends to what is before it. A span's last token alone attends as the span does."""
    return chunk.count == 1 and not any(first <= chunk.start < last for first, last in chunk.state.spans)


def chunk_tokens(request: EngineRequest, start: int, end: int) -> list[int]:
    """Tokens [start, end) of prompt plus output."""
    prompt = request.num_prompt_tokens
    tokens = list(request.prompt_token_ids[start:end])
    if end > prompt:
        tokens.extend(request.output_token_ids[max(0, start - prompt) : end - prompt])
    return tokens


def batch_digest(chunks: Sequence[ScheduledChunk]) -> int:
    """A digest of a batch: tokens, blocks and order. Equal in all processes of one release."""
    # Of numbers alone: the hash of a text differs between processes.
    return hash(
        tuple(
            (
                chunk.start,
                chunk.block_ids,
                chunk.cross_blocks,
                tuple(chunk_tokens(chunk.state.request, chunk.start, chunk.end)),
            )
            for chunk in chunks
        )
    )
