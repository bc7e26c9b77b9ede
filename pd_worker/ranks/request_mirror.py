"""Requests as a rank other than 0 knows them, from the messages of steps, and the steps made of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from triptych.base.ranks.channel import Message
from triptych.base.types import ItemPlan, MMFeature, Placement
from triptych.ec_connector.metadata import TransferMetadata
from triptych.pd_worker.core.kv_cache.block_pool import PrefixChain
from triptych.pd_worker.core.kv_cache.kv_cache_manager import BlockCopy
from triptych.pd_worker.core.outputs import GatheredRows, Projection, ScheduledChunk, SchedulerOutput
from triptych.pd_worker.core.request import EngineRequest, RequestState
from triptych.pd_worker.core.sampling import NO_SAMPLING, NoText
from triptych.pd_worker.ranks.step_message import LAYOUT


class RequestMirror:
    """The requests that the messages so far have named, by number.

    Their states have what a model runner reads: tokens, positions, items and `restored_in`; all that the
    scheduler and the sampler read besides is empty.
    """

    def __init__(self, position_rows: int) -> None:
        self._position_rows = position_rows
        self._states: dict[int, RequestState] = {}
        self._tables: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._states)

    def apply(self, message: Message) -> SchedulerOutput:
        """The step of a message. ValueError or KeyError for one that does not follow those before it."""
        if message["layout"] != LAYOUT:
            raise ValueError(f"a step's message has layout {message['layout']}, not {LAYOUT}")
        for number in message["gone"]:
            del self._states[number], self._tables[number]
        for fields in message["new"]:
            self._add(*fields)
        step = int(message["step"])
        metadata = message["metadata"]
        return SchedulerOutput(
            step,
            chunks=[self._chunk(step, *fields) for fields in message["chunks"]],
            swap_out=_copies(message["swap_out"]),
            swap_in=_copies(message["swap_in"]),
            restored=message["restored"],
            projections=[Projection(key, rows, tuple(ids)) for key, rows, ids in message["projections"]],
            evicted=message["evicted"],
            ec_connector_metadata=None if metadata is None else TransferMetadata.from_bytes(metadata),
        )

    def _add(
        self,
        number: int,
        proxy_id: str,
        request_id: str,
        attempt: int,
        label: str,
        trace_id: str,
        prompt: bytes,
        positions: bytes,
        position_delta: int,
        features: Sequence[Any],
        both_ways: Sequence[Any],
        inputs: Sequence[Any],
    ) -> None:
        request = EngineRequest(
            request_id=request_id,
            attempt=attempt,
            proxy_id=proxy_id,
            arrival=0.0,
            deadline=0.0,
            prompt_token_ids=np.frombuffer(prompt, dtype="<i4").tolist(),
            features=tuple(_feature(plan, placement) for plan, placement in features),
            ready=frozenset(),
            positions=self._positions(positions),
            position_delta=position_delta,
            sampling=NO_SAMPLING,
            prefix_root=b"",
            output=NoText(),
            label=label,
            trace_id=trace_id,
            both_ways=_tuples(both_ways),
            inputs={name: _unpacked(*packed) for name, *packed in inputs},
        )
        if number in self._states:
            raise ValueError(f"request {number} is known already")
        self._states[number] = RequestState(request, PrefixChain(b"", (), (), (), 1))
        self._tables[number] = (), ()

    def _positions(self, packed: bytes) -> torch.Tensor:
        numbers = np.frombuffer(packed, dtype="<i4").astype(np.int64)
        return torch.from_numpy(numbers).view(self._position_rows, -1)

    def _chunk(
        self,
        step: int,
        number: int,
        start: int,
        count: int,
        samples: bool,
        restored: bool,
        kept: int,
        blocks: Sequence[int],
        tokens: Sequence[int],
        rows: Sequence[tuple[str, int, int, int]],
        cross: Sequence[int] | None,
        cross_length: int,
    ) -> ScheduledChunk:
        state = self._states[number]
        table, cross_table = self._tables[number]
        if kept > len(table):
            raise ValueError(f"request {number} has {len(table)} blocks here, not {kept}")
        table = (*table[:kept], *blocks)
        cross_table = cross_table if cross is None else tuple(cross)
        self._tables[number] = table, cross_table
        state.output_token_ids.extend(tokens)
        if start + count > state.num_tokens:
            raise ValueError(f"request {number} has {state.num_tokens} tokens here, not {start + count}")
        state.restored_in = step if restored else 0
        gathered = tuple(GatheredRows(*part) for part in rows)
        return ScheduledChunk(state, start, count, table, gathered, samples, cross_table, cross_length)


def _unpacked(dtype: str, shape: Sequence[int], data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(*shape)


def _copies(flat: Sequence[int]) -> list[BlockCopy]:
    return [BlockCopy(source, target) for source, target in zip(flat[::2], flat[1::2], strict=True)]


def _feature(plan: Sequence[Any], placement: Sequence[Any]) -> MMFeature:
    """Lists become tuples again: plans are compared and hashed."""
    return MMFeature(ItemPlan(*map(_tuples, plan)), Placement(*map(_tuples, placement)))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
