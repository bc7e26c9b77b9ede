"""The graph of one budget: its static buffers, and how a batch's values are written into them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from triptych.base.machine.graphs import CapturedGraph
from triptych.models.encoder_graph import EncoderCudaGraphConfig


@dataclass(frozen=True, slots=True)
class BudgetGraphMetadata:
    """A captured tower call over `token_budget` output rows, and the buffers that it reads and writes.

    It holds the buffers, whose addresses the graph knows: they live as long as it does.
    """

    token_budget: int
    max_batch_size: int
    max_frames_per_batch: int
    graph: CapturedGraph
    input_buffers: dict[str, torch.Tensor]
    output_buffer: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers; without what a graph's own pool holds."""
        return sum(tensor.nbytes for tensor in (*self.input_buffers.values(), self.output_buffer))


def check_keys(what: str, keys: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """ValueError, naming the keys, where the two do not have the same."""
    missing, extra = sorted(expected.keys() - keys.keys()), sorted(keys.keys() - expected.keys())
    if missing or extra:
        raise ValueError(f"{what}: missing {missing}, not expected {extra}")


def write_buffers(
    buffers: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor], config: EncoderCudaGraphConfig
) -> None:
    """Writes every buffer as a whole: the batch's value, then padding. ValueError for values that do not fit.

    Nothing is written before all values are checked. A buffer that was left out would keep another request's
    data, which the tower would compute with.
    """
    check_keys("values of a replay", values, buffers)
    for key, buffer in buffers.items():
        value = values[key]
        if value.shape[1:] != buffer.shape[1:] or len(value) > len(buffer):
            raise ValueError(
                f"{key}: values {tuple(value.shape)} do not fit the buffer {tuple(buffer.shape)}"
            )
        if value.is_floating_point() != buffer.is_floating_point():
            raise ValueError(f"{key}: values of {value.dtype} for a buffer of {buffer.dtype}")
    for key, buffer in buffers.items():
        used = len(values[key])
        buffer[:used].copy_(values[key])
        config.padding(key)(buffer, used)


def poison(buffers: Mapping[str, torch.Tensor]) -> None:
    """Fills buffers with what no computation survives: NaN, or an index far beyond any table. For tests."""
    for buffer in buffers.values():
        buffer.fill_(torch.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).max)
