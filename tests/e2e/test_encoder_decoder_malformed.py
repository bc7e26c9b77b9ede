"""Requests that encoder-decoder models cannot serve: a 4xx that names the field, and nothing is left."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from support.chaos.rest import assert_at_rest
from support.data.checkpoints import build_checkpoint
from support.data.sounds import audio_file, sound
from support.processes.cluster import PATIENCE, Cluster, start_cluster, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COUNT = 150
RATE = 16_000
WAV = audio_file(sound(1.0), RATE, "WAV")
FLAC = audio_file(sound(1.0), RATE, "FLAC")


def floats(value: float) -> bytes:
    return audio_file(np.full(RATE, value, dtype=np.float32), RATE, "WAV", subtype="FLOAT")


def audio(**fields: Any) -> dict[str, Any]:
    """A completions body about a sound."""
    return {"multi_modal_data": {"audio": {"data": base64.b64encode(WAV).decode()}}, **fields}


#: Files, further fields, and the field that the error names.
FORMS: list[tuple[Any, dict[str, Any], str]] = [
    (None, {"language": "en"}, "body"),
    (b"", {}, "file"),
    (b"This is a text.\n" * 9, {}, "file"),
    (b"\x00\x00\x00\x20ftypM4A " + b"\x00" * 99, {}, "file"),
    (FLAC[: len(FLAC) // 2], {}, "file"),
    (audio_file(np.zeros(0, dtype=np.float32), RATE, "WAV"), {}, "file"),
    (floats(float("nan")), {}, "file"),
    (floats(1e30), {}, "file"),
    (audio_file(sound(1.0, rate=500), 500, "WAV"), {}, "file"),
    (audio_file(np.zeros((99, 12), dtype=np.float32), RATE, "WAV"), {}, "file"),
    (audio_file(np.zeros(2000 * 8000, dtype=np.float32), 8000, "FLAC"), {}, "file"),
    (WAV, {"language": "xx"}, "language"),
    (WAV, {"language": "x" * 50}, "language"),
    (WAV, {"response_format": "xml"}, "response_format"),
    (WAV, {"temperature": "hot"}, "temperature"),
    (WAV, {"temperature": "2.5"}, "temperature"),
    (WAV, {"stream": "true", "response_format": "vtt"}, "stream"),
    (
        WAV,
        {"timestamp_granularities[]": "word", "response_format": "verbose_json"},
        "timestamp_granularities",
    ),
    (WAV, {"model": "other"}, "model"),
    (WAV, {"model": "bart"}, "file"),
]
BODIES: list[tuple[dict[str, Any], str]] = [
    ({"model": "bart"}, "prompt"),
    ({"model": "bart", "encoder_prompt": []}, "encoder_prompt"),
    ({"model": "bart", "encoder_prompt": [0, 99999]}, "encoder_prompt"),
    ({"model": "bart", "prompt": [0, 99999]}, "prompt"),
    ({"model": "bart", "prompt": "word " * 3000}, "prompt"),
    ({"model": "bart", "encoder_prompt": "x" * 200_000}, "encoder_prompt"),
    ({"model": "bart", "encoder_prompt": "x", "decoder_prompt": [99999]}, "decoder_prompt"),
    ({"model": "bart", "encoder_prompt": "x", "decoder_prompt": [5] * 400}, "decoder_prompt"),
    ({"model": "bart", "decoder_prompt": "x"}, "decoder_prompt"),
    ({"model": "bart", "prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"model": "bart", "prompt": "x", "max_tokens": 9999}, "max_tokens"),
    ({"model": "bart", **audio()}, "multi_modal_data.audio"),
    ({"model": "whisper", "prompt": "x"}, "prompt"),
    ({"model": "whisper", "encoder_prompt": "x"}, "encoder_prompt"),
    ({"model": "whisper", **audio(decoder_prompt=[99999])}, "decoder_prompt"),
    ({"model": "whisper", **audio(prompt=[5] * 500)}, "prompt"),
    ({"model": "whisper", "multi_modal_data": {"audio": {"data": "UklGRg=="}}}, "multi_modal_data.audio"),
    (
        {"model": "whisper", "multi_modal_data": {"image": "data:image/png;base64,QQ=="}},
        "multi_modal_data.image",
    ),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("malformed")
    bart, whisper = (build_checkpoint(family, folder / family) for family in ("bart", "whisper"))
    cluster = start_cluster(bart, folder / "run", "--threads", "1")
    try:
        cluster.add_worker("encoder", str(whisper), "--threads", "1", "--prepared-memory", "64MiB")
        memory = ("--kv-memory", "64MiB", "--encoder-cache-memory", "32MiB")
        cluster.add_worker("pd", str(whisper), "--threads", "1", *memory)
        wait_for("both models", lambda: len(cluster.workers()) == 4 and _served(cluster))
        yield cluster
    finally:
        cluster.stop()


def _served(cluster: Cluster) -> bool:
    models = httpx2.get(f"{cluster.url}/v1/models", timeout=PATIENCE).json()["data"]
    return {model["id"] for model in models} == {"bart", "whisper"}


def _form(cluster: Cluster, case: tuple[Any, dict[str, Any], str]) -> httpx2.Response:
    file, fields, _ = case
    files = None if file is None else {"file": ("a.wav", file)}
    url = f"{cluster.url}/v1/audio/transcriptions"
    return httpx2.post(url, data={"model": "whisper"} | fields, files=files, timeout=PATIENCE)


def _body(cluster: Cluster, case: tuple[dict[str, Any], str]) -> httpx2.Response:
    return httpx2.post(f"{cluster.url}/v1/completions", json=case[0], timeout=PATIENCE)


def test_every_malformed_request_is_answered_and_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    names = ("proxy", "encoder-0", "pd-0", "store")
    pids = {name: cluster.pid(name) for name in names}
    calls = [(_form, case, case[2]) for case in FORMS] + [(_body, body, body[1]) for body in BODIES]
    calls = [calls[index % len(calls)] for index in range(COUNT)]
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda call: call[0](cluster, call[1]), calls))
    for (_, case, param), reply in zip(calls, replies, strict=True):
        shown = str(case)[-300:]
        assert 400 <= reply.status_code < 500, (shown, reply.status_code, reply.text)
        error = reply.json()["error"]
        assert error["param"] == param, (shown, error)
        assert error["message"] and not re.search(r"0x[0-9a-f]{6}", error["message"]), error
    good = _form(cluster, (WAV, {"response_format": "json", "language": "en"}, ""))
    assert good.status_code == 200 and json.loads(good.text)["text"]
    assert {name: cluster.pid(name) for name in names} == pids
    assert_at_rest(cluster)


def test_clients_that_go_in_the_middle_of_a_file_leave_nothing(cluster: Cluster) -> None:
    file = audio_file(sound(75.0, seed=5), RATE, "FLAC")
    options = {"model": "whisper", "language": "en", "stream": "true"}
    for _ in range(3):
        with httpx2.stream(
            "POST",
            f"{cluster.url}/v1/audio/transcriptions",
            data=options,
            files={"file": ("a.flac", file)},
            timeout=PATIENCE,
        ) as reply:
            next(reply.iter_lines())
            # The connection is closed with two windows to go.
    assert_at_rest(cluster)
    assert cluster.total("pd", "triptych_pd_kv_blocks_used") == 0
