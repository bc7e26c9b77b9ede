"""Live data tell a tenant of the cluster, and nothing of another tenant."""

from __future__ import annotations

import pytest

from support.hostile.guarded import Guarded

pytestmark = pytest.mark.timeout(300)

SECRET = "the words that alice alone knows"


def test_what_all_tenants_see_names_none_of_them(guarded: Guarded) -> None:
    url = "http://127.0.0.1:9/secret-picture-of-alice.png"
    picture = [{"type": "image_url", "image_url": {"url": url}}]
    assert guarded.ask("alice", [{"role": "user", "content": SECRET}])["status"] == 200
    assert guarded.ask("alice", [{"role": "user", "content": picture}])["status"] >= 400
    alice, bob = guarded.keys["alice"], guarded.keys["bob"]
    seen = str(guarded.cluster.get("/cluster", bob))
    for secret in ("alice", "bob", SECRET, "secret-picture", alice, bob):
        assert secret not in seen, secret
    failed = guarded.cluster.get("/cluster/requests?failed=true", alice)["requests"][0]["id"]
    assert "secret-picture" not in str(guarded.cluster.get(f"/cluster/requests/{failed}", alice))
