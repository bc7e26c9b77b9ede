"""Live data tell a tenant of the cluster, and nothing of another tenant."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import pytest

from support.hostile.guarded import FAMILY, Guarded

pytestmark = pytest.mark.timeout(300)

SECRET = "the words that alice alone knows"


def get(guarded: Guarded, path: str, key: str = "", method: str = "GET") -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{guarded.cluster.url}{path}", headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, reply.read(1 << 16) if path == "/cluster/events" else reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def ask_as_alice(guarded: Guarded, content: Any) -> int:
    body = {"model": FAMILY, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    headers = {
        "Authorization": f"Bearer {guarded.keys['alice']}",
        "X-Request-ID": "of-alice",
        "Content-Type": "application/json",
    }
    url = f"{guarded.cluster.url}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_what_all_tenants_see_names_none_of_them(guarded: Guarded) -> None:
    url = "http://127.0.0.1:9/secret-picture-of-alice.png"
    assert ask_as_alice(guarded, SECRET) == 200
    assert ask_as_alice(guarded, [{"type": "image_url", "image_url": {"url": url}}]) >= 400
    status, seen = get(guarded, "/cluster", guarded.keys["bob"])
    assert status == 200
    status, record = get(guarded, "/cluster/requests/of-alice", guarded.keys["alice"])
    for secret in ("alice", "bob", SECRET, "secret-picture", guarded.keys["alice"], guarded.keys["bob"]):
        assert secret.encode() not in seen, secret
    assert status == 200 and b"secret-picture" not in record
