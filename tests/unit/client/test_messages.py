from __future__ import annotations

import base64
from pathlib import Path

import pytest

from triptych.apps.client.wire import conversation, media_type
from triptych.base.errors import InvalidRequest

PNG = b"\x89PNG\r\n\x1a\nrest"


def _url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_paths_bytes_and_urls_become_parts_in_front_of_the_question(tmp_path: Path):
    picture = tmp_path / "picture.of.mine"
    picture.write_bytes(PNG)
    (message,) = conversation("why?", [picture, str(picture), b"\xff\xd8\xffjpeg", "https://x.org/a.png"])
    *images, text = message["content"]
    assert text == {"type": "text", "text": "why?"}
    assert [part["image_url"]["url"] for part in images] == [
        _url(PNG, "image/png"),
        _url(PNG, "image/png"),
        _url(b"\xff\xd8\xffjpeg", "image/jpeg"),
        "https://x.org/a.png",
    ]


def test_videos_follow_the_pictures(tmp_path: Path):
    clips = {"a.mp4": b"\0\0\0\x20ftypisom", "b.webm": b"\x1a\x45\xdf\xa3webm", "c.gif": b"GIF89a"}
    for name, data in clips.items():
        (tmp_path / name).write_bytes(data)
    videos = [*(str(tmp_path / name) for name in clips), "https://x.org/a.mp4"]
    (message,) = conversation("why?", [PNG], videos)
    first, *others, text = message["content"]
    assert (first["type"], text["type"]) == ("image_url", "text")
    kinds = ("video/mp4", "video/webm", "image/gif")
    assert [part["video_url"]["url"] for part in others] == [
        *(_url(data, kind) for data, kind in zip(clips.values(), kinds, strict=True)),
        "https://x.org/a.mp4",
    ]
    (tmp_path / "notes.txt").write_bytes(b"hello")
    with pytest.raises(InvalidRequest, match=r"notes.txt: not a video of a known format \(MP4"):
        conversation("why?", (), [str(tmp_path / "notes.txt")])


def test_files_beside_a_list_of_messages_are_refused():
    with pytest.raises(InvalidRequest, match="files can only be given with a question"):
        conversation([{"role": "user", "content": "x"}], [PNG])


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"BM1234", "image/bmp"),
        (b"RIFF0000WEBPVP8 ", "image/webp"),
    ],
)
def test_the_first_bytes_tell_the_type(data: bytes, kind: str):
    assert media_type(data, "x") == kind


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"RIFF0000WAVE", b"0000ftypmp42", b"0000ftypheic", b"0000ftypavif"]
)
def test_what_is_no_picture_is_refused_by_name(data: bytes):
    with pytest.raises(InvalidRequest, match="notes.txt"):
        media_type(data, "notes.txt")
