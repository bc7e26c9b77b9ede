"""Videos through real processes: chat, Responses, gRPC and `triptych ask`; hostile files are refused."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from support.processes.cluster import PATIENCE, Cluster, running_cluster
from support.videos.cases import TOKENS, VideoAnswer, VideoCase, reference
from support.videos.classes import CLASSES
from support.videos.clips import huge_header, make_clip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
QUESTION = {"type": "text", "text": "What happens?"}
FIELD = "messages[0].content[0].video_url.url"
#: One of each kind: `unit/encoder_worker/media/test_video.py` has all of them.
REFUSED = {
    "a header of 10 GB": (huge_header, 400, "truncated or damaged; convert it"),
    "too long": (lambda: make_clip(frames=21, rate=1), 413, "more than the 20 seconds allowed"),
    "too large in all its segments": (
        lambda: make_clip(frames=40, rate=2, size=(160, 160)),
        413,
        "40 frames of 160x160 are more than the 1000000 pixels allowed",
    ),
}
ANSWERED = {"with sound": lambda: make_clip(sound=True), "GIF": lambda: make_clip("gif", "gif", "rgb8")}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> VideoCase:
    entry = next(entry for entry in CLASSES if entry.family == "Qwen3VL")
    return entry.case(tmp_path_factory.mktemp("model"), make_clip())


@pytest.fixture(scope="module")
def expected(case: VideoCase, tmp_path_factory: pytest.TempPathFactory) -> VideoAnswer:
    (answer,) = reference([case], tmp_path_factory.mktemp("reference"))
    assert not answer.error
    return answer


@pytest.fixture(scope="module")
def cluster(case: VideoCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    limits = ("--max-video-seconds", "20", "--max-video-pixels", "1000000", "--decode-threads", "1")
    limits += ("--limit-mm-per-prompt", '{"video": 1}')
    flags = ("--threads", "1", "--max-num-batched-tokens", "64", "--max-model-len", "1024", *limits)
    with running_cluster(case.model, tmp_path_factory.mktemp("run"), *flags) as running:
        yield running


def part(clip: bytes, kind: str = "video/mp4") -> dict[str, Any]:
    url = f"data:{kind};base64,{base64.b64encode(clip).decode()}"
    return {"type": "video_url", "video_url": {"url": url}}


def chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": [*parts, QUESTION]}],
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


def test_a_chat_about_a_video_is_answered_as_by_transformers(cluster, case, expected):
    for _ in range(2):
        reply = cluster.post(chat(part(case.clip)))
        assert reply["status"] == 200, reply
        (choice,) = reply["choices"]
        assert reply["prompt_token_ids"] == expected.prompt
        assert choice["token_ids"] == expected.output
        assert reply["usage"]["prompt_tokens"] == len(expected.prompt)
    # The second question about the clip finds its embeddings.
    assert cluster.total("encoder", "triptych_encoder_tower_items_total") == 1


def test_responses_and_the_command_line_say_the_same(cluster, case, tmp_path):
    said = cluster.post(chat(part(case.clip), ignore_eos=False))["choices"][0]["message"]["content"]
    url = part(case.clip)["video_url"]["url"]
    text = {"type": "input_text", "text": QUESTION["text"]}
    body = {
        "input": [{"role": "user", "content": [{"type": "input_video", "video_url": url}, text]}],
        "temperature": 0,
        "max_output_tokens": TOKENS,
    }
    (message,) = cluster.post(body, path="/v1/responses")["output"]
    assert message["content"][0]["text"] == said

    (tmp_path / "clip.mp4").write_bytes(case.clip)
    command = [sys.executable, "-m", "triptych.apps.cli", "ask", QUESTION["text"], "--url", cluster.url]
    words = ["--video", str(tmp_path / "clip.mp4"), "--max-tokens", str(TOKENS)]
    done = subprocess.run([*command, *words], capture_output=True, timeout=PATIENCE, check=True)
    assert done.stdout.decode(errors="replace").strip() == said.strip()


def test_grpc_gives_the_same_tokens_for_a_file_and_for_its_url(cluster, case, expected):
    for video in ({"video": case.clip}, {"video_url": part(case.clip)["video_url"]["url"]}):
        events = cluster.chat_grpc(video, {"text": QUESTION["text"]}, max_tokens=TOKENS, ignore_eos=True)
        assert list(events[0].prompt_token_ids) == expected.prompt
        assert [token for event in events for token in event.token_ids] == expected.output


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_file_is_refused_with_its_field_and_remedy(cluster: Cluster, name: str) -> None:
    make, status, message = REFUSED[name]
    clip = make()
    reply = cluster.post(chat(part(clip, "image/gif" if clip.startswith(b"GIF") else "video/mp4")))
    assert reply["status"] == status, reply
    assert reply["error"]["param"] == FIELD
    assert message in reply["error"]["message"]
    with pytest.raises(grpc.RpcError, match=r"messages\[0\].parts\[0\].video: ") as refused:
        cluster.chat_grpc({"video": clip}, max_tokens=1)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", ANSWERED)
def test_an_unusual_file_is_answered(cluster: Cluster, name: str) -> None:
    clip = ANSWERED[name]()
    kinds = {b"GIF8": "image/gif", b"\x1a\x45\xdf\xa3": "video/webm"}
    reply = cluster.post(chat(part(clip, kinds.get(clip[:4], "video/mp4"))))
    assert reply["status"] == 200, reply
    assert len(reply["choices"][0]["token_ids"]) == TOKENS


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"fps": 1000}, "mm_processor_kwargs.fps", "must be above 0 and at most 120"),
        ({"num_frames": True}, "mm_processor_kwargs.num_frames", "must be above 0"),
        ({"fps": 1, "num_frames": 4}, "mm_processor_kwargs.fps", "not both"),
    ],
)
def test_options_of_sampling_are_checked(cluster, case, fields, param, message):
    reply = cluster.post(chat(part(case.clip), mm_processor_kwargs=fields))
    assert (reply["status"], reply["error"]["param"]) == (400, param), reply
    assert message in reply["error"]["message"]


def test_more_videos_than_the_servers_limit_are_refused(cluster: Cluster, case: VideoCase) -> None:
    reply = cluster.post(chat(part(case.clip), part(make_clip(frames=12))))
    assert (reply["status"], reply["error"]["param"]) == (400, "messages"), reply
    assert "2 videos are more than the 1 that this server takes" in reply["error"]["message"]


def test_fewer_frames_are_fewer_tokens(cluster: Cluster, case: VideoCase, expected: VideoAnswer) -> None:
    reply = cluster.post(chat(part(case.clip), mm_processor_kwargs={"num_frames": 4}))
    assert reply["status"] == 200, reply
    assert reply["usage"]["prompt_tokens"] < len(expected.prompt)


def test_what_is_no_video_and_what_has_sound_are_refused_by_the_proxy(cluster: Cluster) -> None:
    for bad, message in (
        (part(b"x" * 64, "video/x-msvideo"), "must be one of image/gif, video/mp4"),
        (part(b"x" * 64), "MP4, MOV, WebM or GIF"),
        ({"type": "video_url", "video_url": {"url": "rtsp://camera/1"}}, "data:, http: or https: URL"),
    ):
        reply = cluster.post(chat(bad))
        assert reply["status"] == 400, reply
        assert reply["error"]["param"] == FIELD
        assert message in reply["error"]["message"]
    sound = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    reply = cluster.post(chat(sound))
    assert reply["status"] == 400, reply
    assert reply["error"]["param"] == "messages[0].content[0].input_audio.data"
    assert "takes text, image, video and no audio" in reply["error"]["message"]
