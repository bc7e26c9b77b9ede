"""Traces where a cluster is not one encoder and one PD worker: replicas, ranks, two proxies, TLS, Ray."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.data.sounds import audio_file, sound
from support.processes.cluster import Cluster, data_url, running_cluster
from support.processes.ray_nodes import ENVIRONMENT
from support.tracing.collector import Collector, running_collector
from support.tracing.requests import (
    SECRET,
    WHOLE,
    ask,
    has,
    named,
    parent_of_a_trace,
    parents,
    picture_url,
    post,
    services,
    spans_of,
    traced,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: An encoder-decoder model's request has no chat, and its item is always loaded into cross-attention.
ENCODED = WHOLE.keys() - {"chat demo"}


def whole_trace(collector: Collector, cluster: Cluster, colour: tuple[int, int, int]) -> dict[str, str]:
    """Asks about a new picture and checks the shape of its trace; the service of each span."""
    trace_id, headers = parent_of_a_trace()
    ask(cluster, picture_url(colour), headers)
    spans = spans_of(collector, trace_id, has(*WHOLE))
    assert parents(spans) == WHOLE
    assert named(spans, "load item").links == ((trace_id, named(spans, "tower").span_id),)
    assert not any(span.failed for span in spans)
    server = named(spans, "chat demo")
    assert all(server.start - 0.05 <= span.start <= span.end <= server.end + 0.05 for span in spans)
    return services(spans)


def test_ranks_of_decoder_and_tower_leave_each_span_once(tmp_path: Path) -> None:
    words = ("--tensor-parallel", "2", "--encoder-data-parallel", "2")
    with running_collector() as collector, traced(tmp_path / "run", collector, *words) as cluster:
        made_by = whole_trace(collector, cluster, (30, 30, 200))
        assert (made_by["tower"], made_by["decode"]) == ("encoder", "pd")
        # Only the leaders of ranks send: one process of each service.
        assert len({(span.service, span.instance) for span in collector.spans()}) == 3


@pytest.mark.parametrize("family", ["bart", "t5", "whisper", "trocr"])
def test_an_encoder_decoder_models_text_sound_or_picture_is_traced_as_an_item(family, tmp_path):
    sources: dict[str, dict[str, Any]] = {
        "bart": {"prompt": SECRET},
        "t5": {"prompt": SECRET},
        "whisper": {"multi_modal_data": {"audio": {"data": spoken()}}},
        "trocr": {"multi_modal_data": {"image": {"url": data_url(picture(3, 70, 40))}}},
    }
    path = build_checkpoint(family, tmp_path / family)
    words = ("--threads", "1", "--served-model-name", "demo")
    with (
        running_collector() as collector,
        running_cluster(path, tmp_path / "run", "--otlp-endpoint", collector.url, *words) as cluster,
    ):
        body = {"model": "demo", "max_tokens": 4, "ignore_eos": True, **sources[family]}
        traces = []
        for _ in range(2):
            trace_id, headers = parent_of_a_trace()
            post(f"{cluster.url}/v1/completions", body, headers)
            traces.append(spans_of(collector, trace_id, has("text_completion demo", "PD request", "decode")))
        first, second = traces
        assert parents(first).keys() >= ENCODED
        tower = named(first, "tower")
        assert named(first, "load item").links == ((tower.trace_id, tower.span_id),)
        modality = {"whisper": "audio", "trocr": "image"}.get(family, "text")
        assert named(first, "encode item").attributes["triptych.item.modality"] == modality
        # The cross-attention table of the item is resident: nothing is encoded or loaded from the store.
        assert "tower" not in services(second)
        assert named(second, "load item").links == ((tower.trace_id, tower.span_id),)
        assert named(second, "load item").attributes["triptych.item.source"] == "resident"
        assert SECRET not in repr(collector.spans())


def spoken() -> str:
    return base64.b64encode(audio_file(sound(2, seed=1), 16_000, "WAV")).decode()


def test_actors_of_ray_send_their_spans_too(tmp_path: Path) -> None:
    environment = ENVIRONMENT | {"TRIPTYCH_INTERNAL_TOKEN": "", "HOME": str(tmp_path)}
    words = ("--launcher", "ray", "--pd-workers", "1")
    with (
        running_collector() as collector,
        traced(tmp_path / "run", collector, *words, environment=environment) as cluster,
    ):
        made_by = whole_trace(collector, cluster, (200, 200, 30))
        assert (made_by["chat demo"], made_by["tower"], made_by["decode"]) == ("proxy", "encoder", "pd")
