"""Two hundred requests that cannot be served: each a 4xx that names the field; nothing is left of them."""

from __future__ import annotations

import base64
import io
import json
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image

from support.chaos.rest import assert_at_rest
from support.hostile.malformed import MALFORMED, PNG, with_url, with_value
from support.processes.cluster import PATIENCE, Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COUNT = 200


def _png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "teal").save(buffer, format="PNG")
    return buffer.getvalue()


def _data(raw: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def _bomb() -> bytes:
    """A PNG whose header promises 65500 x 65500 pixels."""
    raw = bytearray(_png(8, 8))
    raw[16:24] = (65500).to_bytes(4, "big") * 2
    return bytes(raw)


URL = "messages[0].content[1].image_url.url"
#: What only an encoder or a PD worker can see.
DEEP: list[tuple[str, Any, str]] = [
    ("a truncated picture", with_url(_data(_png(64, 64)[:60])), URL),
    ("no picture at all", with_url(_data(b"hello, I am text")), URL),
    ("a picture bomb", with_url(_data(_bomb())), URL),
    ("a format that is not allowed", with_url(_data(b"%!PS-Adobe-3.0 EPSF-3.0\n")), URL),
    ("a picture of impossible shape", with_url(_data(_png(4000, 8))), URL),
    (
        "seventeen pictures",
        {"messages": [{"role": "user", "content": [{"type": "image", "image": PNG}] * 17}]},
        "messages",
    ),
    ("a url inside", with_url("http://169.254.169.254/latest/meta-data/"), URL),
    ("a file", with_url("file:///etc/passwd"), URL),
    ("an empty picture", with_url(_data(b"")), URL),
    ("more tokens than the model holds", with_value(max_tokens=10**9), "max_tokens"),
    (
        "a prompt longer than the model holds",
        {"messages": [{"role": "user", "content": "x " * 60000}]},
        "messages",
    ),
]


def _post(cluster: Cluster, body: Any) -> tuple[int, dict[str, Any]]:
    raw = body if isinstance(body, bytes) else json.dumps({"model": "qwen3_vl"} | body).encode()
    request = urllib.request.Request(
        f"{cluster.url}/v1/chat/completions", data=raw, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_every_malformed_request_is_answered_and_leaves_nothing(families):
    cluster = families.cluster
    pids = {name: cluster.pid(name) for name in ("proxy", "encoder-0", "pd-0", "store")}
    # The table's limit of images is another one than this cluster's.
    kinds = [case for case in MALFORMED if case[0] != "too many images"] + DEEP
    cases = [kinds[index % len(kinds)] for index in range(COUNT)]
    with ThreadPoolExecutor(16) as threads:
        replies = list(threads.map(lambda case: _post(cluster, case[1]), cases))
    for (name, _, param), (status, reply) in zip(cases, replies, strict=True):
        assert 400 <= status < 500, (name, status, reply)
        assert reply["error"]["param"] == param, (name, reply)
        assert reply["error"]["message"], name
        assert not re.search(r"0x[0-9a-f]{6}", reply["error"]["message"]), (name, reply)
    assert {name: cluster.pid(name) for name in pids} == pids
    assert_at_rest(cluster)
