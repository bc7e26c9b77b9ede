"""The client: its requests, the fields of replies, the generated half."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

import triptych
from triptych.apps.client.answers import answer_of, token_vectors_of
from triptych.apps.client.fields import ChatFields, CompletionFields
from triptych.apps.client.wire import (
    EventLines,
    audio_form,
    chat_body,
    conversation,
    error_of,
    media_type,
    pause,
)
from triptych.base.errors import (
    ContextTooLong,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    Overloaded,
    RateLimited,
    TooLarge,
    Unauthorized,
    Unavailable,
)
from triptych.base.types import Usage
from triptych.proxy.openai.chat.request import ChatBody
from triptych.proxy.openai.completions.request import CompletionBody
from triptych.proxy.openai.fields.sampling import UnservedBody


def _body(code: str | None, message: str = "no", param: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, "code": code, "param": param, "type": "x"}}).encode()


def test_the_package_offers_both_clients_and_nothing_unknown():
    assert triptych.Client.__name__ == "Client"
    assert triptych.AsyncClient.__name__ == "AsyncClient"
    with pytest.raises(AttributeError, match="has no attribute 'Klient'"):
        triptych.Klient  # noqa: B018


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_request_error", InvalidRequest),
        (400, "context_length_exceeded", ContextTooLong),
        (404, "not_found", NotFound),
        (404, "model_not_found", ModelNotFound),
        (413, "request_too_large", TooLarge),
        (429, "rate_limit_exceeded", RateLimited),
        (503, "unavailable", Unavailable),
        (401, "invalid_api_key", Unauthorized),
        (401, "a_gateways_own_code", Unauthorized),
        (429, None, Overloaded),
        (500, "internal_error", InternalError),
        (418, "teapot", InternalError),
    ],
)
def test_an_error_reply_becomes_our_error(status, code, kind):
    error = error_of(status, _body(code, "what", "model"), "3")
    assert type(error) is kind
    assert (error.message, error.param, error.retry_after) == ("what", "model", 3.0)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": "text"}', b'{"detail": 1}'])
def test_a_reply_of_another_server_keeps_its_status_and_message(body):
    error = error_of(503, body, "Fri, 31 Dec 1999 23:59:59 GMT")
    assert type(error) is Unavailable
    assert "503" in error.message
    assert error.retry_after is None


def test_only_what_may_pass_is_tried_again():
    assert pause(Overloaded("x", retry_after=2.0), 1, 2) == 2.0
    assert pause(Unavailable("x"), 1, 2) == 0.25
    assert pause(Unavailable("x"), 2, 2) == 0.5
    assert pause(Unavailable("x"), 3, 2) is None
    assert pause(Unavailable("x", retry_after=3600.0), 1, 2) == 10.0
    assert pause(InvalidRequest("x"), 1, 2) is None
    assert pause(InternalError("x"), 1, 2) is None


def test_events_are_read_until_done():
    events = EventLines()
    assert list(events.feed(b'data: {"choices": []}\n\n: comment\ndata: [DO')) == [{"choices": []}]
    with pytest.raises(Unavailable):
        events.check_end()
    assert list(events.feed(b"NE]\r\n\r\n")) == []
    events.check_end()


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85"])
def test_an_event_may_hold_what_other_readers_take_for_the_end_of_a_line(character):
    text = f"a{character}b"
    raw = f"data: {json.dumps({'text': text}, ensure_ascii=False)}\n\n".encode()
    events = EventLines()
    assert [event for byte in raw for event in events.feed(bytes([byte]))] == [{"text": text}]


def test_a_stream_without_its_end_is_an_error():
    events = EventLines()
    assert list(events.feed(b'data: {"choices": []}\n\n'))
    with pytest.raises(Unavailable, match="broke off"):
        events.check_end()


@pytest.mark.parametrize("data", [b"data: {\n", b"data: []\n"])
def test_an_event_that_is_none_is_an_error(data):
    with pytest.raises(InternalError):
        list(EventLines().feed(data))


def test_an_answer_has_its_parts():
    raw = {
        "choices": [
            {
                "message": {
                    "content": None,
                    "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}],
                },
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}},
    }
    answer = answer_of(raw)
    assert (answer.text, answer.finish_reason, answer.usage) == ("", "tool_calls", Usage(5, 2, 3))
    assert [(call.id, call.name, call.arguments) for call in answer.tool_calls] == [("c1", "f", "{}")]


@pytest.mark.parametrize("raw", [{}, {"choices": []}, {"choices": [{}]}, {"choices": None}])
def test_a_reply_that_is_no_answer_is_an_error(raw):
    with pytest.raises(InternalError):
        answer_of(raw)


def pooled(*inputs: list[float], tokens: int) -> dict[str, Any]:
    data = [{"data": base64.b64encode(struct.pack(f"<{len(each)}f", *each)).decode()} for each in inputs]
    return {"data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def test_each_token_of_each_input_has_its_vector():
    given = token_vectors_of(pooled([1, 2, 3, 4], [5, 6], tokens=3))
    assert given.vectors == (((1, 2), (3, 4)), ((5, 6),))


@pytest.mark.parametrize(
    "raw", [{}, pooled([1, 2, 3, 4], [5, 6], tokens=0), pooled([1, 2, 3], tokens=2), pooled([1], tokens=3)]
)
def test_a_reply_without_a_vector_for_each_token_is_an_error(raw):
    with pytest.raises(InternalError, match="no vectors of tokens"):
        token_vectors_of(raw)


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
    with pytest.raises(
        InvalidRequest, match="takes a path, a URL, bytes, a binary file, a PIL picture, or a list"
    ):
        conversation("why?", files)


def test_audio_of_another_kind_is_refused_with_what_is_accepted() -> None:
    with pytest.raises(InvalidRequest, match="a path, bytes or a binary file"):
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


@pytest.mark.parametrize("messages", [None, 5, {"role": "user", "content": "x"}, ["why?"]])
def test_what_is_no_question_and_no_conversation_is_refused_before_it_is_sent(messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="a question as a text, or a list of messages"):
        conversation(messages, ())


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


TOOL = Path(__file__).parents[2] / "tools/sync_client.py"


def test_the_blocking_client_is_made_from_the_one_for_asyncio() -> None:
    spec = importlib.util.spec_from_file_location("sync_client", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.main(["--check"]) == ""


def test_open_files_are_taken_in_binary_mode_and_refused_in_text_mode(tmp_path: Path) -> None:
    (tmp_path / "a.bmp").write_bytes(b"BM" + b"\n" * 99)
    [given] = chat_body("what?", tmp_path / "a.bmp", "m", {})["messages"]
    with (tmp_path / "a.bmp").open("rb") as opened:
        assert chat_body("what?", opened, "m", {})["messages"] == [given]
    assert chat_body("what?", [io.BytesIO(b"BM" + b"\n" * 99)], "m", {})["messages"] == [given]
    assert audio_form(io.BytesIO(b"abc"), "m", {}).files["file"][1] == b"abc"
    with (tmp_path / "a.bmp").open() as text, pytest.raises(InvalidRequest, match="in binary mode"):
        chat_body("what?", text, "m", {})
