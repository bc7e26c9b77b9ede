"""States of recurrent layers, as the layers of transformers ask a cache for them.

A layer gets its states, and either changes them in place or puts new ones in their place. Both kinds of
object here stand where transformers has its cache: keys and values pass through them unchanged.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from triptych.base.errors import ConfigError

#: (kind, layer, index): "conv" or "recurrent", the layer's number, and its state's among those of a kind.
StateKey = tuple[str, int, int]
#: Values of `layer_types` whose layers keep such states.
RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "mamba", "hybrid"})


@dataclass(frozen=True, slots=True)
class StateShape:
    """Size and type of one state of one sequence."""

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Cache:
    """What layers ask of a cache beside their states."""

    def is_recording_past(self, layer_idx: int) -> bool:
        """Nothing is ever taken back."""
        return False

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention layers keep theirs in KV blocks."""
        return key, value


class RecurrentStates(_Cache):
    """The states of a batch of sequences, in their slots of a pool: [slots, ...] by key.

    Sequences of one token each share a batch; a longer chunk is one of its own. States whose slots do not
    follow one another are gathered, one layer at a time, and written back by `flush`.
    """

    def __init__(self, pool: dict[StateKey, torch.Tensor], slots: Sequence[int]) -> None:
        self._pool = pool
        self._slots = slots
        self._adjacent = list(slots) == list(range(slots[0], slots[0] + len(slots)))
        self._index: torch.Tensor | None = None
        #: The gathered states of the layer that asked last.
        self._gathered: dict[StateKey, torch.Tensor] = {}

    @property
    def num_sequences(self) -> int:
        return len(self._slots)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        return self._get(("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        return self._get(("recurrent", layer_idx, state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """The inputs before the new ones and these; the last of them are the next state."""
        state = self._get(("conv", layer_idx, state_idx))
        inputs = torch.cat([state.to(conv_states.dtype), conv_states], dim=-1)
        state.copy_(inputs[..., -state.shape[-1] :])
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        return self._get(("recurrent", layer_idx, state_idx)).copy_(recurrent_states)

    def flush(self) -> None:
        """Writes gathered states back to their slots; called once more when all layers have run."""
        for key, state in self._gathered.items():
            self._pool[key].index_copy_(0, self._indices(state.device), state)
        self._gathered.clear()

    def _get(self, key: StateKey) -> torch.Tensor:
        states = self._pool[key]
        if self._adjacent:
            return states.narrow(0, self._slots[0], len(self._slots))
        if key not in self._gathered:
            if any(layer != key[1] for _, layer, _ in self._gathered):
                self.flush()
            self._gathered[key] = states.index_select(0, self._indices(states.device))
        return self._gathered[key]

    def _indices(self, device: torch.device) -> torch.Tensor:
        if self._index is None:
            self._index = torch.tensor(self._slots, device=device)
        return self._index


class StateRecorder(_Cache):
    """Stands for the states of one new sequence, and notes what the layers ask for."""

    def __init__(self) -> None:
        self.shapes: dict[StateKey, StateShape] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        missing = (conv_kernel_size or conv_states.shape[-1]) - conv_states.shape[-1]
        inputs = functional.pad(conv_states, (max(0, missing), 0))
        self._note(("conv", layer_idx, state_idx), inputs[..., -(conv_kernel_size or inputs.shape[-1]) :])
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        self._note(("recurrent", layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def _note(self, key: StateKey, state: torch.Tensor) -> None:
        self.shapes[key] = StateShape(key, tuple(state.shape[1:]), state.dtype)


def learn_states(run: Callable[[StateRecorder], object], layers: Collection[int]) -> tuple[StateShape, ...]:
    """The states of one sequence, from `run`, which computes a few tokens of one with the recorder.

    ConfigError where one of these `layers` asked for none: it would be computed as if nothing came before.
    """
    recorder = StateRecorder()
    run(recorder)
    if silent := sorted(set(layers) - {layer for _, layer, _ in recorder.shapes}):
        raise ConfigError(
            f"recurrent layers {silent} do not keep their state in the cache that they are given: this "
            "architecture cannot be served with the installed transformers"
        )
    return tuple(recorder.shapes.values())


def cache_keyword(forward: Callable[..., object]) -> str:
    """The keyword by which a decoder's `forward` takes its cache; ConfigError for one without.

    It was renamed in transformers 5.24, and a keyword that a forward does not know is ignored without a word.
    """
    names = inspect.signature(forward).parameters
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    raise ConfigError("the decoder's forward takes no cache: its recurrent layers cannot be served")
