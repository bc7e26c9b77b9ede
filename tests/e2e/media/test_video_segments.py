"""Videos as segments through real processes: several encoder workers, faults, tenants, longer clips."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.chaos.faults import sleeping
from support.processes.cluster import Cluster, running_cluster, wait_for
from support.videos.cases import TOKENS, VideoAnswer, VideoCase, reference
from support.videos.classes import CLASSES
from support.videos.clips import make_clip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
#: Every frame is compressed alone and alike, so that a longer clip begins with the same frames.
ALONE: dict[str, Any] = {"codec": "mpeg4", "gop_size": 1, "qmin": 3, "qmax": 3, "size": (16, 16)}
#: Sampled at two per second: 24 frames, six segments of four.
SHORT, LONG = make_clip(frames=96, **ALONE), make_clip(frames=128, **ALONE)
FRAMES, SEGMENTS, LONGER = 4, 6, 8
#: A segment sleeps so long in the tower: others wait when the first is through.
TOWER_SECONDS = 0.5


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> VideoCase:
    entry = next(entry for entry in CLASSES if entry.family == "Qwen2_5_VL")
    return entry.case(tmp_path_factory.mktemp("model"), SHORT)


@pytest.fixture(scope="module")
def expected(case: VideoCase, tmp_path_factory: pytest.TempPathFactory) -> tuple[VideoAnswer, VideoAnswer]:
    short, long = reference([case, replace(case, clip=LONG)], tmp_path_factory.mktemp("reference"))
    assert not short.error
    assert not long.error
    return short, long


@contextlib.contextmanager
def cluster_of(
    case: VideoCase, folder: Path, encoders: int, *flags: str, environment: dict[str, str] | None = None
) -> Iterator[Cluster]:
    given = ("--encoders", str(encoders), "--video-segment-frames", str(FRAMES), "--decode-threads", "1")
    limits = ("--threads", "1", "--max-num-batched-tokens", "64", "--max-model-len", "1024")
    words = (*given, *limits, *flags)
    with running_cluster(case.model, folder, *words, environment=environment) as running:
        yield running


def ask(cluster: Cluster, clip: bytes, **fields: Any) -> dict[str, Any]:
    url = f"data:video/mp4;base64,{base64.b64encode(clip).decode()}"
    parts = [{"type": "video_url", "video_url": url}, {"type": "text", "text": "What happens?"}]
    options = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    return cluster.post({"messages": [{"role": "user", "content": parts}], **options, **fields})


def check(reply: dict[str, Any], expected: VideoAnswer) -> None:
    assert reply["status"] == 200, reply
    assert reply["prompt_token_ids"] == expected.prompt
    assert reply["choices"][0]["token_ids"] == expected.output


def towers(cluster: Cluster) -> float:
    return cluster.total("encoder", "triptych_encoder_tower_items_total")


@pytest.mark.parametrize("encoders", [1, 2, 4])
def test_segments_on_several_encoders_are_answered_as_by_transformers(encoders, case, expected, tmp_path):
    short, long = expected
    with cluster_of(case, tmp_path, encoders) as cluster:
        check(ask(cluster, SHORT), short)
        assert towers(cluster) == SEGMENTS
        # The next question about the clip, and the beginning of a longer one, cost no tower.
        check(ask(cluster, SHORT), short)
        assert towers(cluster) == SEGMENTS
        check(ask(cluster, LONG), long)
        assert towers(cluster) == LONGER
        # Another tenant's salt shares nothing.
        check(ask(cluster, SHORT, cache_salt="another"), short)
        assert towers(cluster) == LONGER + SEGMENTS
        busy = [page["triptych_encoder_tower_items_total"] for page in cluster.metrics("encoder")]
        assert sum(items > 0 for items in busy) >= min(encoders, 2)


def test_an_encoder_killed_between_segments_ends_in_the_same_answer(case, expected, tmp_path):
    slow = sleeping(tower=TOWER_SECONDS)
    with cluster_of(case, tmp_path, 2, environment=slow) as cluster, ThreadPoolExecutor(1) as pool:
        victim = cluster.names("encoder")[0]
        asked = pool.submit(ask, cluster, SHORT)
        wait_for("a first segment", lambda: towers(cluster) or asked.done())
        assert not asked.done(), "no segment is left"
        cluster.kill(victim)
        check(asked.result(), expected[0])


def test_a_client_sets_no_segment(case: VideoCase, tmp_path: Path) -> None:
    with cluster_of(case, tmp_path, 1) as cluster:
        reply = ask(cluster, SHORT, mm_processor_kwargs={"segment": [0, 4, 0]})
        assert (reply["status"], reply["error"]["param"]) == (400, "mm_processor_kwargs.segment")


def test_other_requests_are_answered_while_a_clip_of_768_frames_is(case: VideoCase, tmp_path: Path) -> None:
    clip = make_clip(frames=768, rate=2, **ALONE)
    (expected,) = reference([replace(case, clip=clip)], tmp_path)
    flags = ("--video-segment-frames", "30", "--max-model-len", "2048")
    other = {"messages": [{"role": "user", "content": "What is this?"}], "max_tokens": 8}
    with cluster_of(case, tmp_path, 2, *flags) as cluster, ThreadPoolExecutor(1) as pool:
        asked, answered = pool.submit(ask, cluster, clip), 0
        while not asked.done():
            assert cluster.post(other)["status"] == 200
            answered += not asked.done()
        check(asked.result(), expected)
        assert answered
        assert towers(cluster) == 26
