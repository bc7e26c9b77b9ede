"""Encoder graphs: every family's rows, and jobs that run in them."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.data.sounds import audio_file, sound
from support.encoder_graphs.adapters import ADAPTERS, Adapter
from support.encoder_graphs.replays import ChangedTower, Replays, assert_rows, replays
from support.encoder_graphs.two_towers import TwoTowerEncoder
from support.engine.encoder_bench import Job, WatchedTower, bench, png, stored_rows
from support.matrix import matrix
from triptych.base.config import EncoderConfig
from triptych.base.errors import ConfigError
from triptych.base.machine.graphs import EagerStatic
from triptych.encoder_worker.graphs import graph_encoder
from triptych.encoder_worker.graphs.graph_encoder import GraphEncoder, with_graphs
from triptych.encoder_worker.graphs.manager import GraphCounts, poison
from triptych.models.encoder_graph import EncoderCudaGraphReplayBuffers
from triptych.models.registry import load_encoder

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
    minimum, maximum = min(made.graphs), max(made.graphs)
    first = made.at(minimum, small)
    assert_rows(made.at(maximum, large), made.eager(large))
    gc.collect()
    assert all(torch.equal(*pair) for pair in zip(first, made.at(minimum, small), strict=True))
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


CPU = torch.device("cpu")
#: By kind of tower: the family, a variant of its checkpoint, and media.
KINDS = {
    "items of one size": ("trocr", "", "image", [png(picture(seed, 60 + 9 * seed, 40)) for seed in range(3)]),
    "packed texts": ("bart", "", "text", [b"One.", b"A longer text, as it happens.", b"word " * 30]),
    "windows": (
        "whisper", "small", "audio",
        [audio_file(sound(0.5 + seed / 2, seed=seed), 16_000, "WAV") for seed in range(3)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
async def test_graphs_store_the_rows_of_the_ordinary_call(kind, store, store_url):
    family, variant, modality, media = KINDS[kind]
    plain = load_encoder(build_checkpoint(family, variant=variant), device=CPU, dtype=torch.float32)
    graphs = with_graphs(EncoderConfig(store=store_url, encoder_graphs="static"), plain)
    assert isinstance(graphs, GraphEncoder)
    rows: list[list[torch.Tensor]] = []
    for encoder in (plain, graphs):
        async with bench(encoder, store, store_url) as b:
            jobs = [
                await Job(b, data, modality=modality, salt=type(encoder).__name__).planned() for data in media
            ]
            events = await asyncio.gather(*(job.finished() for job in jobs))
            assert {event.WhichOneof("body") for event in events} == {"ready"}
            rows.append([(await stored_rows(store, job))[1] for job in jobs])
    for wanted, found in zip(*rows, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    counts = graphs.graphs.counts
    assert isinstance(counts, GraphCounts)
    assert (counts.hits, counts.misses) == (len(media), 0)


def test_a_tower_without_a_form_of_fixed_shape_is_refused_by_name_or_runs_without_graphs(monkeypatch, caplog):
    plain = WatchedTower(TwoTowerEncoder())
    with pytest.raises(ConfigError, match="--encoder-graphs static: WatchedTower .*: give .* off"):
        with_graphs(EncoderConfig(store="unix:///none", encoder_graphs="static"), plain)
    monkeypatch.setattr(graph_encoder, "graph_backend", lambda *_: EagerStatic())
    assert with_graphs(EncoderConfig(store="unix:///none", encoder_graphs="auto"), plain) is plain
    assert "WatchedTower has no form of fixed shape" in caplog.text
