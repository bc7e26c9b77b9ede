"""The interface of a tower that runs on buffers of fixed shape, as a CUDA graph needs it.

One tower call of an ordinary encoder takes tensors of the batch's sizes. A graph is captured once for a
budget of output rows and replayed on the same buffers, so everything that depends on the batch (positions,
segment bounds, window order) reaches it as the values of those buffers, computed before.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from triptych.models.base import PreparedItem

#: Fills `buffer[used:]`, the part of a buffer that the batch does not use, after `buffer[:used]` was written.
PaddingLogic = Callable[[torch.Tensor, int], None]


def pad_zeros(buffer: torch.Tensor, used: int) -> None:
    """Zeros."""
    buffer[used:].zero_()


def pad_repeat_last(buffer: torch.Tensor, used: int) -> None:
    """The last value again, as offsets of segments (cu_seqlens) need it: the segments after it are empty."""
    if used == 0:
        buffer.zero_()
    elif used < buffer.shape[0]:
        buffer[used:] = buffer[used - 1]


def pad_identity(buffer: torch.Tensor, used: int) -> None:
    """Each row's own index, as a permutation of all rows needs it: rows of padding stay where they are."""
    rows = torch.arange(used, buffer.shape[0], device=buffer.device, dtype=buffer.dtype)
    buffer[used:] = rows.view(-1, *(1 for _ in buffer.shape[1:]))


@dataclass(frozen=True, slots=True)
class EncoderCudaGraphConfig:
    """The buffers of one tower's graphs.

    `buffer_keys` name every tensor that the forward takes, `pixel_values` among them where the tower takes
    pixels; `padding_logics` say how a buffer's unused rows are filled, zeros where a key has none.
    `out_hidden_size` are the columns of an output row, those of deepstack levels included.

    Budgets count output rows. They are multiples of `token_multiple` (the rows of one item where the tower
    works item by item, 1 where items are packed), and `min_token_budget` is the smallest that pays.
    `max_token_budget` is the largest that a worker captures unasked; None: as large as its batches.
    """

    modalities: tuple[str, ...]
    buffer_keys: tuple[str, ...]
    out_hidden_size: int
    padding_logics: Mapping[str, PaddingLogic] = field(default_factory=dict)
    min_token_budget: int = 64
    token_multiple: int = 1
    max_token_budget: int | None = None

    def __post_init__(self) -> None:
        _check_names("modalities", self.modalities)
        _check_names("buffer_keys", self.buffer_keys)
        unknown = sorted(set(self.padding_logics) - set(self.buffer_keys))
        if unknown:
            raise ValueError(f"padding_logics: {unknown} are no buffer_keys ({list(self.buffer_keys)})")
        for name in ("out_hidden_size", "min_token_budget", "token_multiple"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")
        if self.min_token_budget % self.token_multiple:
            raise ValueError(
                f"min_token_budget: {self.min_token_budget} is no multiple of "
                f"token_multiple {self.token_multiple}"
            )
        if self.max_token_budget is not None and self.max_token_budget < self.min_token_budget:
            raise ValueError(
                f"max_token_budget: {self.max_token_budget} is below min_token_budget {self.min_token_budget}"
            )

    def padding(self, key: str) -> PaddingLogic:
        """How the unused rows of this buffer are filled."""
        return self.padding_logics.get(key, pad_zeros)


def _check_names(name: str, values: Sequence[str]) -> None:
    if not values:
        raise ValueError(f"{name}: at least one is needed")
    wrong = [value for value in values if not value.isidentifier()]
    if wrong:
        raise ValueError(f"{name}: {wrong} are no identifiers")
    if len(set(values)) != len(values):
        raise ValueError(f"{name}: {list(values)} has a name twice")


def padded_buffers(
    config: EncoderCudaGraphConfig,
    shapes: Mapping[str, tuple[Sequence[int], torch.dtype]],
    device: torch.device,
) -> EncoderCudaGraphCaptureInputs:
    """New buffers of these shapes that hold padding only: what most towers can be captured with."""
    values = {
        key: torch.empty(tuple(shape), dtype=dtype, device=device) for key, (shape, dtype) in shapes.items()
    }
    for key, buffer in values.items():
        config.padding(key)(buffer, 0)
    return EncoderCudaGraphCaptureInputs(values)


@dataclass(frozen=True, slots=True)
class EncoderCudaGraphCaptureInputs:
    """The buffers of one budget, whole and with values that the tower can compute with, on the device."""

    values: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class EncoderCudaGraphReplayBuffers:
    """The values of one batch, each at most as long as its buffer in dimension 0, equal in the others."""

    values: dict[str, torch.Tensor]


@runtime_checkable
class SupportsEncoderCudaGraph(Protocol):
    """An `EncoderSide` whose tower also runs on buffers of fixed shape. Families inherit from it explicitly.

    `token_budget` are the output rows of one call, `max_batch_size` its items, `max_frames_per_batch` the
    frames of all its items (a picture is one).
    """

    @abstractmethod
    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """The same at every call."""
        ...

    @abstractmethod
    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> EncoderCudaGraphCaptureInputs:
        """New buffers of one budget, none shared with another budget's.

        `dtype` is that of floating-point inputs of the tower.
        """
        ...

    @abstractmethod
    def prepare_encoder_cudagraph_replay_buffers(
        self, items: Sequence[PreparedItem], max_batch_size: int, max_frames_per_batch: int
    ) -> EncoderCudaGraphReplayBuffers:
        """The values of one batch that fits a budget; new tensors, on the CPU or the device."""
        ...

    @abstractmethod
    def encoder_cudagraph_forward(self, values: dict[str, torch.Tensor]) -> torch.Tensor:
        """Output rows [token_budget, out_hidden_size] of whole buffers; may change the dict, not its tensors.

        Takes nothing but these tensors, and its operations depend on their shapes only: no `item()`, no
        `tolist()`, no length of the batch. Rows of padding may hold anything, no row depends on them.
        """
        ...

    def encoder_cudagraph_item_frames(self, item: PreparedItem) -> int:
        """Frames of one item."""
        return 1

    def split_encoder_cudagraph_output(
        self, output: torch.Tensor, items: Sequence[PreparedItem]
    ) -> list[torch.Tensor]:
        """Each item's rows [item.rows, out_hidden_size], views of `output`; by default one after another."""
        return list(torch.split(output[: sum(item.rows for item in items)], [item.rows for item in items]))
