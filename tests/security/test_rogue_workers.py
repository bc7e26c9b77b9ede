"""Whoever may write to the store, or takes a dead worker's port, learns nothing that opens a real worker."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from typing import Any

import pytest

from support.fakes.fake_workers import picture, user, whole_text
from support.fakes.impostor import (
    AUTHENTICATE,
    Answer,
    Impostor,
    at_random,
    by_echo,
    is_free,
    passed_on,
    port_of,
    registration,
)
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.base.rpc.channels import make_channel
from triptych.base.rpc.proofs import SIZE, InternalKey
from triptych.base.rpc.server_auth import SESSION_HEADER
from triptych.base.types import WorkerInfo
from triptych.protos import common_pb2, encoder_pb2, pd_pb2, pd_pb2_grpc

TOKEN = "token-of-the-cluster-under-attack"


async def _opens(worker: WorkerInfo, session: bytes) -> bool:
    """Whether the worker takes a call with this proof."""
    async with make_channel(worker.address) as channel:
        stub = pd_pb2_grpc.PDServiceStub(channel)
        metadata = ((SESSION_HEADER, session),)
        call = stub.Cancel(pd_pb2.CancelRequest(proxy_id="x"), metadata=metadata, timeout=10)
        return (await call.code()).name == "OK"


async def _learnt_nothing(impostor: Impostor, worker: WorkerInfo) -> None:
    """Neither the token, nor a key made from it, nor a piece of a proof that a real worker accepts."""
    everything = b"\0".join(impostor.words)
    key = InternalKey(TOKEN)._key
    for secret in (TOKEN.encode(), key, key.hex().encode()):
        assert secret not in everything
    pieces = {word for word in impostor.words if len(word) >= SIZE}
    for word in pieces:
        assert not await _opens(worker, word)
    blocks = {word[n : n + SIZE] for word in pieces for n in range(0, len(word) - SIZE + 1, SIZE)}
    for four in itertools.islice(itertools.permutations(sorted(blocks), 4), 200):
        assert not await _opens(worker, b"".join(four))


def _warnings(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


@pytest.mark.parametrize(
    "forged", ["unsigned", "signed with a guess", "a real one's proof", "another's name"]
)
async def test_a_registration_that_is_not_signed_with_the_token_is_not_even_called(store, caplog, forged):
    async with FakeCluster(store, token=TOKEN) as cluster, Impostor() as impostor:
        for real in (cluster.pd_workers[0].info, cluster.encoders[0].info):
            rogue = registration(real, impostor.address)
            if forged == "signed with a guess":
                rogue = InternalKey("guess").signed(rogue)
            elif forged == "a real one's proof":
                rogue = replace(rogue, proof=real.proof)
            elif forged == "another's name":
                rogue = replace(real, address=impostor.address)
            await cluster.registry.register(rogue, term=600.0)
        for _ in range(3):
            await cluster.pool.poll()
        for number in range(3):
            reply = await cluster.ask(user("what is it", picture(f"p{number}")))
            assert reply.choices[0].message.content == whole_text(8)
        assert impostor.methods == []
        assert len(cluster.pool.workers) == 2
        for pool in ("pd", "encoder"):
            warned = _warnings(caplog, "is ignored")
            assert len([line for line in warned if repr(pool) in line and impostor.address in line]) == 1


async def _answers(cluster: FakeCluster, count: int = 3) -> None:
    """Requests are answered as ever, whoever else says that it is a worker."""
    for number in range(count):
        reply = await cluster.ask(user("what is it", picture(f"p{number}")))
        assert reply.choices[0].message.content == whole_text(8)


def _ways(live: WorkerInfo) -> dict[str, Answer]:
    return {
        "random": at_random,
        "echo": by_echo,
        "relay": passed_on(live, as_meant_for_it=False),
        "rewritten relay": passed_on(live, as_meant_for_it=True),
    }


@pytest.mark.parametrize("way", ["random", "echo", "relay", "rewritten relay"])
@pytest.mark.parametrize("pool", ["pd", "encoder"])
async def test_an_impostor_at_a_dead_workers_address_gets_challenges_and_nothing_else(
    store, caplog, pool: str, way: str
):
    caplog.set_level(logging.INFO)
    async with FakeCluster(store, token=TOKEN, pd_workers=2, encoders=2) as cluster:
        await _answers(cluster)
        dead, live = cluster.pd_workers if pool == "pd" else cluster.encoders
        port = port_of(dead.info)
        info = dead.info
        await dead.kill()
        await until(lambda: is_free(port), "the dead worker's port")
        async with Impostor(port, _ways(live.info)[way]) as impostor:
            # Its registration is still valid: nobody has withdrawn it.
            assert info in await cluster.registry.workers()
            await until(lambda: AUTHENTICATE in impostor.methods, "a challenge")
            await _answers(cluster)
            await until(lambda: _warnings(caplog, "does not prove"), "the warning")
            assert impostor.secrets_asked_for == []
            await _learnt_nothing(impostor, cluster.pd_workers[1].info)
            known = cluster.pool.workers
            await until(
                lambda: not (found := known.get((pool, info.address))) or not found.serving,
                "the proxy to leave it out",
            )


async def test_a_worker_that_comes_back_at_its_address_is_used_again(store):
    async with FakeCluster(store, token=TOKEN, pd_workers=1) as cluster:
        await _answers(cluster)
        [worker] = cluster.pd_workers
        port = port_of(worker.info)
        await worker.kill()
        async with Impostor(port) as impostor:
            await until(lambda: AUTHENTICATE in impostor.methods, "a challenge")
        await until(lambda: is_free(port), "the port")
        before = len(worker.attaches)
        await worker.start()
        await cluster.registry.register(worker.info, term=600.0)
        await until(lambda: len(worker.attaches) > before, "the stream")
        await _answers(cluster)


async def test_an_owner_that_a_rogue_lease_names_is_not_called(store):
    async with FakeCluster(store, token=TOKEN) as cluster, Impostor() as impostor:
        [encoder] = cluster.encoders
        failure: dict[str, Any] = {"retryable": True, "owner_address": impostor.address, "owner_token": "t"}
        encoder.failures.append(_failure(**failure))
        reply = await cluster.ask(user("what is it", picture("p")))
        assert reply.choices[0].message.content == whole_text(8)
        assert encoder.failures == []
        assert impostor.methods == []


def _failure(**fields: Any) -> Any:
    error = common_pb2.Error(code="unavailable", message="another encoder has the item")
    return encoder_pb2.JobFailed(error=error, **fields)
