"""What a model runner reads of a step, as plain values that two processes' steps can be compared by."""

from __future__ import annotations

from typing import Any

from triptych.pd_worker.core.outputs import ScheduledChunk, SchedulerOutput
from triptych.pd_worker.runner.batch import batch_digest, chunk_tokens, in_batch_order


def step_view(output: SchedulerOutput) -> dict[str, Any]:
    """All that a runner reads of a step, but for what only rank 0's sampler reads."""
    metadata = output.ec_connector_metadata
    decodes, others = in_batch_order(output.chunks)
    return {
        "step": output.step,
        "chunks": [chunk_view(chunk) for chunk in output.chunks],
        "digest": batch_digest([*decodes, *others]),
        "if swapping in fails": [chunk.state.request_id for chunk in output.computable(swapped_in=False)],
        "swap_out": list(output.swap_out),
        "swap_in": list(output.swap_in),
        "restored": list(output.restored),
        "projections": list(output.projections),
        "evicted": list(output.evicted),
        "metadata": metadata,
    }


def chunk_view(chunk: ScheduledChunk) -> dict[str, Any]:
    request = chunk.state.request
    prompt_end = min(chunk.end, request.num_prompt_tokens)
    return {
        "request": (*request.key, request.attempt, request.name, request.num_prompt_tokens),
        "span": (chunk.start, chunk.count, chunk.samples),
        "tokens": chunk_tokens(request, chunk.start, chunk.end),
        "positions": request.positions[:, chunk.start : prompt_end].tolist(),
        "delta": request.position_delta,
        "blocks": chunk.block_ids,
        "rows": chunk.rows,
        "cross": (chunk.cross_blocks, chunk.cross_length),
        "features": chunk.state.features,
    }
