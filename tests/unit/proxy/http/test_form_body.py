from __future__ import annotations

import logging

import pytest

from triptych.base.errors import InvalidRequest
from triptych.proxy.http.form_body import MAX_FIELD, MAX_PARTS, parse_form

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
def test_what_is_no_form_is_refused(kind: bytes, body: bytes, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_form(kind, body)
    assert refused.value.param == param


def test_a_broken_form_writes_nothing_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(InvalidRequest):
        parse_form(b"multipart/form-data; boundary=b", b"--x\r\n\r\n")
    assert not caplog.records
