"""The state pool: tensors of the state slots of recurrent layers, and of those in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triptych.models.recurrent import RecurrentStates, StateKey, StateShape
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
        return RecurrentStates(self._slots, [chunk.slot for chunk in chunks])

    def end(self, chunks: Sequence[ScheduledChunk], states: RecurrentStates) -> None:
        """All layers have run: writes the states back, and the chunks' snapshots."""
        states.flush()
        kept = [StateCopy(chunk.slot, chunk.snapshot) for chunk in chunks if chunk.snapshot >= 0]
        _copy(self._slots, self._slots, kept)


def groups_of(chunks: Sequence[ScheduledChunk]) -> list[Sequence[ScheduledChunk]]:
    """A batch as recurrent layers can compute it: all chunks of one token, then each other by itself."""
    single = [chunk for chunk in chunks if chunk.count == 1]
    return [*([single] if single else []), *([chunk] for chunk in chunks if chunk.count > 1)]


def state_tensors(shapes: Sequence[StateShape], count: int, device: torch.device) -> _Tensors:
    """Zeros of `count` slots."""
    return {
        shape.key: torch.zeros((count, *shape.shape), dtype=shape.dtype, device=device) for shape in shapes
    }


def _copy(source: _Tensors, target: _Tensors, copies: Sequence[StateCopy]) -> None:
    for key, states in target.items():
        for copy in copies:
            states[copy.target].copy_(source[key][copy.source])
