"""Whoever may write to the store, or takes a dead worker's place in the network, is sent nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme

from support.certificates import CertificateFolder, issue, pem_of
from support.fakes.fake_workers import picture, user, whole_text
from support.fakes.impostor import HEALTH, Impostor, is_free, port_of, registration
from support.fakes.proxy_fakes import FakeCluster, poll_often
from support.waiting import until
from triptych.base.rpc.internal_token import InternalToken
from triptych.base.rpc.tls.certificates import Certificates
from triptych.protos import common_pb2, encoder_pb2


@pytest.fixture(autouse=True)
def frequent_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    poll_often(monkeypatch)


TOKEN = "token-of-the-cluster-under-attack"


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
                rogue = InternalToken("guess").signed(rogue)
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


def _certificates(path: Path) -> Certificates:
    """A service's, of a CA of its own."""
    authority = trustme.CA()
    return Certificates(CertificateFolder(path).write(issue(authority), pem_of(authority)).internal)


@pytest.mark.parametrize("encrypted", [False, True], ids=["clear text", "of another CA"])
@pytest.mark.parametrize("pool", ["pd", "encoder"])
async def test_an_impostor_at_a_dead_workers_address_is_sent_nothing(store, tmp_path, pool, encrypted):
    ours = _certificates(tmp_path / "ours")
    theirs = _certificates(tmp_path / "theirs") if encrypted else None
    options = {"internal": ours, "worker_certificates": ours}
    async with FakeCluster(store, token=TOKEN, pd_workers=2, encoders=2, **options) as cluster:
        await _answers(cluster)
        dead, _ = cluster.pd_workers if pool == "pd" else cluster.encoders
        port, info = port_of(dead.info), dead.info
        await dead.kill()
        await until(lambda: is_free(port), "the dead worker's port")
        async with Impostor(port, theirs) as process:
            # Its registration is still valid: nobody has withdrawn it.
            assert info in await cluster.registry.workers()
            known = cluster.pool.workers
            await until(
                lambda: not (found := known.get((pool, info.address))) or not found.serving,
                "the proxy to leave it out",
            )
            await _answers(cluster)
            assert (process.methods, process.words) == ([], [])


@pytest.mark.parametrize("pool", ["pd", "encoder"])
async def test_another_process_at_a_dead_workers_address_is_given_no_request(store, pool: str):
    """Without TLS, within one machine: the port may be another cluster's worker's a moment later."""
    async with FakeCluster(store, token=TOKEN, pd_workers=2, encoders=2) as cluster:
        await _answers(cluster)
        dead, _ = cluster.pd_workers if pool == "pd" else cluster.encoders
        port, info = port_of(dead.info), dead.info
        await dead.kill()
        await until(lambda: is_free(port), "the dead worker's port")
        async with Impostor(port, knows=frozenset({"", "its own incarnation"})) as process:
            known = cluster.pool.workers
            await until(
                lambda: HEALTH in process.methods and not known[pool, info.address].serving,
                "the proxy to leave it out",
            )
            await _answers(cluster)
            assert set(process.methods) <= {HEALTH, "/triptych.v1.PDService/Attach"}
            assert b"what is it" not in b"".join(process.words)


async def test_a_worker_that_comes_back_at_its_address_is_used_again(store):
    async with FakeCluster(store, token=TOKEN, pd_workers=1) as cluster:
        await _answers(cluster)
        [worker] = cluster.pd_workers
        port = port_of(worker.info)
        await worker.kill()
        async with Impostor(port, knows=frozenset()) as impostor:
            await until(lambda: HEALTH in impostor.methods, "a health check")
        await until(lambda: is_free(port), "the port")
        before = len(worker.attaches)
        await worker.start()
        await cluster.registry.register(worker.info, term=600.0)
        await until(lambda: len(worker.attaches) > before, "the stream")
        await _answers(cluster)


@pytest.mark.parametrize("insecure", [False, True])
async def test_a_worker_on_another_machine_is_not_called_in_clear_text_unless_that_is_said(
    store, caplog, *, insecure: bool
):
    async with FakeCluster(store, token=TOKEN, insecure=insecure) as cluster:
        remote = InternalToken(TOKEN).signed(replace(cluster.pd_workers[0].info, address="192.0.2.1:50051"))
        await cluster.registry.register(remote, term=600.0)
        for _ in range(3):
            await cluster.pool.poll()
        assert (("pd", remote.address) in cluster.pool.workers) is insecure
        warned = _warnings(caplog, "in clear text: give --tls-cert-file")
        assert len(warned) == (0 if insecure else 1) and all("--insecure" in line for line in warned)
        assert TOKEN not in caplog.text
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
