"""Every family's tower on buffers of fixed shape, without a graph: keys, shapes, what is traced, and rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from support.encoder_graphs.adapters import ADAPTERS, Adapter
from support.matrix import matrix
from triptych.models.base import EncoderSide
from triptych.models.encoder_graph import EncoderCudaGraphReplayBuffers, SupportsEncoderCudaGraph
from triptych.models.registry import FAMILIES

CPU = torch.device("cpu")
EVERY = pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
#: A picture's, a text's and a sound's tower first.
TRACED = sorted(ADAPTERS, key=lambda adapter: adapter.name not in ("llava", "bart", "whisper"))
#: Operations whose result depends on values, not on shapes: a captured graph cannot have them.
BY_VALUE = ("_local_scalar_dense", "nonzero", "item", "masked_select", "unique", "repeat_interleave.Tensor")


def supporting(adapter: Adapter) -> Any:
    """The adapter's encoder, as both of the interfaces that it has."""
    encoder = adapter.open()
    assert isinstance(encoder, EncoderSide) and isinstance(encoder, SupportsEncoderCudaGraph)
    return encoder


def budget_for(encoder: Any, rows: int) -> int:
    """The least budget that holds so many rows."""
    config = encoder.get_encoder_cudagraph_config()
    return max(config.min_token_budget, -(-rows // config.token_multiple) * config.token_multiple)


def captured(encoder: Any, budget: int, items: int) -> dict[str, torch.Tensor]:
    inputs = encoder.prepare_encoder_cudagraph_capture_inputs(budget, items, items, CPU, encoder.dtype)
    values: dict[str, torch.Tensor] = inputs.values
    return values


def filled(
    encoder: Any, buffers: dict[str, torch.Tensor], replay: EncoderCudaGraphReplayBuffers
) -> dict[str, torch.Tensor]:
    """The buffers with one batch's values, and padding behind them."""
    config = encoder.get_encoder_cudagraph_config()
    for key, buffer in buffers.items():
        used = replay.values[key].shape[0]
        buffer[:used] = replay.values[key]
        config.padding(key)(buffer, used)
    return dict(buffers)


class Traced(nn.Module):
    """What is captured: a function of tensors only."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder, self.tower = encoder, encoder.module

    def forward(self, values: dict[str, torch.Tensor]) -> torch.Tensor:
        rows: torch.Tensor = self.encoder.encoder_cudagraph_forward(dict(values))
        return rows


def test_every_family_of_the_registry_has_an_adapter_under_test() -> None:
    assert {family.name for family in FAMILIES} == {adapter.name for adapter in ADAPTERS} - {"two_towers"}
    for family in FAMILIES:
        assert issubclass(family.encoder, SupportsEncoderCudaGraph), family.title


@EVERY
def test_keys_of_config_capture_and_replay_are_the_same(adapter: Adapter) -> None:
    encoder = supporting(adapter)
    items = adapter.items(encoder, 3)
    budget = budget_for(encoder, sum(item.rows for item in items))
    config = encoder.get_encoder_cudagraph_config()
    buffers = captured(encoder, budget, 3)
    replay = encoder.prepare_encoder_cudagraph_replay_buffers(items, 3, 3).values
    assert list(config.buffer_keys) == list(buffers) == list(replay)
    assert config.out_hidden_size == encoder.width
    assert config.modalities[0] == encoder.modality
    for key, buffer in buffers.items():
        value = replay[key]
        assert value.shape[0] <= buffer.shape[0] and value.shape[1:] == buffer.shape[1:], key
        assert value.is_floating_point() == buffer.is_floating_point(), key
        assert buffer.dtype == (encoder.dtype if buffer.is_floating_point() else value.dtype), key


@EVERY
def test_buffers_are_shared_by_no_two_budgets_and_with_no_item(adapter: Adapter) -> None:
    encoder = supporting(adapter)
    items = adapter.items(encoder, 1)
    budget = budget_for(encoder, items[0].rows)
    made = [captured(encoder, budget, 1) for _ in range(2)]
    replay = encoder.prepare_encoder_cudagraph_replay_buffers(items, 1, 1).values
    held = [*(tensor for item in items for tensor in item.tensors.values())]
    held += [*made[0].values(), *made[1].values(), *replay.values()]
    storages = [tensor.untyped_storage().data_ptr() for tensor in held if tensor.numel()]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("adapter", matrix(TRACED, quick=3), ids=lambda adapter: adapter.name)
def test_what_is_traced_depends_on_shapes_only_and_is_the_same_each_time(adapter: Adapter) -> None:
    encoder = supporting(adapter)
    items = adapter.items(encoder, 4)
    budget = budget_for(encoder, sum(item.rows for item in items) + 5)
    codes = []
    for count in (1, 4):
        replay = encoder.prepare_encoder_cudagraph_replay_buffers(items[:count], 4, 4)
        buffers = filled(encoder, captured(encoder, budget, 4), replay)
        with torch.inference_mode():
            codes.append(torch.export.export(Traced(encoder), (buffers,), strict=False).graph_module.code)
    assert codes[0] == codes[1]
    assert not [name for name in BY_VALUE if f"{name}(" in codes[0] or f".{name}." in codes[0]]
