"""Files of large JSON bodies are lifted out before it is parsed, and what is parsed is the same."""

from __future__ import annotations

import base64
import json
import random

import msgspec
import pytest

from triptych.base.errors import InvalidRequest
from triptych.proxy.media.loader import decode_base64
from triptych.proxy.media.source import AudioPart, FilePart, ImagePart
from triptych.proxy.parsing.lifted import LEAST, lift_texts, lifted_text, parse_lifted

FILE = random.Random(7).randbytes(LEAST)
TEXT = base64.b64encode(FILE).decode()
URL = f"data:image/png;base64,{TEXT}"


def parts(raw: bytes) -> list[object]:
    """The values of the body's list: files where an object says so, else as they are."""
    made: list[object] = []
    for value in msgspec.json.decode(raw)["all"]:
        match value:
            case {"url": str(url)}:
                made.append(ImagePart.of_url(url, "url"))
            case {"data": str(data)}:
                made.append(AudioPart(data, "data"))
            case _:
                made.append(value)
    return made


def body(*values: object, **options: object) -> bytes:
    return json.dumps({"all": values}, **options).encode()  # type: ignore[arg-type]


def plain(values: list[object]) -> list[object]:
    """With the bytes of files in their places."""
    return [
        (type(value), decode_base64(value.source, value.param)) if isinstance(value, FilePart) else value
        for value in values
    ]


def parsed_sizes(raw: bytes) -> list[int]:
    """The lengths of what is parsed until the result is there."""
    sizes: list[int] = []

    def work(given: bytes) -> list[object]:
        sizes.append(len(given))
        return parts(given)

    assert plain(parse_lifted(work, raw)) == plain(parts(raw))
    return sizes


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_files_are_not_decoded_with_the_rest(separators):
    raw = body({"url": URL}, "a text", {"data": TEXT}, {"url": URL}, separators=separators)
    (size,) = parsed_sizes(raw)
    assert size < 500


def test_a_lifted_file_is_a_part_of_the_body():
    raw = body({"url": URL})
    (part,) = parse_lifted(parts, raw)
    assert part.source.obj is raw


@pytest.mark.parametrize(
    "values",
    [
        (URL,),
        ({"url": URL}, URL),
        ({"data": TEXT}, {"data": "x" * 8, "more": URL}),
        (f"see {URL} there", {"url": URL}),
        (TEXT, {"data": TEXT}),
    ],
)
def test_a_text_that_looks_like_a_file_is_the_text_that_was_sent(values):
    parsed_sizes(body(*values))


@pytest.mark.parametrize("url", [URL[: LEAST // 2], "data:image/png;base64,", URL.replace("A", "/")])
def test_short_files_and_those_with_escapes_stay_in_the_body(url):
    raw = body({"url": url}).replace(b"/", b"\\/")
    assert lift_texts(raw) == (raw, {})


@pytest.mark.parametrize(
    "raw", [b"", b"[" + TEXT.encode(), b'{"data":"' + b"x" * LEAST, b"\x0a" + URL.encode()]
)
def test_what_is_no_object_or_has_no_end_stays_as_it_is(raw):
    assert lift_texts(raw) == (raw, {})


def test_an_error_is_that_of_the_whole_body():
    def work(given: bytes) -> int:
        raise InvalidRequest(f"{len(given)} bytes")

    raw = body({"url": URL})
    with pytest.raises(InvalidRequest, match=f"{len(raw)} bytes"):
        parse_lifted(work, raw)


def test_nobody_can_ask_for_the_file_of_another_body():
    raw = body({"url": URL})
    word = next(iter(lift_texts(raw)[1]))
    assert lifted_text(word) is None
    parsed_sizes(body(word, {"url": URL}))
    assert lifted_text(word) is None


def test_openings_of_nothing_cost_a_bounded_search():
    raw = body(*["data:image/png;base64,"] * 10_000)
    assert lift_texts(raw) == (raw, {})
