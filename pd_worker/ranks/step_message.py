"""A step as a message to the other ranks: plain values of msgpack, deltas to what they know already.

A request's prompt, positions and items are sent with its first chunk, and later its new tokens and blocks.
Nothing that only the sampler reads is sent: rank 0 alone samples, and its tokens travel with the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import numpy as np
import torch

from triptych.base.ranks.channel import Message
from triptych.base.types import MMFeature
from triptych.ec_connector.base import ECConnectorOutput, FailedLoad
from triptych.pd_worker.core.kv_cache.kv_cache_manager import BlockCopy
from triptych.pd_worker.core.outputs import ModelRunnerOutput, ScheduledChunk, SchedulerOutput
from triptych.pd_worker.core.request import EngineRequest, RequestState, RequestStatus

#: Version of the messages' fields; both sides are processes of one worker, and of one release.
LAYOUT = 3


@dataclass(slots=True)
class _Known:
    """The state of a request that the ranks already have."""

    number: int
    num_output_tokens: int = 0
    block_ids: tuple[int, ...] = ()
    cross_blocks: tuple[int, ...] = ()


class StepEncoder:
    """The messages of one engine's steps, in their order; every rank gets every message."""

    def __init__(self) -> None:
        self._known: dict[RequestState, _Known] = {}
        self._numbers = 0

    def __len__(self) -> int:
        """Requests that the ranks know."""
        return len(self._known)

    def encode(self, output: SchedulerOutput) -> Message:
        """The step's message. Call it once per step: it counts as sent."""
        finished = [state for state in self._known if state.status is RequestStatus.FINISHED]
        gone = [self._known.pop(state).number for state in finished]
        new = [self._introduce(c.state) for c in output.chunks if c.state not in self._known]
        metadata = output.ec_connector_metadata
        return {
            "layout": LAYOUT,
            "step": output.step,
            "gone": gone,
            "new": new,
            "chunks": [self._chunk(chunk, output.step) for chunk in output.chunks],
            "swap_out": _flat(output.swap_out),
            "swap_in": _flat(output.swap_in),
            "restored": output.restored,
            "projections": [astuple(projection) for projection in output.projections],
            "evicted": output.evicted,
            "metadata": None if metadata is None else metadata.to_bytes(),
        }

    def _introduce(self, state: RequestState) -> list[object]:
        """The parts of a request that never change, and the number by which chunks name it."""
        self._numbers += 1
        self._known[state] = _Known(self._numbers)
        request = state.request
        return [
            self._numbers,
            request.proxy_id,
            request.request_id,
            request.attempt,
            request.label,
            request.trace_id,
            np.asarray(request.prompt_token_ids, dtype="<i4").tobytes(),
            _packed_positions(request),
            request.position_delta,
            [_feature(feature) for feature in state.features],
            request.both_ways,
            [(name, *_packed(tensor)) for name, tensor in request.inputs.items()],
        ]

    def _chunk(self, chunk: ScheduledChunk, step: int) -> list[object]:
        state, known = chunk.state, self._known[chunk.state]
        kept = _common(known.block_ids, chunk.block_ids)
        known.block_ids = chunk.block_ids
        end = max(chunk.end - state.num_prompt_tokens, known.num_output_tokens)
        tokens = state.output_token_ids[known.num_output_tokens : end]
        known.num_output_tokens += len(tokens)
        cross = None if chunk.cross_blocks == known.cross_blocks else list(chunk.cross_blocks)
        known.cross_blocks = chunk.cross_blocks
        return [
            known.number,
            chunk.start,
            chunk.count,
            chunk.samples,
            state.restored_in == step,
            kept,
            list(chunk.block_ids[kept:]),
            tokens,
            [(part.mm_hash, part.first, part.count, part.at) for part in chunk.rows],
            cross,
            chunk.cross_length,
        ]


def _common(known: Sequence[int], table: Sequence[int]) -> int:
    """How many blocks at the front of `table` are the known ones. Tables mostly grow at their end."""
    if table[: len(known)] == known:
        return len(known)
    pairs = enumerate(zip(known, table, strict=False))
    return next((index for index, (old, new) in pairs if old != new), min(len(known), len(table)))


def _flat(copies: Sequence[BlockCopy]) -> list[int]:
    return [block for copy in copies for block in (copy.source, copy.target)]


def _packed(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """Its dtype, its shape and its bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy().tobytes()


def _packed_positions(request: EngineRequest) -> bytes:
    """Positions [position_rows, prompt tokens], row by row; they are far below 2^31."""
    return bytes(request.positions.to(torch.int32).contiguous().numpy().tobytes())


def _feature(feature: MMFeature) -> tuple[object, object]:
    return astuple(feature.plan), astuple(feature.placement)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What rank 0 has to know of another rank's step; no tokens, since only rank 0 samples."""

    step: int
    swapped_out: bool
    swapped_in: bool
    unprojected: frozenset[str] = frozenset()
    #: Indices of computed chunks, as in ModelRunnerOutput.
    non_finite: frozenset[int] = frozenset()
    #: Digest of the batch that the rank computed: all ranks must have computed the same.
    batch_digest: int = 0
    transfers: ECConnectorOutput = field(default_factory=ECConnectorOutput)


def report_of(step: int, output: ModelRunnerOutput) -> Message:
    """The report of a rank whose step gave `output`."""
    moved = output.ec_connector_output
    return {
        "step": step,
        "swapped_out": output.swapped_out,
        "swapped_in": output.swapped_in,
        "unprojected": sorted(output.unprojected),
        "non_finite": sorted(output.non_finite),
        "batch_digest": output.batch_digest,
        "fetched": moved.fetched,
        "loaded": moved.loaded,
        "failed": list(map(astuple, moved.failed)),
        "generations": moved.generations,
    }


def read_report(message: Message) -> StepReport:
    """The report in a message; KeyError for another message."""
    failed: Sequence[tuple[str, str, str, bool]] = message["failed"]
    return StepReport(
        step=message["step"],
        swapped_out=message["swapped_out"],
        swapped_in=message["swapped_in"],
        unprojected=frozenset(message["unprojected"]),
        non_finite=frozenset(message["non_finite"]),
        batch_digest=message["batch_digest"],
        transfers=ECConnectorOutput(
            fetched=message["fetched"],
            loaded=message["loaded"],
            failed=[FailedLoad(*failure) for failure in failed],
            generations=message["generations"],
        ),
    )
