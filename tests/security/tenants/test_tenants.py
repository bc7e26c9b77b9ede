"""What one tenant has is never another's."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.chaos.rest import assert_at_rest
from support.data.pictures import picture
from support.fakes.proxy_fakes import FakeCluster, as_json, raw_post
from support.hostile.guarded import FAMILY, Guarded
from support.hostile.quota_scenarios import COUNT, MESSAGES, RERANK, SMALL
from support.processes.cluster import data_url, scrape, wait_for
from triptych.proxy.auth.keys import KeyLimits, KeyRing, new_key
from triptych.store.embedding_store import EmbeddingStore

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
    with pytest.raises(urllib.error.HTTPError) as error:
        guarded.cluster.get("/metrics", guarded.keys["alice"])
    assert error.value.code == 404
    error.value.close()


EMBEDDINGS = "/v1/embeddings"
LONG = "a text that fills several blocks of the prefix cache, which no other tenant may find " * 3


def post(guarded: Guarded, tenant: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The reply; a status other than 200 fails."""
    reply = guarded.cluster.post({"model": FAMILY, **body}, key=guarded.keys[tenant], path=path)
    assert reply["status"] == 200, reply
    return reply


def parts(seed: int) -> list[dict[str, Any]]:
    return [
        {"type": "image_url", "image_url": {"url": data_url(picture(seed, 96, 64))}},
        {"type": "text", "text": LONG},
    ]


def anthropic_parts(seed: int) -> list[dict[str, Any]]:
    data = data_url(picture(seed, 96, 64)).partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return [{"type": "image", "source": source}, {"type": "text", "text": LONG}]


#: Bodies with a picture and a long text, by path.
WITH_PICTURE = {
    EMBEDDINGS: lambda seed: {"messages": [{"role": "user", "content": parts(seed)}]},
    RERANK: lambda seed: {"query": "x", "documents": [{"content": parts(seed)}, LONG]},
    MESSAGES: lambda seed: {
        "messages": [{"role": "user", "content": anthropic_parts(seed)}],
        "max_tokens": 4,
    },
}


def spent(guarded: Guarded, tenant: str, path: str, body: dict[str, Any]) -> dict[str, float]:
    """What the request costs, and finds: tower calls, items of the store, cached prompt tokens."""

    def counts() -> dict[str, float]:
        cluster = guarded.cluster
        return {
            "tower": cluster.total("encoder", "triptych_encoder_tower_items_total"),
            "stored": cluster.total("encoder", "triptych_encoder_already_stored_total"),
            "prefix": cluster.total("pd", "vllm:prefix_cache_hits_total"),
        }

    before = counts()
    reply = post(guarded, tenant, path, body)
    assert_at_rest(guarded.cluster)
    after = counts()
    usage = reply["usage"]
    details = usage.get("prompt_tokens_details", {})
    cached = details.get("cached_tokens", usage.get("cache_read_input_tokens", 0))
    return {name: after[name] - before[name] for name in before} | {"cached": cached}


@pytest.mark.parametrize(("path", "seed"), [(EMBEDDINGS, 91), (RERANK, 92), (MESSAGES, 93)])
def test_what_a_tenant_has_asked_is_no_hit_of_another_one(guarded, path, seed):
    body = WITH_PICTURE[path](seed)
    first = spent(guarded, "alice", path, body | salt_of("a", path))
    assert (first["tower"], first["stored"]) == (1, 0)
    again = spent(guarded, "alice", path, body | salt_of("a", path))
    assert again["tower"] == 0 and again["prefix"] == again["cached"] > 0
    for salt in ("a", "5:alicea", "alicea")[: 1 if path == MESSAGES else None]:
        other = spent(guarded, "bob", path, body | salt_of(salt, path))
        assert other == {"tower": 1, "stored": 0, "prefix": 0, "cached": 0}, salt


def salt_of(salt: str, path: str) -> dict[str, str]:
    """Anthropic's shape has no salt: there each tenant's own is all."""
    return {} if path == MESSAGES else {"cache_salt": salt}


def test_counting_tokens_computes_and_stores_nothing(guarded):
    body = {"messages": [{"role": "user", "content": anthropic_parts(94)}]}
    for tenant in ("alice", "bob"):
        assert post(guarded, tenant, COUNT, body)["input_tokens"] > 0
    first = spent(guarded, "alice", MESSAGES, body | {"max_tokens": 4})
    assert first["tower"] == 1


@contextlib.asynccontextmanager
async def limited(
    store: EmbeddingStore, folder: Path, limits: str
) -> AsyncIterator[tuple[FakeCluster, dict[str, str]]]:
    """A proxy and the headers of a key with these limits."""
    key, line = new_key("alice")
    (folder / "keys").write_text(f"{line} {limits}\n")
    async with FakeCluster(store, keys=KeyRing("", str(folder / "keys"), KeyLimits())) as cluster:
        yield cluster, {"Authorization": f"Bearer {key}"}


async def ask(cluster: FakeCluster, path: str, headers: dict[str, str]) -> tuple[int, str]:
    status, _, body = await raw_post(cluster.port, json.dumps(SMALL[path]).encode(), headers, path)
    return status, as_json(body).get("error", {}).get("message", "")


@pytest.mark.parametrize("path", SMALL)
async def test_requests_of_a_minute_are_counted_at_every_path(path, store, tmp_path):
    async with limited(store, tmp_path, "requests-per-minute=2") as (cluster, headers):
        found = [await ask(cluster, path, headers) for _ in range(3)]
    assert [status for status, _ in found] == [200, 200, 429]
    assert found[2][1].startswith("requests-per-minute: ")


@pytest.mark.parametrize("path", [EMBEDDINGS, RERANK, MESSAGES])
async def test_tokens_of_every_input_are_charged(path, store, tmp_path):
    """Three for each prompt of the fake worker, and two of an answer."""
    charged = {EMBEDDINGS: 9, RERANK: 9, MESSAGES: 5}[path]
    async with limited(store, tmp_path, f"tokens-per-minute={charged}") as (cluster, headers):
        assert (await ask(cluster, path, headers))[0] == 200
        status, message = await ask(cluster, path, headers)
        assert status == 429 and message.startswith("tokens-per-minute: ")
    async with limited(store, tmp_path, f"tokens-per-minute={charged + 1}") as (cluster, headers):
        assert [(await ask(cluster, path, headers))[0] for _ in range(3)] == [200, 200, 429]


@pytest.mark.parametrize("path", [EMBEDDINGS, RERANK])
async def test_a_key_of_one_request_at_once_has_its_inputs_one_after_the_other(path, store, tmp_path):
    async with limited(store, tmp_path, "concurrent-requests=1") as (cluster, headers):
        assert (await ask(cluster, path, headers))[0] == 200
        worker = cluster.pd_workers[0]
        assert len(worker.submits) == 3
        assert cluster.dispatcher.in_flight == 0
