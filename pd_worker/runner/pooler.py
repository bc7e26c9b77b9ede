"""The pooler: from the hidden states of a request's chunks to vectors, or to a score."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from triptych.pd_worker.core.outputs import ScheduledChunk
from triptych.pd_worker.core.request import PooledRows
from triptych.pd_worker.core.sampling import Pooling

#: Gives a vector of each hidden state: a retriever's head.
Project = Callable[[torch.Tensor], torch.Tensor]


def add_chunk(chunk: ScheduledChunk, hidden: torch.Tensor, project: Project) -> torch.Tensor | None:
    """The request's vector [hidden_size], or [tokens, width], in float32, where the chunk is its last one.

    `hidden` [chunk tokens, hidden_size] counts once, however often the chunk is computed.
    """
    state = chunk.state
    pooling = state.request.pooling
    assert pooling is not None
    if pooling.of_tokens:
        return _add_tokens(chunk, hidden, project)
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


def _add_tokens(chunk: ScheduledChunk, hidden: torch.Tensor, project: Project) -> torch.Tensor | None:
    """Kept in host memory: the device's is not reckoned with them."""
    kept = chunk.state.pooled_rows
    known = 0 if kept is None else kept.count
    if chunk.end > known:
        rows = project(hidden[max(0, known - chunk.start) :]).float().cpu()
        kept = PooledRows(rows if kept is None else torch.cat([kept.value, rows]), chunk.end)
        chunk.state.pooled_rows = kept
    return kept.value if chunk.pools and kept is not None else None


def add_chunks(chunks: Sequence[ScheduledChunk], hidden: torch.Tensor, project: Project) -> dict[int, bytes]:
    """The vectors that are complete, by `id` of their chunks; `hidden` [T, hidden_size] is the batch's."""
    done: list[tuple[ScheduledChunk, torch.Tensor]] = []
    first = 0
    for chunk in chunks:
        last = first + chunk.count
        pooling = chunk.state.request.pooling
        if pooling is not None and not pooling.scores:
            vector = add_chunk(chunk, hidden[first:last], project)
            if vector is not None:
                done.append((chunk, vector))
        first = last
    singles = [(chunk, vector) for chunk, vector in done if vector.dim() == 1]
    several = [(chunk, vectors) for chunk, vectors in done if vectors.dim() > 1]
    if singles:
        together = torch.stack([vector for _, vector in singles]).cpu()
        several += [(chunk, row) for (chunk, _), row in zip(singles, together, strict=True)]
    return {id(chunk): finish(rows, chunk.state.request.pooling or Pooling()) for chunk, rows in several}


def finish(vectors: torch.Tensor, pooling: Pooling) -> bytes:
    """One vector or several as little-endian float32: first cut, then each brought to a length of 1.

    Where there is a query, their MaxSim with its vectors.
    """
    if pooling.dimensions:
        vectors = vectors[..., : pooling.dimensions]
    if pooling.normalize:
        vectors = torch.nn.functional.normalize(vectors, dim=-1)
    if pooling.query:
        query = np.frombuffer(pooling.query, "<f4").astype(np.float32).reshape(-1, vectors.shape[-1])
        vectors = max_sim(torch.from_numpy(query), vectors)[None]
    return vectors.numpy().astype("<f4").tobytes()


def max_sim(query: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
    """The score of two [tokens, width]: each token of the query counts by the document's nearest one."""
    # In pieces: the products of two long texts would take gigabytes.
    return torch.stack([(part @ document.T).amax(1).sum() for part in query.split(256)]).sum()


def score(logits: torch.Tensor, pooling: Pooling) -> bytes:
    """The score, 0 to 1, of a last token's logits, or of the outputs of a class's own head."""
    row = logits.float().cpu()
    if not pooling.score_ids:
        value = row[0]
    else:
        yes, *no = pooling.score_ids
        value = row[yes] - (row[no[0]] if no else 0.0)
    return torch.sigmoid(value)[None].numpy().astype("<f4").tobytes()
