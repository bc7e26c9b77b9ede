"""States of recurrent layers, as the layers of transformers ask a cache for them.

A layer gets its states, and either changes them in place or puts new ones in their place. Both kinds of
object here stand where transformers has its cache: keys and values pass through them unchanged.

States are kept inside a chunk, too: inputs of a convolution are at hand, and functions that go along a
sequence are called once for each part of it.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from triptych.base.errors import ConfigError, InternalError

#: (kind, layer, index): "conv" or "recurrent", the layer's number, and its state's among those of a kind.
StateKey = tuple[str, int, int]
#: Values of `layer_types` whose layers keep such states.
RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "mamba", "hybrid"})
#: Functions in files of transformers' models that compute a state along a sequence: their arguments
#: [B, T, ...], and the one that is the state before. They give the output [B, T, ...] and the state behind.
_ALONG = {
    "torch_chunk_gated_delta_rule": (("query", "key", "value", "g", "beta"), "initial_state"),
    "mamba2_chunk_scan": (("hidden_states", "dt", "B", "C"), "initial_states"),
}
#: A thread's states that a layer has asked for and not given back, where such a function is to keep some.
_asked = threading.local()


@dataclass(frozen=True, slots=True)
class StateShape:
    """Size and type of one state of one sequence."""

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype
    #: It can be kept inside a chunk.
    inside: bool = True

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


#: Computes tokens [start, end) of a chunk behind a state, None: the one that the layer has given.
_Along = Callable[[int, int | None, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


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

    def __init__(
        self,
        pool: dict[StateKey, torch.Tensor],
        slots: Sequence[int],
        kept: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`kept`, for one sequence: pairs (n, slot); the state after n tokens is copied there."""
        self._pool = pool
        self._slots = slots
        self._kept = kept
        #: The states of which that is done.
        self._done: set[StateKey] = set()
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
        key = ("recurrent", layer_idx, state_idx)
        _asked.states = (self, key) if self._kept else None
        return self._get(key)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """The inputs before the new ones and these; the last of them are the next state."""
        key = ("conv", layer_idx, state_idx)
        state = self._get(key)
        inputs = torch.cat([state.to(conv_states.dtype), conv_states], dim=-1)
        state.copy_(inputs[..., -state.shape[-1] :])
        for at, slot in self._kept:
            self._pool[key][slot].copy_(inputs[0, ..., at : at + state.shape[-1]])
        self._done.add(key)
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        _asked.states = None
        return self._get(("recurrent", layer_idx, state_idx)).copy_(recurrent_states)

    def along(self, key: StateKey, compute: _Along) -> tuple[torch.Tensor, torch.Tensor]:
        """What `compute` gives for the chunk, in parts that end where the state is kept."""
        parts, start, state = [], 0, None
        for at, slot in self._kept:
            part, state = compute(start, at, state)
            self._pool[key][slot].copy_(state[0])
            parts.append(part)
            start = at
        part, state = compute(start, None, state)
        self._done.add(key)
        return torch.cat([*parts, part], dim=1), state

    def check_kept(self) -> None:
        """InternalError where a layer has not kept its states inside the chunk."""
        if self._kept and self._done != self._pool.keys():
            raise InternalError(f"states of {sorted(self._pool.keys() - self._done)} are not kept in a chunk")

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
        self._inside: set[StateKey] = set()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        _asked.states = (self, ("recurrent", layer_idx, state_idx))

    def along(self, key: StateKey, compute: _Along) -> tuple[torch.Tensor, torch.Tensor]:
        self._inside.add(key)
        return compute(0, None, None)

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
        self._inside.add(("conv", layer_idx, state_idx))
        self._note(("conv", layer_idx, state_idx), inputs[..., -(conv_kernel_size or inputs.shape[-1]) :])
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        _asked.states = None
        self._note(("recurrent", layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def _note(self, key: StateKey, state: torch.Tensor) -> None:
        self.shapes[key] = StateShape(key, tuple(state.shape[1:]), state.dtype, key in self._inside)


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


def keep_inside(decoder: nn.Module) -> None:
    """Lets the decoder's layers keep states inside a chunk, and those of all other decoders of its classes.

    Idempotent.
    """
    for file in {type(module).__module__ for module in decoder.modules()}:
        names = vars(sys.modules[file])
        for name in _ALONG.keys() & names.keys():
            each_token, before = _ALONG[name]
            known = inspect.signature(names[name]).parameters.keys() >= {*each_token, before, "chunk_size"}
            if known and not hasattr(names[name], "keeps_inside"):
                names[name] = _keeping(names[name], each_token, before)


def _keeping(compute: Callable[..., Any], each_token: Sequence[str], before: str) -> Callable[..., Any]:
    parameters = inspect.signature(compute).parameters
    places, size = tuple(parameters), parameters["chunk_size"].default
    # Without a default it is the model's own.
    size = size if isinstance(size, int) else 0

    @functools.wraps(compute)
    def keeping(*given: Any, **named: Any) -> Any:
        asked = getattr(_asked, "states", None)
        if asked is None:
            return compute(*given, **named)
        # A second function would compute another state.
        (states, key), _asked.states = asked, None
        named |= zip(places, given, strict=False)
        return states.along(key, _Call(compute, named, each_token, before, size))

    keeping.keeps_inside = True  # type: ignore[attr-defined]
    return keeping


@dataclass(frozen=True, slots=True)
class _Call:
    """A layer's call of such a function, for any part of its tokens."""

    compute: Callable[..., Any]
    named: Mapping[str, Any]
    each_token: Sequence[str]
    before: str
    #: How many tokens are computed together, the last ones filled with zeros; 0: not to be changed.
    size: int

    def __call__(
        self, start: int, end: int | None, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = dict(self.named)
        for name in self.each_token:
            given[name] = given[name][:, start:end]
        if state is not None:
            given[self.before] = state
        tokens = given[self.each_token[0]]
        size = max(16, 1 << (tokens.shape[1] - 1).bit_length())
        if size < self.size and tokens.device.type == "cpu":
            given["chunk_size"] = size
        result: tuple[torch.Tensor, torch.Tensor] = self.compute(**given)
        return result


def cache_keyword(forward: Callable[..., object]) -> str:
    """The keyword by which a decoder's `forward` takes its cache; ConfigError for one without.

    It was renamed in transformers 5.24, and a keyword that a forward does not know is ignored without a word.
    """
    names = inspect.signature(forward).parameters
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    raise ConfigError("the decoder's forward takes no cache: its recurrent layers cannot be served")
