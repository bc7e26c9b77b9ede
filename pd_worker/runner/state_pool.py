"""The state pool: tensors of the state slots of recurrent layers, and of those in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from msgspec.structs import replace

from triptych.models.recurrent import RecurrentStates, StateKey, StateShape
from triptych.pd_worker.core.chunks import gather_rows
from triptych.pd_worker.core.kv_cache.state_slots import StateCopy
from triptych.pd_worker.core.outputs import ScheduledChunk

_Tensors = dict[StateKey, torch.Tensor]


class StatePool:
    """`num_slots` slots on the device, those of snapshots among them, and `num_host_slots` in host memory."""

    def __init__(
        self, shapes: Sequence[StateShape], num_slots: int, num_host_slots: int, device: torch.device
    ) -> None:
        self._slots = state_tensors(shapes, num_slots, device)
        self._host = state_tensors(shapes, num_host_slots, torch.device("cpu"))

    def swap_out(self, copies: Sequence[StateCopy]) -> None:
        """Slots to host slots."""
        _copy(self._slots, self._host, copies)

    def swap_in(self, copies: Sequence[StateCopy]) -> None:
        """Host slots to slots."""
        _copy(self._host, self._slots, copies)

    def restore(self, copies: Sequence[StateCopy]) -> None:
        """Snapshots to slots."""
        _copy(self._slots, self._slots, copies)

    def read(self, slot: int) -> torch.Tensor:
        """A slot's states, one after the other, as uint8 [bytes] on the device."""
        return torch.cat(
            [states[slot].contiguous().view(-1).view(torch.uint8) for states in self._slots.values()]
        )

    def write(self, slot: int, content: torch.Tensor) -> None:
        """What `read` gave, from the same device."""
        start = 0
        for states in self._slots.values():
            end = start + states[slot].numel() * states.element_size()
            states[slot].copy_(content[start:end].clone().view(states.dtype).view(states[slot].shape))
            start = end

    def begin(self, chunks: Sequence[ScheduledChunk]) -> RecurrentStates:
        """The states of these chunks: all of one token, or a single one. Those of first tokens are zeros."""
        for chunk in chunks:
            if chunk.start == 0:
                for states in self._slots.values():
                    states[chunk.slot].zero_()
        kept = [(at - chunk.start, to) for chunk in chunks for at, to in chunk.snapshots if at < chunk.end]
        return RecurrentStates(self._slots, [chunk.slot for chunk in chunks], kept)

    def end(self, chunks: Sequence[ScheduledChunk], states: RecurrentStates) -> None:
        """All layers have run: writes the states back, and the snapshots where chunks end."""
        states.flush()
        states.check_kept()
        ends = [(chunk.slot, to) for chunk in chunks for at, to in chunk.snapshots if at == chunk.end]
        _copy(self._slots, self._slots, [StateCopy(*end) for end in ends])


def groups_of(chunks: Sequence[ScheduledChunk], *, in_pieces: bool) -> list[Sequence[ScheduledChunk]]:
    """A batch as recurrent layers can compute it: all chunks of one token, then each other by itself.

    Unless the layers compute a chunk `in_pieces` that end at its snapshots, it is several here.
    """
    single = [chunk for chunk in chunks if chunk.count == 1]
    longer = [chunk for chunk in chunks if chunk.count > 1]
    parts = longer if in_pieces else [part for chunk in longer for part in _pieces_of(chunk)]
    return [*([single] if single else []), *([part] for part in parts)]


def _pieces_of(chunk: ScheduledChunk) -> Iterator[ScheduledChunk]:
    start = chunk.start
    for end in sorted({*chunk.kept_at, chunk.end}):
        rows = gather_rows(chunk.state, start, end) if chunk.rows else ()
        kept = tuple((at, to) for at, to in chunk.snapshots if at == end)
        yield replace(chunk, start=start, count=end - start, rows=rows, snapshots=kept)
        start = end


def state_tensors(shapes: Sequence[StateShape], count: int, device: torch.device) -> _Tensors:
    """Zeros of `count` slots, which are written at once: the first snapshots wait for no pages."""
    return {
        shape.key: torch.zeros((count, *shape.shape), dtype=shape.dtype, device=device) for shape in shapes
    }


def _copy(source: _Tensors, target: _Tensors, copies: Sequence[StateCopy]) -> None:
    for key, states in target.items():
        for copy in copies:
            states[copy.target].copy_(source[key][copy.source])
