"""What nobody but a forger sends to a worker's port: it is refused, or it harms nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from support.engine.pd_serving import serving, slot
from support.fakes.pd_client import Answer, PDClient
from support.hostile.forgeries import FORGERIES, GREEDY, Forgery, forged_items, honest, model
from triptych.pd_worker.core.encoder_cache import Residency
from triptych.pd_worker.native import NativeWorker
from triptych.protos import pd_pb2
from triptych.store.embedding_store import EmbeddingStore

QUEUED, REFUSED = pd_pb2.SubmitReply.STATUS_QUEUED, pd_pb2.SubmitReply.STATUS_REFUSED


class Victim:
    """A worker, its honest proxy, and what an honest question gets when nobody forges anything."""

    def __init__(self, worker: NativeWorker, client: PDClient) -> None:
        self.worker = worker
        self.client = client
        self.expected: list[int] = []
        self._count = 0

    async def ask(self) -> list[int]:
        """The answer to the honest question."""
        answer = await self.client.until(await self.begin())
        assert answer.finished.reason == "length", answer.finished
        return answer.token_ids

    async def begin(self) -> str:
        self._count += 1
        name = f"honest-{self._count}"
        reply = await self.client.submit(honest(self.client, name))
        assert reply.status == QUEUED, reply
        return name

    async def unharmed(self) -> None:
        """Honest answers are what they were, and nothing is held by anybody."""
        assert await self.ask() == self.expected
        await _at_rest(self)

    def held(self) -> tuple[int, ...]:
        """Requests, blocks, references, reserved bytes, loads."""
        scheduler = self.worker.engine.scheduler
        items = scheduler.items
        return (
            *(self.worker.streams.unfinished, scheduler.num_waiting, scheduler.num_running),
            *(scheduler.kv.num_used, items.cache.references, items.admission.reserved),
            self.worker.engine._connector.num_held,
        )


@pytest.fixture
async def victim(store: EmbeddingStore, store_url: str) -> AsyncIterator[Victim]:
    for plan, body in forged_items():
        await store.save(plan, body, ttl=600)
    async with serving(model(), store_url) as (worker, client):
        victim = Victim(worker, client)
        victim.expected = await victim.ask()
        yield victim


async def _refusal(victim: Victim, forgery: Forgery, request_id: str) -> pd_pb2.SubmitReply:
    message = honest(victim.client, request_id)
    forgery.forge(message)
    reply: pd_pb2.SubmitReply = await victim.client.stub.Submit(message, timeout=20)
    return reply


def _right(forgery: Forgery, reply: pd_pb2.SubmitReply) -> bool:
    error = reply.error
    told = error.param == forgery.param and error.code != "internal_error" and len(error.message) < 1000
    return reply.status == REFUSED and told


async def test_every_forged_request_is_refused_with_its_field_and_no_answer_changes(victim: Victim):
    wrong = []
    for number, forgery in enumerate(FORGERIES):
        beside = await victim.begin() if number % 8 == 0 else ""
        reply = await _refusal(victim, forgery, f"forged-{number}")
        if not _right(forgery, reply):
            wrong.append((forgery.name, str(reply)[:300]))
        if beside:
            assert (await victim.client.until(beside)).token_ids == victim.expected
    assert not wrong
    await victim.unharmed()


def _turned(plan_slot: pd_pb2.ItemSlot) -> None:
    """The plan of a picture with width and height exchanged: as many rows, other positions."""
    frames, rows, columns = plan_slot.plan.grid_thw
    assert rows != columns
    plan_slot.plan.grid_thw[:] = [frames, columns, rows]


async def test_a_false_plan_of_a_picture_that_is_here_is_refused(victim: Victim):
    message = honest(victim.client, "forged")
    _turned(message.items[0])
    assert (await victim.client.submit(message)).status == QUEUED
    answer = await victim.client.until("forged")
    assert (answer.finished.reason, answer.finished.error.code) == ("error", "invalid_request_error")
    assert answer.token_ids == []
    await victim.unharmed()


async def test_a_false_plan_that_came_first_never_becomes_an_answer_and_delays_the_true_one_only(
    store, store_url
):
    flags = {"prefix_caching": False, "encoder_cache_memory": _room_for_one()}
    async with _victim_of_one(store, store_url, **flags) as victim:
        # Another picture takes the room, so that nothing of the first one is here.
        await _fill(victim)
        forged = _about_the_first(victim, "forged", "what?")
        _turned(forged.items[0])
        forged.items[0].state = pd_pb2.ITEM_STATE_PENDING
        assert (await victim.client.submit(forged)).status == QUEUED
        await victim.client.has("forged", "admitted")
        await victim.client.submit(_about_the_first(victim, "true", "what?"))
        refused = await victim.client.until("true")
        # The proxy tries again, here or elsewhere.
        assert refused.finished.error.code == "unavailable"
        await victim.client.stub.NotifyItems(_notice(forged.items[0].plan.mm_hash))
        missing = await victim.client.has("forged", "item_missing")
        assert missing.token_ids == []
        await victim.client.stub.Cancel(pd_pb2.CancelRequest(proxy_id="proxy", request_ids=["forged"]))
        await victim.client.submit(_about_the_first(victim, "again", "what?"))
        assert (await victim.client.until("again")).finished.reason == "length"
        await _at_rest(victim)


@pytest.mark.parametrize("forger", [False, True])
async def test_a_false_plan_leaves_no_block_that_an_honest_request_would_take_for_its_own(
    store, store_url, forger
):
    question = "what do you see in this picture of ours"
    longer = f"{question} and what is it that nobody else but you can see in the picture"
    flags = {"block_size": 4, "encoder_cache_memory": _room_for_one()}
    async with _victim_of_one(store, store_url, **flags) as victim:
        await victim.client.submit(_about_the_first(victim, "first", question))
        prompt = (await victim.client.until("first")).finished.prompt_tokens
        # The embedding goes, the blocks of picture and question stay.
        await _fill(victim)
        if forger:
            forged = _about_the_first(victim, "forged", longer)
            _turned(forged.items[0])
            await victim.client.submit(forged)
            answer = victim.client.answers["forged"]
            await _until(lambda: answer.finished is not None or answer.missing)
            await victim.client.stub.Cancel(pd_pb2.CancelRequest(proxy_id="proxy", request_ids=["forged"]))
        await victim.client.submit(_about_the_first(victim, "true", longer))
        true = (await victim.client.until("true")).finished
        assert 0 < true.cached_tokens < prompt < true.prompt_tokens


def _room_for_one() -> int:
    return sum(plan.nbytes for plan, _ in forged_items()) - 1


def _notice(*mm_hashes: str, proxy_id: str = "proxy") -> pd_pb2.ItemsNotice:
    return pd_pb2.ItemsNotice(proxy_id=proxy_id, mm_hashes=mm_hashes)


async def _until(condition) -> None:
    async with asyncio.timeout(45):
        while not condition():
            await asyncio.sleep(0.02)


def _about(victim: Victim, index: int, request_id: str, text: str) -> pd_pb2.SubmitRequest:
    plan, _ = forged_items()[index]
    parts = [{"type": "image"}, {"type": "text", "text": text}]
    return victim.client.message(request_id, parts, items=[slot(plan)], **GREEDY)


def _about_the_first(victim: Victim, request_id: str, text: str) -> pd_pb2.SubmitRequest:
    return _about(victim, 0, request_id, text)


async def _fill(victim: Victim) -> None:
    """A question about the second, larger picture: the cache has room for nothing else."""
    await victim.client.submit(_about(victim, 1, "filler", "and this?"))
    assert (await victim.client.until("filler")).finished.reason == "length"
    key = forged_items()[0][0].mm_hash
    assert victim.worker.engine.scheduler.items.cache.state(key) is Residency.ABSENT


@asynccontextmanager
async def _victim_of_one(store: EmbeddingStore, store_url: str, **flags: object) -> AsyncIterator[Victim]:
    """A worker whose cache is too small for the honest question about both pictures."""
    for plan, body in forged_items():
        await store.save(plan, body, ttl=600)
    async with serving(model(), store_url, **flags) as (worker, client):
        yield Victim(worker, client)


async def test_a_proxy_that_does_not_know_anothers_id_can_neither_cancel_nor_read_its_requests(victim):
    name = await victim.begin()
    other = PDClient(victim.client.channel, victim.client.model_key, "proxy-other")
    other.answers[name] = Answer()
    await other.attach(pd_pb2.Reattach(request_id=name, attempt=1, position=0))
    await other.stub.Cancel(pd_pb2.CancelRequest(proxy_id="proxy-other", request_ids=[name]))
    await other.stub.NotifyItems(_notice("a" * 64, proxy_id="proxy-other"))
    assert (await other.until(name)).lost
    assert (await victim.client.until(name)).token_ids == victim.expected
    await other.detach()
    await victim.unharmed()


async def test_the_same_request_id_of_two_proxies_is_two_requests(victim: Victim):
    other = PDClient(victim.client.channel, victim.client.model_key, "proxy-other")
    await other.attach()
    name = await victim.begin()
    assert (await other.submit(honest(other, name, max_tokens=3))).status == QUEUED
    assert (await other.until(name)).token_ids == victim.expected[:3]
    assert (await victim.client.until(name)).token_ids == victim.expected
    await other.detach()
    await victim.unharmed()


async def test_attempts_and_positions_out_of_order_are_lost_and_nothing_else(victim: Victim):
    beside = await victim.begin()
    await victim.client.submit(honest(victim.client, "mine"))
    stale = honest(victim.client, "mine", max_tokens=1)
    # An attempt that comes twice is the first one, whatever the second message says.
    assert (await victim.client.stub.Submit(stale, timeout=20)).status == QUEUED
    assert (await victim.client.until("mine")).token_ids == victim.expected
    await victim.client.until(beside)
    await victim.client.detach()
    for number, (attempt, position) in enumerate([(1, 10**9), (7, 0), (1, 2**32 - 1), (0, 0)]):
        again = PDClient(victim.client.channel, victim.client.model_key)
        again.answers["mine"] = Answer()
        await again.attach(pd_pb2.Reattach(request_id="mine", attempt=attempt, position=position))
        assert (await again.until("mine")).lost, number
        await again.detach()
    await victim.client.attach()
    await victim.unharmed()


async def test_notices_of_what_is_no_key_and_of_keys_without_end_are_refused_or_do_nothing(victim: Victim):
    stub = victim.client.stub
    await stub.NotifyItems(_notice("x" * (1 << 20), "", "../" * 30, "A" * 64, "b" * 64))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.NotifyItems(_notice(*("c" * 64 for _ in range(20_000))))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await victim.unharmed()


async def test_a_name_that_is_none_opens_no_stream_and_no_account(victim: Victim) -> None:
    stub = victim.client.stub
    for proxy_id in ("", "p" * (1 << 20), "proxy/x", "proxy\n", "prôxy"):
        cancel = pd_pb2.CancelRequest(proxy_id=proxy_id, request_ids=["x"])
        calls = (
            stub.NotifyItems(_notice("b" * 64, proxy_id=proxy_id), timeout=20),
            stub.Cancel(cancel, timeout=20),
            stub.Attach(pd_pb2.AttachRequest(proxy_id=proxy_id), timeout=20).read(),
        )
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert set(victim.worker.streams._proxies) <= {"proxy"}


async def _at_rest(victim: Victim) -> None:
    await _until(lambda: not any(victim.held()))
