"""Jobs of a worker with encoder graphs."""

from __future__ import annotations

import asyncio

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.data.sounds import audio_file, sound
from support.encoder_graphs.two_towers import TwoTowerEncoder
from support.engine.encoder_bench import Job, WatchedTower, bench, png, stored_rows
from triptych.base.config import EncoderConfig
from triptych.base.errors import ConfigError
from triptych.base.machine.graphs import EagerStatic
from triptych.encoder_worker.graphs import graph_encoder
from triptych.encoder_worker.graphs.graph_encoder import GraphEncoder, with_graphs
from triptych.encoder_worker.graphs.manager import GraphCounts
from triptych.models.registry import load_encoder

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
