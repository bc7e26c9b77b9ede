"""Two pictures of a request to a worker in front of a scripted vLLM, and where they are."""

from __future__ import annotations

from typing import Any

from support.engine.pd_serving import slot
from support.vllm.serving import Served, front_model
from triptych.base.hashing import framed_digest
from triptych.base.types import ItemPlan
from triptych.protos import pd_pb2
from triptych.store.embedding_store import EmbeddingStore

QUESTION = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
SAMPLING: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}


def plan(number: int) -> ItemPlan:
    model = front_model()
    key = framed_digest((("number", bytes([number])),))
    width = model.decoder.row_width
    return ItemPlan(key, model.identity.namespace, "image", 4, width, "float32", 4, None, (1, 4, 4))


PLANS = (plan(1), plan(2))


def slots(state: pd_pb2.ItemState = pd_pb2.ITEM_STATE_READY) -> list[pd_pb2.ItemSlot]:
    return [slot(one, state) for one in PLANS]


async def save(store: EmbeddingStore, *plans: ItemPlan, digest: str = "") -> None:
    for one in plans:
        await store.save(one, bytes(one.nbytes), ttl=60, damaged_digest=digest)


async def submit(served: Served, state: pd_pb2.ItemState = pd_pb2.ITEM_STATE_READY, name: str = "r1") -> None:
    reply = await served.client.submit(served.client.message(name, QUESTION, items=slots(state), **SAMPLING))
    assert reply.status == pd_pb2.SubmitReply.STATUS_QUEUED, reply.error


async def notify(served: Served, *plans: ItemPlan) -> None:
    notice = pd_pb2.ItemsNotice(proxy_id="proxy", mm_hashes=[one.mm_hash for one in plans])
    await served.client.stub.NotifyItems(notice)
