"""Requests that no front door may take: a name, the body, and the field that the error must name."""

from __future__ import annotations

import base64
from typing import Any

PNG = "data:image/png;base64," + base64.b64encode(b"picture").decode()
HELLO = [{"role": "user", "content": "hello"}]


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
