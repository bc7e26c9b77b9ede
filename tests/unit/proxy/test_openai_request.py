from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from triptych.errors import InvalidRequest
from triptych.proxy.chat import ChatCall, ImagePart, TextPart
from triptych.proxy.openai_request import ChatOptions, parse_body

PNG = "data:image/png;base64," + base64.b64encode(b"picture").decode()
HELLO = [{"role": "user", "content": "hello"}]


def parse(body: Any) -> tuple[ChatCall, ChatOptions]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_body(raw, "r", max_images=2, timeout=10.0)


def with_part(part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}


def with_url(url: Any) -> dict[str, Any]:
    return with_part({"type": "image_url", "image_url": {"url": url}})


def with_value(**values: Any) -> dict[str, Any]:
    return {"messages": HELLO, **values}


URL = "messages[0].content[1].image_url.url"
MALFORMED: list[tuple[str, Any, str]] = [
    ("not JSON", b"{", "body"),
    ("no object", b"[]", "body"),
    ("not UTF-8", b'{"messages": [], "model": "\xff"}', "body"),
    ("NaN", b'{"messages": [], "temperature": NaN}', "body"),
    ("no messages", {}, "messages"),
    ("messages of a wrong type", {"messages": "x"}, "messages"),
    ("empty messages", {"messages": []}, "messages"),
    ("a message of a wrong type", {"messages": ["x"]}, "messages[0]"),
    ("a message without a role", {"messages": [{"content": "x"}]}, "messages[0].role"),
    ("an unknown role", {"messages": [*HELLO, {"role": "robot", "content": "x"}]}, "messages[1].role"),
    ("no content", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("empty content", {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ("content of a wrong type", {"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ("a part of a wrong type", with_part("x"), "messages[0].content[1].type"),
    ("an unknown part", with_part({"type": "smell"}), "messages[0].content[1].type"),
    ("a text part without text", with_part({"type": "text"}), "messages[0].content[1].text"),
    ("an image part without image_url", with_part({"type": "image_url"}), "messages[0].content[1].image_url"),
    ("image_url without url", with_part({"type": "image_url", "image_url": {}}), URL),
    ("a url of a wrong type", with_url(1), URL),
    ("an http url", with_url("http://example.com/a.png"), URL),
    ("an https url", with_url("https://example.com/a.png"), URL),
    ("a file url", with_url("file:///etc/passwd"), URL),
    ("no url", with_url("a.png"), URL),
    ("an empty url", with_url(""), URL),
    ("a data url without base64", with_url("data:image/png,abc"), URL),
    ("a data url without a comma", with_url("data:image/png;base64"), URL),
    ("a data url of text", with_url("data:text/html;base64,aGk="), URL),
    ("a data url of svg", with_url("data:image/svg+xml;base64,aGk="), URL),
    (
        "a plain image that is no data url",
        with_part({"type": "image", "image": "x"}),
        "messages[0].content[1].image",
    ),
    (
        "too many images",
        {"messages": [{"role": "user", "content": [{"type": "image", "image": PNG}] * 3}]},
        "messages",
    ),
    ("model of a wrong type", with_value(model=1), "model"),
    ("stream of a wrong type", with_value(stream="yes"), "stream"),
    (
        "stream_options of a wrong type",
        with_value(stream_options={"include_usage": 3}),
        "stream_options.include_usage",
    ),
    ("temperature too high", with_value(temperature=2.1), "temperature"),
    ("temperature below 0", with_value(temperature=-0.1), "temperature"),
    ("temperature of a wrong type", with_value(temperature="hot"), "temperature"),
    ("top_p 0", with_value(top_p=0), "top_p"),
    ("top_p above 1", with_value(top_p=1.5), "top_p"),
    ("top_k below -1", with_value(top_k=-2), "top_k"),
    ("top_k no integer", with_value(top_k=1.5), "top_k"),
    ("max_tokens 0", with_value(max_tokens=0), "max_tokens"),
    ("max_tokens below 0", with_value(max_tokens=-5), "max_tokens"),
    ("max_tokens a bool", with_value(max_tokens=True), "max_tokens"),
    ("max_completion_tokens 0", with_value(max_completion_tokens=0), "max_completion_tokens"),
    ("min_tokens above max_tokens", with_value(min_tokens=5, max_tokens=4), "min_tokens"),
    ("min_tokens below 0", with_value(min_tokens=-1), "min_tokens"),
    ("seed above 64 bits", with_value(seed=1 << 63), "seed"),
    ("seed of a wrong type", with_value(seed="x"), "seed"),
    ("too many stop strings", with_value(stop=["x"] * 17), "stop"),
    ("an empty stop string", with_value(stop=["a", ""]), "stop"),
    ("stop of a wrong type", with_value(stop=5), "stop"),
    ("stop_token_ids below 0", with_value(stop_token_ids=[-1]), "stop_token_ids"),
    ("n above 1", with_value(n=2), "n"),
    ("n 0", with_value(n=0), "n"),
    ("logprobs", with_value(logprobs=True), "logprobs"),
    ("a salt that is too long", with_value(cache_salt="x" * 257), "cache_salt"),
    ("a salt with control characters", with_value(cache_salt="a\n"), "cache_salt"),
    ("a salt of a wrong type", with_value(cache_salt=5), "cache_salt"),
    ("mm_processor_kwargs of a wrong type", with_value(mm_processor_kwargs=[1]), "mm_processor_kwargs"),
    (
        "mm_processor_kwargs too large",
        with_value(mm_processor_kwargs={"a": "x" * 20000}),
        "mm_processor_kwargs",
    ),
    (
        "mm_processor_kwargs above 64 bits",
        with_value(mm_processor_kwargs={"a": 1 << 70}),
        "mm_processor_kwargs",
    ),
]


@pytest.mark.parametrize(("body", "param"), [case[1:] for case in MALFORMED], ids=[c[0] for c in MALFORMED])
def test_a_malformed_request_is_a_400_that_names_its_field(body: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(body)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param.split(".")[-1].split("[")[0] in caught.value.message or param == "body"


def test_http_urls_are_told_what_to_do_instead() -> None:
    with pytest.raises(InvalidRequest, match="not yet: send the picture as a data: URL"):
        parse(with_url("https://example.com/a.png"))


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
    assert content == (
        TextPart("x"),
        ImagePart(base64.b64encode(b"picture").decode(), URL),
    )


def test_an_image_url_may_be_a_plain_string() -> None:
    call, _ = parse(with_part({"type": "image_url", "image_url": PNG}))
    assert call.images()[0].param == "messages[0].content[1].image_url"


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


def test_a_developer_message_is_a_system_message() -> None:
    call, _ = parse({"messages": [{"role": "developer", "content": "x"}]})
    assert call.messages[0].role == "system"


def test_the_replys_form_is_told_apart_from_the_request() -> None:
    body = with_value(stream=True, stream_options={"include_usage": True}, return_token_ids=True)
    assert parse(body)[1] == ChatOptions(True, True, True, False)
