"""Jobs of a worker with encoder graphs, and `tests/gpu` of them on a CPU."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.data.sounds import audio_file, sound
from support.encoder_graphs.adapters import ADAPTERS, Adapter
from support.encoder_graphs.two_towers import TwoTowerEncoder
from support.engine.encoder_bench import Job, WatchedTower, bench, png, stored_rows
from triptych.base.config import EncoderConfig
from triptych.base.errors import ConfigError
from triptych.base.machine.graphs import EagerStatic
from triptych.encoder_worker.graphs import graph_encoder
from triptych.encoder_worker.graphs.graph_encoder import GraphEncoder, with_graphs
from triptych.encoder_worker.graphs.manager import GraphCounts
from triptych.models.registry import load_encoder
from triptych.store.embedding_store import EmbeddingStore

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
async def test_graphs_store_the_rows_of_the_ordinary_call(
    kind: str, store: EmbeddingStore, store_url: str
) -> None:
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


def test_a_tower_without_a_form_of_fixed_shape_is_refused_by_name_or_runs_without_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = WatchedTower(TwoTowerEncoder())
    with pytest.raises(ConfigError, match="--encoder-graphs static: WatchedTower .*: give .* off"):
        with_graphs(EncoderConfig(store="unix:///none", encoder_graphs="static"), plain)
    monkeypatch.setattr(graph_encoder, "graph_backend", lambda *_: EagerStatic())
    assert with_graphs(EncoderConfig(store="unix:///none", encoder_graphs="auto"), plain) is plain
    assert "WatchedTower has no form of fixed shape" in caplog.text


pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[3]
QUICK = ("t5", "two_towers")
EACH = [
    pytest.param(adapter, id=adapter.name, marks=() if adapter.name in QUICK else pytest.mark.slow)
    for adapter in ADAPTERS
]


@pytest.fixture(scope="module")
def gpu_tests() -> ModuleType:
    path = ROOT / "tests" / "gpu" / "test_encoder_graphs_gpu.py"
    spec = importlib.util.spec_from_file_location("encoder_graphs_gpu", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.DEVICE, module.backend = "cpu", EagerStatic  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("adapter", EACH)
def test_the_gpu_tests_hold_for_plain_calls(gpu_tests: ModuleType, adapter: Adapter) -> None:
    gpu_tests.test_padded_replays_equal_the_ordinary_call_for_each_number_of_items_at_each_budget(adapter)
    gpu_tests.test_a_replay_follows_from_its_items_alone_and_what_it_gave_stays(adapter)
    gpu_tests.test_what_runs_between_two_replays_changes_neither(adapter)
    gpu_tests.test_in_half_precision_a_replay_is_as_near_to_fp32_as_the_ordinary_call(adapter, torch.bfloat16)
    with pytest.raises(AssertionError, match="the tower was called"):
        gpu_tests.test_a_replay_runs_no_code_of_the_tower(adapter)
