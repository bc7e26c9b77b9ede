"""Embeddings are looked for before vLLM is asked, and again when it failed; a lost one is encoded again."""

from __future__ import annotations

import base64

import msgpack
import numpy as np

from support.vllm.items import PLANS, SAMPLING, notify, save, submit
from support.vllm.scripted_server import Call, fails
from support.vllm.serving import fronting
from triptych.base.vllm_classes import VLLMClass
from triptych.pd_worker.vllm.run import MAX_FAILURES
from triptych.protos import pd_pb2
from triptych.registry.matching import WHOLE_REQUESTS
from triptych.store import keys


async def test_the_worker_registers_that_it_loads_whole_requests(served):
    assert served.worker.info("127.0.0.1:1", 2).capacity[WHOLE_REQUESTS] == 1


async def test_items_go_to_vllm_by_key_place_and_grid_without_pixels(server, served, store):
    await save(store, *PLANS)
    await submit(served)
    found = await served.client.until("r1")
    body = server.calls[0].body
    places = [{"offset": place.offset, "length": place.length} for place in found.admitted.placements]
    features = body["features"]
    assert features["mm_hashes"] == {"image": [one.mm_hash for one in PLANS]}
    assert features["mm_placeholders"] == {"image": places} and "kwargs_data" not in features
    for packed in features["mm_metadata"]["image"]:
        (name, item), *others = msgpack.unpackb(base64.b64decode(packed)).items()
        dtype, shape, raw = item["data"]
        assert (name, others, item["field"]) == ("image_grid_thw", [], ["batched", {"keep_on_cpu": True}])
        assert (dtype, shape) == ("int64", [3]) and raw.code == 3
        assert np.frombuffer(raw.data, np.int64).tolist() == [1, 4, 4]
    assert body["ec_transfer_params"].keys() == {one.mm_hash for one in PLANS}
    assert sorted(found.loaded) == sorted(one.mm_hash for one in PLANS)
    assert found.bodies.index("item_loaded") < found.bodies.index("tokens")


async def test_pictures_go_to_vllm_by_its_own_name_of_their_kind(server, store, monkeypatch):
    known = VLLMClass(image_kind="vision_chunk")
    monkeypatch.setattr("triptych.pd_worker.vllm.worker.class_of", lambda *_, **__: known)
    await save(store, *PLANS)
    async with fronting(server, store) as served:
        await submit(served)
        await served.client.until("r1")
    features = server.calls[0].body["features"]
    assert [list(named) for named in features.values()] == [["vision_chunk"]] * 3


async def test_vllm_is_not_asked_before_all_items_are_announced(server, served, store):
    await submit(served, pd_pb2.ITEM_STATE_PENDING)
    await served.client.has("r1", "admitted")
    await save(store, *PLANS)
    await notify(served, PLANS[0])
    await served.client.submit(served.client.message("text", "hello", **SAMPLING))
    await served.client.until("text")
    assert len(server.calls) == 1
    await notify(served, PLANS[1])
    found = await served.client.until("r1")
    assert len(found.token_ids) == 6 and found.missing == []


async def test_an_item_that_is_gone_is_asked_for_before_vllm_is(server, served, store):
    await save(store, PLANS[0])
    await submit(served)
    found = await served.client.has("r1", "item_missing")
    assert found.missing == [PLANS[1].mm_hash] and server.calls == []
    await save(store, PLANS[1])
    await notify(served, PLANS[1])
    found = await served.client.until("r1")
    assert len(server.calls) == 1
    assert len(found.token_ids) == 6


async def test_an_item_lost_while_vllm_loads_it_is_asked_for_again_and_again(server, served, store):
    rounds = 6

    async def loses(call: Call):
        for one in PLANS:
            await store.control.execute("DEL", keys.embedding(one.mm_hash))
        return await fails(500)(call)

    await save(store, *PLANS)
    # More often than a failure for another reason is let pass.
    assert rounds > MAX_FAILURES
    server.scripts = [loses] * rounds
    await submit(served)
    for number in range(1, rounds + 1):
        await served.client._wait(lambda n=number: len(served.client.answers["r1"].missing) >= 2 * n)
        await save(store, *PLANS)
        await notify(served, *PLANS)
    found = await served.client.until("r1")
    assert len(server.calls) == rounds + 1
    assert found.finished.reason == "length" and len(found.token_ids) == 6


async def test_a_damaged_body_is_found_when_vllm_failed_and_named_by_its_digest(server, served, store):
    await save(store, *PLANS)
    key = keys.embedding(PLANS[0].mm_hash)
    await store.control.execute("SETRANGE", key, 600, "damage")
    server.scripts = [fails(500)]
    await submit(served)
    found = await served.client.has("r1", "item_missing")
    assert found.missing == [PLANS[0].mm_hash] and len(server.calls) == 1
    digest = served.worker.streams._proxies["proxy"].requests["r1"]._items[PLANS[0].mm_hash]
    await save(store, PLANS[0], digest=digest.item_missing.damaged_digest)
    await notify(served, PLANS[0])
    found = await served.client.until("r1")
    assert len(found.token_ids) == 6


async def test_a_failure_with_all_items_there_is_bounded(server, served, store):
    await save(store, *PLANS)
    server.default = fails(500)
    await submit(served)
    found = await served.client.until("r1")
    assert len(server.calls) == MAX_FAILURES
    assert found.finished.error.code == "internal_error" and found.missing == []
