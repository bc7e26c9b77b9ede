"""Tenants of one cluster share nothing that tells them of each other, shown by its metrics."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

import pytest

from support.chaos.rest import assert_at_rest
from support.data.pictures import picture
from support.hostile.guarded import Guarded
from support.processes.cluster import data_url, scrape, wait_for

pytestmark = pytest.mark.timeout(300)

QUESTION = "what is in this picture and why is it there at all?"


def _about(seed: int) -> list[dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": data_url(picture(seed, 96, 64))}}
    return [{"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}]


def _counts(guarded: Guarded) -> dict[str, float]:
    """Tower calls, items found in the store, prompt tokens found in the prefix cache."""
    cluster = guarded.cluster
    return {
        "tower": cluster.total("encoder", "triptych_encoder_tower_items_total"),
        "stored": cluster.total("encoder", "triptych_encoder_already_stored_total"),
        "prefix": cluster.total("pd", "vllm:prefix_cache_hits_total"),
        "jobs": cluster.total("proxy", "triptych_encoder_jobs_total"),
    }


def _spent(guarded: Guarded, tenant: str, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """What one request of the tenant costs and finds."""
    before = _counts(guarded)
    reply = guarded.ask(tenant, messages, triptych_timings=True, **options)
    assert reply["status"] == 200, reply
    assert_at_rest(guarded.cluster)
    after = _counts(guarded)
    spent: dict[str, Any] = {name: after[name] - before[name] for name in before}
    spent["found"] = [item["cache"] for item in reply["triptych_timings"]["items"]]
    spent["cached"] = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    spent["text"] = reply["choices"][0]["message"]["content"]
    return spent


def test_a_tenant_pays_for_a_picture_once_and_another_tenant_pays_again(guarded):
    first = _spent(guarded, "alice", _about(1))
    assert (first["tower"], first["found"], first["prefix"], first["cached"]) == (1, ["encoded"], 0, 0)
    again = _spent(guarded, "alice", _about(1))
    assert (again["tower"], again["jobs"], again["found"]) == (0, 0, ["store"])
    assert again["prefix"] == again["cached"] > 0
    other = _spent(guarded, "bob", _about(1))
    assert (other["tower"], other["stored"], other["found"]) == (1, 0, ["encoded"])
    assert other["prefix"] == other["cached"] == 0
    assert first["text"] == again["text"] == other["text"]


def test_no_salt_of_one_tenant_reaches_what_another_has(guarded):
    assert _spent(guarded, "alice", _about(2), cache_salt="shared")["tower"] == 1
    for salt in ("shared", "alice", "5:aliceshared", "aliceshared", ":aliceshared"):
        spent = _spent(guarded, "bob", _about(2), cache_salt=salt)
        assert (spent["tower"], spent["stored"], spent["prefix"]) == (1, 0, 0), salt
    assert _spent(guarded, "alice", _about(2), cache_salt="shared")["tower"] == 0


def test_text_of_one_tenant_is_no_prefix_of_anothers(guarded):
    messages = [{"role": "user", "content": "a long text that fills several blocks of the cache " * 3}]
    # Keys of tenants that have asked nothing yet: even the beginning that a template gives is new to them.
    first, second = guarded.add_tenant("first-of-text"), guarded.add_tenant("second-of-text")
    wrong = [{"role": "nobody", "content": "x"}]
    for key in (first, second):
        wait_for("the new key", lambda key=key: guarded.ask(key, wrong)["status"] == 400)
    assert _spent(guarded, first, messages)["prefix"] == 0
    assert _spent(guarded, second, messages)["prefix"] == 0
    assert _spent(guarded, first, messages)["prefix"] > 0


def test_keys_of_one_name_share_what_they_have_and_count_without_a_restart(guarded):
    _spent(guarded, "alice", _about(3))
    key = guarded.add_tenant("alice")
    hello = [{"role": "user", "content": "x"}]
    wait_for("the new key", lambda: guarded.ask(key, hello)["status"] == 200)
    spent = _spent(guarded, key, _about(3))
    assert (spent["tower"], spent["found"]) == (0, ["store"])


def test_metrics_have_their_own_port_and_are_not_at_the_door(guarded):
    assert "triptych_requests_in_flight" in scrape(guarded.cluster.metrics_url)
    request = urllib.request.Request(
        f"{guarded.cluster.url}/metrics", headers={"Authorization": f"Bearer {guarded.keys['alice']}"}
    )
    with pytest.raises(urllib.error.HTTPError) as error, urllib.request.urlopen(request, timeout=30):
        pass
    assert error.value.code == 404
    error.value.close()
