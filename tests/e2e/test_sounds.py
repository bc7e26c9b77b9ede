"""Sounds through real processes: chat, Responses, gRPC and `triptych ask`; hostile files are refused."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.data.sounds import audio_file, sound
from support.processes.cluster import PATIENCE, Cluster, running_cluster
from support.sounds.classes import SOUNDS, TEXT, reference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TOKENS = 16
ENTRY = next(entry for entry in SOUNDS if entry.family == "Qwen2Audio")
WAVE = sound(0.83, seed=1)
FIELD = "messages[0].content[0].input_audio.data"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ENTRY.checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    limits = ("--max-audio-seconds", "20", "--decode-threads", "1", "--limit-mm-per-prompt", '{"audio": 1}')
    flags = ("--threads", "1", "--max-num-batched-tokens", "64", "--max-model-len", "512", *limits)
    with running_cluster(model, tmp_path_factory.mktemp("run"), *flags) as running:
        yield running


def wav() -> bytes:
    return audio_file(WAVE, 16_000, "WAV", subtype="FLOAT")


def part(file: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file).decode(), "format": "wav"}}


def chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": TEXT}]
    same = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    return {"messages": [{"role": "user", "content": content}], **same, **fields}


def test_a_chat_about_a_sound_is_answered_as_by_transformers(cluster: Cluster, model: Path) -> None:
    prompt, output = reference(ENTRY, model, [WAVE], None, TOKENS)
    url = {"type": "audio_url", "audio_url": f"data:audio/wav;base64,{base64.b64encode(wav()).decode()}"}
    for asked in (part(wav()), url):
        reply = cluster.post(chat(asked))
        assert reply["status"] == 200, reply
        assert reply["prompt_token_ids"] == prompt
        assert reply["choices"][0]["token_ids"] == output
    # The second question about the sound finds its embeddings.
    assert cluster.total("encoder", "triptych_encoder_tower_items_total") == 1


def test_the_models_page_names_sound(cluster: Cluster) -> None:
    with urllib.request.urlopen(f"{cluster.url}/v1/models", timeout=PATIENCE) as reply:
        (model,) = json.loads(reply.read())["data"]
    assert model["input_modalities"] == ["text", "audio"]
