"""Bodies: large ones one after the other, forms, and the values that JSON may hold."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import weakref

import pytest
from starlette.types import Message

from support.hostile.bare_door import BareDoor
from triptych.base.errors import InvalidRequest, TooLarge
from triptych.proxy.http import json_body
from triptych.proxy.http.endpoint import BURST_SECONDS, HttpReply, PostEndpoint, WritePacer
from triptych.proxy.http.form_body import MAX_FIELD, MAX_PARTS, parse_form
from triptych.proxy.http.json_body import check_values, convert_field
from triptych.proxy.openai.app import ENDPOINTS
from triptych.proxy.openai.chat.request import MessageBody
from triptych.proxy.parsing.parse import Parse
from triptych.proxy.parsing.parsers import INLINE_BYTES, THREAD_BYTES, Parsers
from triptych.proxy.quotas.quota import Quota, QuotaSpec

PARSER = QuotaSpec("parser", 1, "bodies", "thread", "", "429", wait_seconds=60.0)
_PATIENCE = 30.0


class _Text:
    """A text that can be watched."""


class _RefusingEndpoint(PostEndpoint[None]):
    """An endpoint that refuses every body; the second one looks whether the first one's text is gone."""

    def __init__(self) -> None:
        super().__init__(Parsers(Quota(PARSER), Quota(PARSER)), max_body=1 << 30)
        self.go = threading.Event()
        self.first: weakref.ref[_Text] | None = None
        self.first_is_alive = True

    def parse(self, request_id: str, content_type: bytes = b"") -> Parse[None]:
        return Parse(self._refused)

    def _refused(self, raw: bytes) -> None:
        text = _Text()
        if self.first is None:
            self.first = weakref.ref(text)
            self.go.wait(_PATIENCE)
        else:
            self.first_is_alive = self.first() is not None
        try:
            raise ValueError("not what was wanted")
        except ValueError as error:
            raise InvalidRequest("refused", param="messages") from error

    async def answer(self, request: None, reply: HttpReply) -> None:
        raise AssertionError("nothing is to be answered")


async def _post(endpoint: _RefusingEndpoint) -> int:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(INLINE_BYTES + 1)}

    async def send(message: Message) -> None:
        sent.append(message)

    await endpoint({"type": "http", "method": "POST", "headers": []}, receive, send)
    status: int = sent[0]["status"]
    return status


async def test_a_refused_text_is_gone_before_the_next_body_is_parsed() -> None:
    endpoint = _RefusingEndpoint()
    calls = [asyncio.create_task(_post(endpoint)) for _ in range(2)]
    await asyncio.sleep(0)
    endpoint.go.set()
    assert await asyncio.gather(*calls) == [400, 400]
    assert not endpoint.first_is_alive


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_large_body_is_refused_before_it_is_read_where_there_is_no_place(
    path: str, announced: bool
) -> None:
    door = BareDoor()
    places = door.quotas["queries" if "token" in path else "requests"]
    places.hold("", places.free)
    body, read, sent = bytes(2 * THREAD_BYTES), 0, list[Message]()

    async def receive() -> Message:
        nonlocal read
        read += INLINE_BYTES
        return {
            "type": "http.request",
            "body": body[read - INLINE_BYTES : read],
            "more_body": read < len(body),
        }

    async def send(message: Message) -> None:
        sent.append(message)

    length = [(b"content-length", str(len(body)).encode())] if announced else []
    await door.endpoints[path]({"type": "http", "method": "POST", "headers": length}, receive, send)
    assert sent[0]["status"] == 429
    assert (b"retry-after", b"2") in sent[0]["headers"]
    assert read == (0 if announced else THREAD_BYTES + INLINE_BYTES)


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_packed_body_is_refused_unread_by_the_name_of_its_coding(path: str) -> None:
    sent = list[Message]()

    async def receive() -> Message:
        raise AssertionError("nothing is to be read")

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-encoding", b"gzip")]
    await BareDoor().endpoints[path]({"type": "http", "method": "POST", "headers": headers}, receive, send)
    assert sent[0]["status"] == 400
    assert "Content-Encoding is gzip: send it as it is" in sent[1]["body"].decode()


TYPE = b"multipart/form-data; boundary=edge"


def part(name: str, data: bytes, filename: str | None = None) -> bytes:
    extra = "" if filename is None else f'; filename="{filename}"'
    return f'--edge\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'.encode() + data + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--edge--\r\n"


def test_fields_and_files_are_distinguished() -> None:
    data = bytes(range(256)) * 5 + b"\r\n--edg"
    read = parse_form(
        TYPE, form(part("model", b"m"), part("file", data, "a.wav"), part("a[]", b"1"), part("a[]", b"2"))
    )
    assert (read.one("model"), read.one("none"), read.files["file"]) == ("m", "", data)
    assert read.all("a") == ["1", "2"]


def test_a_field_that_should_come_once_is_refused_when_it_comes_twice() -> None:
    read = parse_form(TYPE, form(part("model", b"m"), part("model", b"n")))
    with pytest.raises(InvalidRequest) as refused:
        read.one("model")
    assert refused.value.param == "model"


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (b"application/json", b"{}", "body"),
        (b"", b"x", "body"),
        (b"multipart/form-data", b"x", "body"),
        (b"multipart/form-data; boundary=" + b"x" * 300, b"x", "body"),
        (TYPE, b"rubbish", "body"),
        (b"multipart/form-data; boundary=b", b"--x\r\n\r\n", "body"),
        (TYPE, part("model", b"m"), "body"),
        (TYPE, form(part("model", b"m"))[:-12], "body"),
        (TYPE, form(part("", b"m")), "body"),
        (TYPE, form(b"--edge\r\nX: y\r\n\r\nm\r\n"), "body"),
        (TYPE, form(b"--edge\r\nX: " + b"y" * 5000 + b"\r\n\r\nm\r\n"), "body"),
        (TYPE, form(*[part("a", b"")] * (MAX_PARTS + 1)), "body"),
        (TYPE, form(part("prompt", b"x" * (MAX_FIELD + 1))), "prompt"),
        (TYPE, form(part("prompt", b"\xff")), "prompt"),
        (TYPE, form(*[part("file", b"x", "a")] * 2), "file"),
    ],
)
def test_what_is_no_form_is_refused_and_writes_nothing_into_the_log(kind, body, param, caplog):
    with caplog.at_level(logging.INFO), pytest.raises(InvalidRequest) as refused:
        parse_form(kind, body)
    assert refused.value.param == param
    assert not caplog.records


@pytest.mark.parametrize(
    "body",
    [[{}] * 60, [[]] * 60, {str(n): 1 for n in range(60)}, [[[[[1] * 60]]]], list(range(60))],
    ids=["objects", "lists", "members", "depth", "numbers"],
)
def test_json_is_held_to_its_values(monkeypatch: pytest.MonkeyPatch, body: object) -> None:
    raw = json.dumps(body).encode()
    check_values(raw)
    monkeypatch.setattr(json_body, "MAX_VALUES", 50)
    with pytest.raises(TooLarge):
        check_values(raw)


def test_the_largest_body_that_is_served_passes() -> None:
    check_values(json.dumps({"tokens": list(range(1 << 18))}).encode())


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("audio", "sound is not a part here (chats take it as input_audio or audio_url)"),
        ("file", "files are not read here"),
        ("x", "Invalid value 'x'"),
    ],
)
def test_a_part_that_is_not_served_is_named_with_those_that_are(kind: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match="send text or .*image_url") as caught:
        convert_field({"role": "user", "content": [{"type": kind}]}, MessageBody, "messages[0]")
    assert caught.value.param == "messages[0].content[0].type"
    assert named in caught.value.message


async def test_two_tokens_of_a_burst_are_one_write() -> None:
    pacer, now = WritePacer(), 100.0
    pacer._clock = lambda: now
    # The first after a pause, and those no faster than every 10 ms, go out as they come.
    assert pacer.pause() == 0.0
    now += 2 * BURST_SECONDS
    assert pacer.pause() == 0.0
    now += BURST_SECONDS
    assert pacer.pause() == BURST_SECONDS, "the next token is waited for"
    now += 1.0
    assert pacer.pause() == 0.0
