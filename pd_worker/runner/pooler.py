"""The pooler: from the hidden states of a request's chunks to one vector, or from its logits to a score."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triptych.pd_worker.core.outputs import ScheduledChunk
from triptych.pd_worker.core.request import PooledRows
from triptych.pd_worker.core.sampling import Pooling


def add_chunk(chunk: ScheduledChunk, hidden: torch.Tensor) -> torch.Tensor | None:
    """The request's vector [hidden_size], in float32, where the chunk is its last one.

    `hidden` [chunk tokens, hidden_size] counts once, however often the chunk is computed.
    """
    state = chunk.state
    pooling = state.request.pooling
    assert pooling is not None
    if not pooling.reads_all_rows:
        return hidden[-1].float() if chunk.pools else None
    kept = state.pooled_rows
    if pooling.method == "cls":
        if kept is None:
            kept = PooledRows(hidden[0].to(torch.float32, copy=True), 1)
    else:
        known = 0 if kept is None else kept.count
        if chunk.end > known:
            total = hidden[max(0, known - chunk.start) :].sum(0, dtype=torch.float32)
            kept = PooledRows(total if kept is None else kept.value + total, chunk.end)
    state.pooled_rows = kept
    if not chunk.pools:
        return None
    assert kept is not None
    return kept.value / kept.count


def add_chunks(chunks: Sequence[ScheduledChunk], hidden: torch.Tensor) -> dict[int, bytes]:
    """The vectors that are complete, by `id` of their chunks; `hidden` [T, hidden_size] is the batch's."""
    done: list[tuple[ScheduledChunk, torch.Tensor]] = []
    first = 0
    for chunk in chunks:
        last = first + chunk.count
        pooling = chunk.state.request.pooling
        if pooling is not None and not pooling.scores:
            vector = add_chunk(chunk, hidden[first:last])
            if vector is not None:
                done.append((chunk, vector))
        first = last
    if not done:
        return {}
    rows = torch.stack([vector for _, vector in done]).cpu()
    return {
        id(chunk): finish(row, chunk.state.request.pooling or Pooling())
        for (chunk, _), row in zip(done, rows, strict=True)
    }


def finish(vector: torch.Tensor, pooling: Pooling) -> bytes:
    """The vector as little-endian float32: first cut, then brought to a length of 1."""
    if pooling.dimensions:
        vector = vector[: pooling.dimensions]
    if pooling.normalize:
        vector = torch.nn.functional.normalize(vector, dim=-1)
    return vector.numpy().astype("<f4").tobytes()


def score(logits: torch.Tensor, pooling: Pooling) -> bytes:
    """The score, 0 to 1, of a last token's logits, or of the outputs of a class's own head."""
    row = logits.float().cpu()
    if not pooling.score_ids:
        value = row[0]
    else:
        yes, *no = pooling.score_ids
        value = row[yes] - (row[no[0]] if no else 0.0)
    return torch.sigmoid(value)[None].numpy().astype("<f4").tobytes()
