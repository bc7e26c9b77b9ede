from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from support.hostile.malformed import MALFORMED, PNG, URL, with_part, with_url, with_value
from triptych.base.errors import InvalidRequest
from triptych.base.request import TextPart
from triptych.proxy.call.chat import ChatCall
from triptych.proxy.media.source import FileUrl, ImagePart, WebUrl
from triptych.proxy.openai.chat.request import ChatReplyOptions, parse_body


def parse(body: Any) -> tuple[ChatCall, ChatReplyOptions]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_body(raw, "r", max_images=2, timeout=10.0)


@pytest.mark.parametrize(("body", "param"), [case[1:] for case in MALFORMED], ids=[c[0] for c in MALFORMED])
def test_a_malformed_request_is_a_400_that_names_its_field(body: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(body)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param.split(".")[-1].split("[")[0] in caught.value.message or param == "body"


def test_web_and_file_urls_are_kept_for_the_loader() -> None:
    call, _ = parse(with_url("https://example.com/a.png?x=1#y"))
    source = call.items()[0].source
    assert isinstance(source, WebUrl)
    assert str(source.url) == "https://example.com/a.png?x=1"
    call, _ = parse(with_url("file:///tmp/a%20b.png"))
    assert call.items()[0].source == FileUrl("/tmp/a b.png")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x"}] * 4097,
        [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4097}],
    ],
)
def test_messages_and_parts_are_counted(messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="at most 4096: join texts") as caught:
        parse({"messages": messages})
    assert caught.value.param == "messages"


def test_deep_nesting_is_an_error_and_no_crash() -> None:
    with pytest.raises(InvalidRequest):
        parse(b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def test_unknown_fields_do_not_fail() -> None:
    call, _ = parse(with_value(brand_new={"x": 1}, user="u", model="m"))
    assert call.model == "m"


def test_text_and_images_keep_their_order() -> None:
    part = {"type": "image_url", "image_url": {"url": PNG, "detail": "high"}, "uuid": "mine"}
    call, _ = parse(with_part(part))
    content = call.messages[0].content
    assert content == (TextPart("x"), ImagePart(base64.b64encode(b"picture").decode(), URL))


def test_values_of_the_sampler_are_taken_over() -> None:
    body = with_value(
        max_tokens=9,
        max_completion_tokens=7,
        min_tokens=2,
        temperature=0,
        top_p=1,
        top_k=-1,
        seed=-1,
        stop="end",
        ignore_eos=True,
    )
    sampling = parse(body)[0].sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (7, 2, 0)
    assert (sampling.top_p, sampling.top_k, sampling.seed) == (1, 0, (1 << 64) - 1)
    assert (sampling.stop, sampling.ignore_eos) == (("end",), True)


def test_a_seed_is_drawn_when_none_is_given() -> None:
    seeds = {parse(with_value())[0].sampling.seed for _ in range(5)}
    assert len(seeds) == 5


def test_bad_words_and_the_stop_text_in_the_answer_are_taken_over() -> None:
    sampling = parse(with_value(bad_words=["sea", " of"], include_stop_str_in_output=True))[0].sampling
    assert (sampling.bad_words, sampling.include_stop_str_in_output) == (("sea", " of"), True)
    with pytest.raises(InvalidRequest) as caught:
        parse(with_value(bad_words=["sea", ""]))
    assert caught.value.param == "bad_words[1]"
