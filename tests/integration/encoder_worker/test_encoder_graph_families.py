"""Every family's tower through the graph manager gives the rows of the ordinary call, whatever ran before.

The buffers are those of a CUDA graph, the calls are plain ones.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from support.encoder_graphs.adapters import ADAPTERS, Adapter
from support.encoder_graphs.replays import ChangedTower, Replays, assert_rows, replays
from support.matrix import matrix
from triptych.encoder_worker.graphs.manager import poison
from triptych.models.encoder_graph import EncoderCudaGraphReplayBuffers

pytestmark = pytest.mark.timeout(300)

#: A picture's, a text's and a sound's tower with every change, the others in the slow suite.
ORDERED = sorted(ADAPTERS, key=lambda adapter: adapter.name not in ("qwen3_vl", "bart", "whisper"))
EVERY = pytest.mark.parametrize("adapter", matrix(ORDERED, quick=3), ids=lambda adapter: adapter.name)


@EVERY
def test_padded_replays_equal_the_ordinary_call_for_each_number_of_items_at_each_budget(adapter):
    made = replays(adapter, poisoned=True)
    tried = 0
    for count in range(1, len(made.items) + 1):
        items = made.items[:count]
        wanted = made.eager(items)
        for budget in made.graphs:
            if sum(item.rows for item in items) <= budget:
                assert_rows(made.at(budget, items), wanted)
                tried += 1
    assert tried > len(made.items), "a number of items was tried at more than one budget"


@EVERY
def test_no_buffer_keeps_what_was_in_it(adapter: Adapter) -> None:
    made = replays(adapter)
    items = made.items[1:3]
    wanted = made.eager(items)
    budget = max(made.graphs)
    for key, buffer in made.graphs[budget].input_buffers.items():
        with torch.inference_mode():
            poison({key: buffer})
        assert_rows(made.at(budget, items), wanted)


@EVERY
def test_a_replay_follows_from_its_items_alone_and_what_it_gave_stays(adapter: Adapter) -> None:
    made = replays(adapter)
    one, other = made.items[:2], made.items[2:]
    first = made.manager.encode(one)
    held = [rows.clone() for rows in first]
    between = made.manager.encode(other)
    again = made.manager.encode(one)
    for rows, before, after in zip(first, held, again, strict=True):
        assert torch.equal(rows, before) and torch.equal(rows, after)
        assert rows.untyped_storage().nbytes() == rows.numel() * rows.element_size()
    assert_rows(between, made.eager(other))


@EVERY
def test_a_larger_budget_between_two_replays_changes_neither(adapter: Adapter) -> None:
    made = replays(adapter, poisoned=True)
    gc.collect()
    small, large = made.items[:1], made.items
    least, most = min(made.graphs), max(made.graphs)
    first = made.at(least, small)
    assert_rows(made.at(most, large), made.eager(large))
    gc.collect()
    assert all(torch.equal(*pair) for pair in zip(first, made.at(least, small), strict=True))
    assert_rows(first, made.eager(small))


@EVERY
def test_buffers_keep_their_addresses(adapter: Adapter) -> None:
    made = replays(adapter, 2)
    graph = made.graphs[min(made.graphs)]
    buffers = (*graph.input_buffers.values(), graph.output_buffer)
    before = [buffer.data_ptr() for buffer in buffers]
    for number in range(100):
        made.at(graph.token_budget, [made.items[number % 2]])
    assert [buffer.data_ptr() for buffer in buffers] == before
    assert len(set(before)) == len(before)


def _with_replay_values(made: Replays, change: Any) -> None:
    prepare = made.encoder.prepare_encoder_cudagraph_replay_buffers

    def changed(*arguments: Any) -> EncoderCudaGraphReplayBuffers:
        values = dict(prepare(*arguments).values)
        change(values)
        return EncoderCudaGraphReplayBuffers(values)

    made.manager._tower = ChangedTower(made.encoder, prepare_encoder_cudagraph_replay_buffers=changed)  # type: ignore[assignment]


@EVERY
def test_values_with_a_key_missing_extra_or_misspelt_are_an_error_that_names_it(adapter: Adapter) -> None:
    made = replays(adapter, 2)
    encoder = made.encoder
    for key in encoder.get_encoder_cudagraph_config().buffer_keys:
        for change, named in (
            (lambda values, key=key: values.pop(key), key),
            (lambda values: values.update(stray=torch.zeros(1)), "stray"),
            (lambda values, key=key: values.update({f"{key}x": values.pop(key)}), f"{key}x"),
        ):
            _with_replay_values(made, change)
            with pytest.raises(ValueError, match=named):
                made.manager.encode(made.items)
    made.manager._tower = encoder
    assert_rows(made.manager.encode(made.items), made.eager(made.items))
