"""LoRA adapters of a PD worker before vLLM: which calls name them, and what is kept apart by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.vllm.scripted_server import hangs, whole
from support.vllm.serving import Served, fronting
from support.waiting import until
from triptych.base.types import WorkerInfo
from triptych.pd_worker.vllm.adapters import Adapter
from triptych.protos import pd_pb2

SAMPLING = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
ADAPTERS = (Adapter("sql", Path("/sql"), 8, "a" * 64), Adapter("chat", Path("/chat"), 8, "c" * 64))


@pytest.fixture
async def adapted(server, store):
    server.adapters = ("sql", "chat")
    async with fronting(server, store, adapters=ADAPTERS) as served:
        yield served


async def ask(served: Served, name: str, adapter: str, **more: object) -> pd_pb2.SubmitReply:
    message = served.client.message(name, "hello", **{**SAMPLING, **more})
    message.adapter = adapter
    return await served.client.submit(message)


async def test_a_call_names_the_adapter_of_its_request_and_keeps_prefixes_apart(server, adapted) -> None:
    for name, adapter in (("base", ""), ("sql", "a" * 64), ("chat", "c" * 64), ("again", "a" * 64)):
        await ask(adapted, name, adapter)
        assert len((await adapted.client.until(name)).token_ids) == 12
    bodies = [call.body for call in server.calls]
    assert [body.get("model") for body in bodies] == [None, "sql", "chat", "sql"]
    salts = [body["cache_salt"] for body in bodies]
    assert salts[1] == salts[3] and len(set(salts)) == 3


async def test_an_adapter_that_the_worker_lacks_is_for_another_worker(server, adapted) -> None:
    reply = await ask(adapted, "r1", "f" * 64)
    assert reply.status == pd_pb2.SubmitReply.STATUS_REFUSED
    assert (reply.error.code, reply.error.param) == ("unavailable", "model")
    assert not server.calls


async def test_a_request_of_a_proxy_without_adapters_is_the_models(server, adapted) -> None:
    """Proxies of earlier releases leave the field out."""
    await ask(adapted, "r1", "")
    await adapted.client.until("r1")
    assert "model" not in server.calls[0].body


async def test_the_registration_names_adapters_and_their_keys(adapted) -> None:
    info: WorkerInfo = adapted.worker.info("10.0.0.1:5", 1)
    assert info.adapters == {"sql": "a" * 64, "chat": "c" * 64}
    assert adapted.worker.renewed(info).adapters == info.adapters


async def test_kv_that_moves_is_read_and_kept_by_the_adapter_too(server, store) -> None:
    server.adapters = ("sql",)
    # An answer that goes on until the offer has left.
    server.scripts = [whole(kv_transfer_params={"remote_host": "10.0.0.7"}), hangs(3)]
    flags = {"role": "prefill", "kv_connector": "nixl"}
    async with fronting(server, store, adapters=ADAPTERS[:1], **flags) as served:
        await ask(served, "r1", "a" * 64, may_hand_over=True)
        await served.client.has("r1", "offer")
        await served.client.until("r1", tokens=3)
        assert [call.body["model"] for call in server.calls] == ["sql", "sql"]


async def test_a_server_that_comes_back_without_an_adapter_is_not_used(server, adapted, caplog) -> None:
    server.scripts = [hangs(3)]
    await ask(adapted, "r1", "a" * 64)
    await adapted.client.until("r1", tokens=3)
    await server.stop()
    await adapted.until_up(False)
    server.adapters = ("chat",)
    await server.start()
    await until(lambda: "without the LoRA adapter sql" in caplog.text)
    assert not adapted.health.up
    server.adapters = ("sql", "chat")
    await adapted.until_up(True)
