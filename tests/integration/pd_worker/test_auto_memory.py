"""Memory of a PD worker: the KV cache by itself, gathers in groups, videos."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from support.engine.engine_cell import engine_cell
from support.engine.pd_serving import tiny_model
from support.videos.cases import VideoCase, answered, built, plan_of, prepared
from support.videos.classes import CLASSES
from support.videos.clips import make_clip
from triptych.base.config import GIB, MIB, PDConfig
from triptych.base.errors import ConfigError
from triptych.models.base import DecoderSide, EncoderSide
from triptych.models.registry import load_decoder, load_encoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.item_limits import max_embeddings, parse_item_limits
from triptych.pd_worker.ranks import share
from triptych.pd_worker.runner import memory_profile
from triptych.pd_worker.runner.memory_plan import WorkerMemory


def test_a_worker_without_the_flag_finds_its_memory_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        model = tiny_model("qwen3_vl", kv_memory=0, max_num_seqs=3)
    longest = -(-512 // 16)
    assert model.kv_memory == 3 * longest * 2 * 3 * 16 * 2 * 16 * 4, "three requests of 512 tokens"
    assert "memory of cpu" in caplog.text and "KV cache (--kv-memory)" in caplog.text


@dataclass(frozen=True)
class FreeMemory:
    """A device with `nbytes` free, where a step takes nothing."""

    nbytes: int
    share = 1.0

    def free(self) -> int:
        return self.nbytes

    def used(self) -> int:
        return 0

    def reset_peak(self) -> None:
        return

    def peak(self) -> int:
        return 0


def test_memory_that_holds_nothing_is_refused_with_the_table() -> None:
    with pytest.raises(ConfigError, match=r"nothing is left for the KV cache(.|\n)*of this worker"):
        tiny_model("qwen3_vl", kv_memory=0, device_memory=MIB)


def test_a_length_that_the_memory_left_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "memory_of", lambda device: FreeMemory(40 * MIB))
    flags = {"kv_memory": 0, "max_model_len": 4096, "max_num_seqs": 1}
    with pytest.raises(ConfigError, match="holds no request of --max-model-len 4096"):
        tiny_model("qwen3_vl", encoder_cache_memory=39 * MIB, **flags)
    assert tiny_model("qwen3_vl", encoder_cache_memory=MIB, **flags).kv_memory > 0


_CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
_LIMIT = '{"image": 0, "video": {"count": 1, "num_frames": 24, "width": 8, "height": 8}}'


@dataclass
class Video:
    """A clip of frames so small that a pair of them has one embedding, and both sides of a Qwen3-VL."""

    case: VideoCase
    encoder: EncoderSide
    decoder: DecoderSide

    @property
    def path(self) -> Path:
        return self.case.model


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Video:
    entry = next(entry for entry in CLASSES if entry.family == "Qwen3VL")
    settings = {**entry.settings, "size": {"shortest_edge": 64, "longest_edge": 8192}}
    tiny = type(entry)(entry.family, entry.video_processor, settings, {}, {"num_frames": 24})
    case = tiny.case(tmp_path_factory.mktemp("video"), make_clip(size=(8, 8)))
    decoder = load_decoder(case.model, **_CPU, attn_implementation=ATTENTION_NAME)
    return Video(case, load_encoder(case.model, **_CPU), decoder)


def planned(video: Video, limit: str, max_num_seqs: int = 16384) -> WorkerMemory:
    config = PDConfig(
        model=str(video.path), limit_mm_per_prompt=limit, max_model_len=1024, max_num_seqs=max_num_seqs
    )
    return memory_profile.size_kv_memory(config, video.decoder, FreeMemory(12 * GIB))


def test_the_encoder_cache_counts_embeddings_and_no_timestamps(video: Video) -> None:
    item = prepared(video.case, video.encoder)
    assert item.rows == 12, "one embedding for each pair of frames"
    assert item.length > 12 * item.rows, "and a dozen tokens of timestamps beside it"
    rows = video.encoder.encode([item])
    plan = plan_of(item, video.encoder.width)
    prompt = built(video.case, video.decoder, plan)
    with engine_cell(video, max_model_len=1024, max_num_batched_tokens=64, kv_memory=64 * MIB) as cell:
        assert len(answered(cell, video.decoder, prompt, rows)) == 16
        used = cell.metric("triptych_pd_encoder_cache_bytes")
    assert used == plan.nbytes == item.rows * video.encoder.width * 4
    assert item.length * video.encoder.width * 4 > 12 * used, "what all tokens of the placeholder would take"


def test_a_checkpoint_without_a_processor_has_room_for_an_embedding_at_each_token(video: Video) -> None:
    nowhere = video.path / "no processor here"
    assert max_embeddings({}, video.decoder, nowhere, 1024) == 1024
    with pytest.raises(ConfigError):
        max_embeddings(parse_item_limits(_LIMIT), video.decoder, nowhere, 1024)


def test_the_profile_counts_the_embeddings_of_the_largest_items(video: Video) -> None:
    limits = parse_item_limits(_LIMIT)
    assert max_embeddings(limits, video.decoder, video.path, 1024) == 12
    two = parse_item_limits(_LIMIT.replace('"count": 1', '"count": 2'))
    assert max_embeddings(two, video.decoder, video.path, 1024) == 24
    assert max_embeddings(two, video.decoder, video.path, 20) == 20
    picture = parse_item_limits('{"image": {"width": 32, "height": 32}, "video": 0}')
    assert max_embeddings(picture, video.decoder, video.path, 1024) == 16


def test_without_a_size_the_densest_items_of_what_is_allowed_count(video: Video) -> None:
    assert max_embeddings({}, video.decoder, video.path, 1024) == 1024, "of a picture each token has one"
    videos = max_embeddings(parse_item_limits('{"image": 0}'), video.decoder, video.path, 1024)
    assert 12 < videos < 1024, "of a video timestamps have none"
    dense, sparse = planned(video, "", 256), planned(video, '{"image": 0}', 256)
    assert sparse.needs.embeddings < dense.needs.embeddings


def test_what_embeddings_do_not_need_is_the_kv_caches(video: Video) -> None:
    every_token, masked = planned(video, ""), planned(video, _LIMIT)
    assert every_token.needs.block == masked.needs.block
    freed = every_token.needs.embeddings - masked.needs.embeddings
    assert freed > 8 * masked.needs.embeddings
    blocks = (masked.kv_memory - every_token.kv_memory) // masked.needs.block
    assert blocks >= freed // masked.needs.block - 1 > 0
