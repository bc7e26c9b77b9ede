"""What the client sends: fields, messages and files."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

import triptych
from triptych.apps.client.fields import ChatFields, CompletionFields
from triptych.apps.client.wire import audio_form, chat_body, conversation, media_type
from triptych.base.errors import InvalidRequest
from triptych.proxy.openai.chat.request import ChatBody
from triptych.proxy.openai.completions.request import CompletionBody
from triptych.proxy.openai.fields.sampling import UnservedBody

PNG = b"\x89PNG\r\n\x1a\nrest"


@pytest.mark.parametrize(
    ("name", "near"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("images", "files"), ("image", "files")],
)
def test_a_misspelt_field_of_a_chat_is_an_error_with_the_nearest_name(name: str, near: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is not .* did you mean {near}?") as refused:
        chat_body("why?", (), "", {name: 1})
    assert refused.value.param == name


async def test_both_clients_refuse_it_before_they_send_anything() -> None:
    with triptych.Client("http://127.0.0.1:1") as client, pytest.raises(InvalidRequest, match="temperature"):
        client.ask("hi", temprature=1)  # type: ignore[call-arg]
    async with triptych.AsyncClient("http://127.0.0.1:1") as other:
        with pytest.raises(InvalidRequest, match="temperature"):
            await other.ask("hi", temprature=1)  # type: ignore[call-arg]
        with pytest.raises(InvalidRequest, match="temperature"):
            async for _ in other.stream("hi", temprature=1):  # type: ignore[call-arg]
                pass


@pytest.mark.parametrize(("fields", "body"), [(ChatFields, ChatBody), (CompletionFields, CompletionBody)])
def test_the_clients_know_every_field_that_is_served(fields: Any, body: type[msgspec.Struct]) -> None:
    served = set(body.__struct_fields__) - set(UnservedBody.__struct_fields__)
    own = {"messages", "model", "stream", "prompt", "encoder_prompt", "decoder_prompt", "multi_modal_data"}
    assert served - own - set(fields.__optional_keys__) <= {"stream_options"}


def test_one_path_one_url_and_bytes_are_files_without_a_list(tmp_path: Any) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    for file in (path, str(path), PNG):
        assert conversation("why?", file) == conversation("why?", [file])
    assert (
        conversation("why?", "https://x.org/a.png")[0]["content"][0]["image_url"]["url"]
        == "https://x.org/a.png"
    )


def test_a_picture_of_pil_goes_as_png() -> None:
    picture = Image.new("RGB", (3, 2), "red")
    data = io.BytesIO()
    picture.save(data, "PNG")
    assert conversation("why?", picture) == conversation("why?", [data.getvalue()])
    assert conversation("why?", [picture, picture]) == conversation("why?", [data.getvalue()] * 2)


@pytest.mark.parametrize("files", [7, [7], [None], object(), {"a.png": 1}.values()])
def test_any_other_kind_of_file_is_refused_with_what_is_accepted(files: Any) -> None:
    with pytest.raises(InvalidRequest, match="a path, a URL, bytes, a PIL picture, or a list of these"):
        conversation("why?", files)


def test_audio_of_another_kind_is_refused_with_what_is_accepted() -> None:
    with pytest.raises(InvalidRequest, match="a path or bytes"):
        audio_form(Image.new("RGB", (1, 1)), "", {})  # type: ignore[arg-type]


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
