"""Sounds through real processes: chat, Responses, gRPC and `triptych ask`; hostile files are refused."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from support.data.sounds import audio_file, sound
from support.processes.cluster import PATIENCE, Cluster, running_cluster
from support.sounds.classes import SOUNDS, TEXT, reference
from support.sounds.files import spoken
from support.videos.clips import make_clip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TOKENS = 16
ENTRY = next(entry for entry in SOUNDS if entry.family == "Qwen3ASR")
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
    for heard in ({"audio": wav()}, {"audio_url": url["audio_url"]}):
        events = cluster.chat_grpc(heard, {"text": TEXT}, max_tokens=TOKENS, ignore_eos=True)
        assert list(events[0].prompt_token_ids) == prompt
        assert [token for event in events for token in event.token_ids] == output
    # The second question about the sound finds its embeddings.
    assert cluster.total("encoder", "triptych_encoder_tower_items_total") == 1


def test_the_models_page_names_sound(cluster: Cluster) -> None:
    (model,) = cluster.models().values()
    assert model["input_modalities"] == ["text", "audio"]


def test_responses_and_the_command_line_say_the_same(cluster: Cluster, tmp_path: Path) -> None:
    said = cluster.post(chat(part(wav()), ignore_eos=False))["choices"][0]["message"]["content"]
    text = {"type": "input_text", "text": TEXT}
    body = {"input": [{"role": "user", "content": [part(wav()), text]}], "temperature": 0}
    (message,) = cluster.post({**body, "max_output_tokens": TOKENS}, path="/v1/responses")["output"]
    assert message["content"][0]["text"] == said

    (tmp_path / "clip.wav").write_bytes(wav())
    command = [sys.executable, "-m", "triptych.apps.cli", "ask", TEXT, "--url", cluster.url]
    words = ["--audio", str(tmp_path / "clip.wav"), "--max-tokens", str(TOKENS)]
    done = subprocess.run([*command, *words], capture_output=True, timeout=PATIENCE, check=True)
    assert done.stdout.decode(errors="replace").strip() == said.strip()


def test_m4a_and_webm_are_heard(cluster: Cluster) -> None:
    for file in (spoken(), spoken("ipod", "aac", 44_100)):
        assert cluster.post(chat(part(file)))["status"] == 200


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"RIFF", "not a WAV, FLAC"),
        (spoken("ipod", "aac", 44_100)[:2000], "truncated or damaged; convert it to M4A"),
        (make_clip(), "has no sound; send one with an audio track"),
    ],
    ids=["no format", "truncated", "no audio track"],
)
def test_a_hostile_file_is_refused_with_its_field_and_remedy(cluster, file, message):
    reply = cluster.post(chat(part(file)))
    assert (reply["status"], reply["error"]["param"]) == (400, FIELD), reply
    assert message in reply["error"]["message"]
    with pytest.raises(grpc.RpcError, match=r"messages\[0\].parts\[0\].audio: ") as refused:
        cluster.chat_grpc({"audio": file}, max_tokens=1)
    assert message in str(refused.value)


def test_more_sounds_than_the_limit_and_pictures_are_refused(cluster: Cluster) -> None:
    reply = cluster.post(chat(part(wav()), part(wav())))
    assert reply["status"] == 400
    assert "2 audios are more than the 1 that this server takes" in reply["error"]["message"]
    reply = cluster.post(chat({"type": "image_url", "image_url": "data:image/png;base64,AAAA"}))
    assert reply["error"]["param"] == "messages[0].content[0].image_url"
    assert "takes text, audio and no image" in reply["error"]["message"]


def transcribe(cluster: Cluster, path: str = "transcriptions", **fields: str) -> dict[str, Any]:
    words = [each for name, value in fields.items() for each in ("-F", f"{name}={value}")]
    command = ["curl", "-s", f"{cluster.url}/v1/audio/{path}", "-F", "file=@-;filename=a.wav", *words]
    done = subprocess.run(command, input=wav(), capture_output=True, timeout=PATIENCE, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_file_is_transcribed_in_the_form_of_the_class(cluster: Cluster) -> None:
    reply = transcribe(cluster, language="en", temperature="0")
    assert reply["usage"] == {"type": "duration", "seconds": 1}
    assert reply["text"]
    assert transcribe(cluster, response_format="srt")["error"]["param"] == "response_format"
    assert transcribe(cluster, language="xx")["error"]["param"] == "language"
    assert "translates in chats only" in transcribe(cluster, "translations")["error"]["message"]
