"""Items that vLLM reads at their encoder workers: named in the call, under the token, beside the store."""

from __future__ import annotations

import pytest

from support.vllm.items import PLANS, notify, save, submit
from support.vllm.scripted_server import fails
from support.vllm.serving import fronting
from triptych.base.source_tickets import SourceTickets
from triptych.base.types import EmbeddingSource
from triptych.pd_worker.vllm.calls import Embeddings
from triptych.protos import common_pb2, pd_pb2
from triptych.registry.matching import DIRECT
from triptych.store.bulk import Loaded, Missing
from triptych.store.control import StoreUnavailable

TOKEN, OTHER = "t" * 32, "u" * 32
SOURCES = tuple(EmbeddingSource(f"{number}" * 32, f"socket-{number}", "") for number in (1, 2))


async def notify_served(served) -> None:
    """Both items are at their encoder workers, and not in the store."""
    await served.client.stub.NotifyItems(
        pd_pb2.ItemsNotice(
            proxy_id="proxy",
            mm_hashes=[one.mm_hash for one in PLANS],
            sources=[common_pb2.EmbeddingSource(name=one.name, socket=one.socket) for one in SOURCES],
        )
    )


@pytest.mark.parametrize(
    ("theirs", "ours", "flags", "direct"),
    [
        (TOKEN, TOKEN, {}, 1),
        (TOKEN, f"{TOKEN}\n{OTHER}", {}, 1),
        (OTHER, TOKEN, {}, 0),
        ("", TOKEN, {}, 0),
        (TOKEN, "", {}, 0),
        (TOKEN, TOKEN, {"ec_transfer": "store"}, 0),
    ],
    ids=["the token", "rotated", "another", "their connector has none", "we have none", "by the store only"],
)
async def test_a_vllm_that_proves_the_token_is_registered_to_read_at_encoders(
    server, store, theirs, ours, flags, direct
):
    server.token = theirs
    async with fronting(server, store, internal_token=ours, **flags) as served:
        assert served.worker.info("127.0.0.1:1", 2).capacity[DIRECT] == direct


@pytest.mark.parametrize("encrypted", [False, True])
async def test_where_services_have_certificates_the_connector_needs_them_too(
    server, store, encrypted, monkeypatch
):
    from triptych.pd_worker.vllm import worker

    monkeypatch.setattr(worker, "internal_tls", lambda config: object())
    server.token, server.encrypted = TOKEN, encrypted
    async with fronting(server, store, internal_token=TOKEN) as served:
        assert served.worker.info("127.0.0.1:1", 2).capacity[DIRECT] == int(encrypted)


async def test_vllm_is_told_where_to_read_and_the_store_is_not_asked(server, store):
    server.token = TOKEN
    async with fronting(server, store, internal_token=TOKEN) as served:
        await submit(served, pd_pb2.ITEM_STATE_PENDING)
        await notify_served(served)
        found = await served.client.until("r1")
        assert len(found.token_ids) == 6 and found.missing == [], "nothing is in the store"
        body = server.calls[0].body
        tickets = SourceTickets(TOKEN)
        for one, source in zip(PLANS, SOURCES, strict=True):
            entry = body["ec_transfer_params"][one.mm_hash]
            assert tickets.read(one.mm_hash, entry, f"generate-tokens-{body['request_id']}-1") == (
                one,
                source,
            )
            assert tickets.read(one.mm_hash, entry, "0" * 32) is None


async def test_each_call_has_tickets_of_its_own(server, store):
    server.token = TOKEN
    async with fronting(server, store, internal_token=TOKEN) as served:
        await save(store, *PLANS)
        server.scripts = [fails(500)]
        await submit(served, pd_pb2.ITEM_STATE_PENDING)
        await notify_served(served)
        await served.client.until("r1")
        ids = {call.body["request_id"] for call in server.calls}
        assert len(ids) == len(server.calls) == 2


async def test_after_a_failure_what_the_store_lacks_is_encoded_again(server, store, monkeypatch):
    from triptych.pd_worker.vllm import calls

    monkeypatch.setattr(calls, "SAVING_SECONDS", 0.0)
    server.token = TOKEN
    async with fronting(server, store, internal_token=TOKEN) as served:
        server.scripts = [fails(500)]
        await submit(served, pd_pb2.ITEM_STATE_PENDING)
        await notify_served(served)
        found = await served.client.has("r1", "item_missing")
        assert sorted(found.missing) == sorted(one.mm_hash for one in PLANS)
        await save(store, *PLANS)
        await notify(served, *PLANS)
        found = await served.client.until("r1")
        assert len(found.token_ids) == 6


async def test_a_server_without_the_token_is_told_nothing(server, store):
    async with fronting(server, store, internal_token=TOKEN) as served:
        await save(store, *PLANS)
        await submit(served, pd_pb2.ITEM_STATE_PENDING)
        await notify_served(served)
        await served.client.until("r1")
        body = server.calls[0].body
        assert "request_id" not in body
        assert all(entry.keys() == {"namespace"} for entry in body["ec_transfer_params"].values())


class SlowStore:
    """A store that gets its value by and by, or does not answer."""

    def __init__(self, *results: Missing | Loaded | StoreUnavailable) -> None:
        self._results = list(results)

    async def look_up(self, keys_):
        return [None for _ in keys_]

    async def load(self, plan, into):
        result = self._results.pop(0)
        if isinstance(result, StoreUnavailable):
            raise result
        return result


async def test_what_an_encoder_has_computed_is_waited_for_while_it_is_saved() -> None:
    store = SlowStore(Missing("not yet"), Missing("not yet"), Loaded(memoryview(b"")))
    key = PLANS[0].mm_hash
    assert await Embeddings(store).missing([PLANS[0]], on_way={key}) == {}
    damaged = SlowStore(Missing("damaged", damaged_digest="d"))
    assert await Embeddings(damaged).missing([PLANS[0]], on_way={key}) == {key: "d"}
    lost = SlowStore(Missing("gone"))
    assert await Embeddings(lost).missing([PLANS[0]]) == {key: ""}


async def test_without_the_store_what_an_encoder_had_is_encoded_again_at_once() -> None:
    store = SlowStore(StoreUnavailable("away"))
    found = await Embeddings(store).missing(PLANS, verify=True, away_is_missing=True)
    assert found == {one.mm_hash: "" for one in PLANS}
    waits = SlowStore(StoreUnavailable("away"), Missing("gone"))
    assert await Embeddings(waits).missing([PLANS[0]], verify=True) == {PLANS[0].mm_hash: ""}
    assert not waits._results, "without another path it is asked again"
