"""Live data tell a tenant of the cluster, and nothing of another tenant."""

from __future__ import annotations

import json
import urllib.request

import pytest

from support.hostile.guarded import Guarded

pytestmark = pytest.mark.timeout(300)

SECRET = "the words that alice alone knows"


def get(guarded: Guarded, path: str, tenant: str) -> bytes:
    headers = {"Authorization": f"Bearer {guarded.keys[tenant]}"}
    request = urllib.request.Request(f"{guarded.cluster.url}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as reply:
        found: bytes = reply.read()
        return found


def test_what_all_tenants_see_names_none_of_them(guarded: Guarded) -> None:
    url = "http://127.0.0.1:9/secret-picture-of-alice.png"
    picture = [{"type": "image_url", "image_url": {"url": url}}]
    assert guarded.ask("alice", [{"role": "user", "content": SECRET}])["status"] == 200
    assert guarded.ask("alice", [{"role": "user", "content": picture}])["status"] >= 400
    seen = get(guarded, "/cluster", "bob")
    for secret in ("alice", "bob", SECRET, "secret-picture", guarded.keys["alice"], guarded.keys["bob"]):
        assert secret.encode() not in seen, secret
    failed = json.loads(get(guarded, "/cluster/requests?failed=true", "alice"))["requests"][0]["id"]
    assert b"secret-picture" not in get(guarded, f"/cluster/requests/{failed}", "alice")
