"""LoRA adapters at the door: listed, named as a model, served by workers that have them, counted, and allowed
to keys."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from openai import AsyncOpenAI, NotFoundError

from support.fakes.fake_pd import FakePD
from support.fakes.fake_workers import MODEL_KEY, picture, user, whole_text
from support.fakes.proxy_fakes import FakeCluster, raw_post
from support.waiting import until
from triptych.base.rpc.channels import make_channel
from triptych.protos import proxy_pb2, proxy_pb2_grpc
from triptych.proxy.auth.keys import KeyLimits, KeyRing
from triptych.store.embedding_store import EmbeddingStore

SQL, OTHER = "a" * 64, "c" * 64
ALICE, BOB = "tk-alice-0123456789", "tk-bob-0123456789"
TEXT = [{"role": "user", "content": "count"}]


async def add(cluster: FakeCluster, adapters: dict[str, str]) -> FakePD:
    """A PD worker with these adapters beside the cluster's own, which has none."""
    worker = FakePD()
    worker.adapters = adapters
    await worker.start()
    await cluster.registry.register(worker.info, term=600.0)
    await until(lambda: worker.attaches)
    return worker


@pytest.fixture
async def adapted(cluster: FakeCluster) -> AsyncIterator[FakePD]:
    worker = await add(cluster, {"sql": SQL})
    yield worker
    await worker.kill()


async def answer(client: AsyncOpenAI, model: str, messages: Any = TEXT, **more: Any) -> Any:
    return await client.chat.completions.create(model=model, messages=messages, max_tokens=8, **more)


async def test_an_adapter_is_listed_with_the_model_that_it_is_of(cluster, adapted) -> None:
    models = {model.id: model.model_extra for model in (await cluster.client.models.list()).data}
    assert {name: extra["parent"] for name, extra in models.items()} == {"demo": None, "sql": "demo"}
    one = await cluster.client.models.retrieve("sql")
    assert one.model_extra["parent"] == "demo"


async def test_requests_that_name_it_go_to_workers_that_have_it(cluster, adapted) -> None:
    replies = await asyncio.gather(*(answer(cluster.client, "sql") for _ in range(8)))
    assert {reply.model for reply in replies} == {"sql"}
    assert {reply.choices[0].message.content for reply in replies} == {whole_text(8)}
    assert {(one.model_key, one.adapter) for one in adapted.submits} == {(MODEL_KEY, SQL)}
    assert not cluster.pd_workers[0].submits
    await asyncio.gather(*(answer(cluster.client, "demo") for _ in range(8)))
    submits = [*cluster.pd_workers[0].submits, *adapted.submits[8:]]
    assert [one.adapter for one in submits] == [""] * 8


async def test_an_adapter_that_is_nobodys_is_not_found(cluster, adapted) -> None:
    with pytest.raises(NotFoundError, match="there is demo, sql") as error:
        await answer(cluster.client, "sq")
    assert error.value.body["param"] == "model"


async def test_the_model_and_all_of_its_adapters_share_embeddings(cluster, adapted) -> None:
    for name in ("demo", "sql", "demo"):
        await answer(cluster.client, name, user("what?", picture("p")))
    assert len(cluster.jobs) == 1


async def test_a_lost_answer_goes_on_where_the_same_adapter_is(cluster, adapted) -> None:
    adapted.pause_at = 5
    asked = asyncio.create_task(answer(cluster.client, "sql"))
    await until(lambda: cluster.received == 5)
    other = await add(cluster, {"sql": OTHER})
    await adapted.kill()
    assert not asked.done()
    last = await add(cluster, {"sql": SQL, "more": OTHER})
    assert (await asked).choices[0].message.content == whole_text(8)
    assert [one.adapter for one in last.submits] == [SQL]
    assert not other.submits and not cluster.pd_workers[0].submits
    for worker in (other, last):
        await worker.kill()


async def test_calls_are_counted_by_adapter(cluster, adapted) -> None:
    for name in ("demo", "sql", "sql"):
        await answer(cluster.client, name)
    value = cluster.metrics.registry.get_sample_value
    labels = {"model": "demo", "adapter": "sql", "status": "200"}
    assert value("triptych_adapter_requests_total", labels) == 2


async def test_a_key_has_a_right_to_the_models_and_adapters_that_its_line_names(
    store: EmbeddingStore, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    lines = [
        f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()} {more}"
        for name, key, more in (("alice", ALICE, ""), ("bob", BOB, "models=demo,chat"))
    ]
    path.write_text("\n".join(lines))
    async with FakeCluster(store, keys=KeyRing("", str(path), KeyLimits())) as cluster:
        worker = await add(cluster, {"sql": SQL, "chat": OTHER})
        base = f"http://127.0.0.1:{cluster.port}/v1"
        async with contextlib.AsyncExitStack() as stack:
            alice, bob = [
                await stack.enter_async_context(AsyncOpenAI(base_url=base, api_key=key, max_retries=0))
                for key in (ALICE, BOB)
            ]
            assert {model.id for model in (await alice.models.list()).data} == {"demo", "sql", "chat"}
            assert {model.id for model in (await bob.models.list()).data} == {"demo", "chat"}
            assert (await answer(alice, "sql")).model == "sql"
            assert (await answer(bob, "chat")).model == "chat"
            for refused in (
                bob.models.retrieve("sql"),
                answer(bob, "sql"),
                bob.completions.create(model="sql", prompt="x"),
                bob.responses.create(model="sql", input="x"),
            ):
                with pytest.raises(NotFoundError, match="there is demo, chat"):
                    await refused
        body, header = b'{"model": "sql", "prompt": "x"}', {"Authorization": f"Bearer {BOB}"}
        assert (await raw_post(cluster.port, body, header, path="/tokenize"))[0] == 404
        channel = make_channel(f"127.0.0.1:{cluster.grpc_port}")
        await channel.channel_ready()
        stub = proxy_pb2_grpc.ProxyServiceStub(channel)
        key = [("authorization", f"Bearer {BOB}")]
        say = proxy_pb2.ChatMessage(role="user", parts=[proxy_pb2.ChatPart(text="x")])
        asked = proxy_pb2.ChatRequest(model="sql", messages=[say])
        named = await stub.ListModels(proxy_pb2.ListModelsRequest(), metadata=key)
        assert list(named.models) == ["demo", "chat"]
        with pytest.raises(grpc.aio.AioRpcError, match="there is demo, chat"):
            _ = [event async for event in stub.Chat(asked, metadata=key)]
        await channel.close()
        assert {one.adapter for one in worker.submits} == {SQL, OTHER}
        await worker.kill()
