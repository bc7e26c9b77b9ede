"""New CA, certificates and keys for proxy and workers under load: no request is lost or begun again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.certificates import CertificateFolder, issue, pem_of
from support.fakes.fake_workers import picture, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.base.rpc.channels import make_channel
from triptych.base.rpc.tls.certificates import Certificates

CLIENTS = 4


class Side:
    """One side's files, and the certificates that are made of them."""

    def __init__(self, path: Path, authority: trustme.CA) -> None:
        self.folder = CertificateFolder(path).write(issue(authority), pem_of(authority))
        self.certificates = Certificates(self.folder.internal)

    async def takes(self, authority: trustme.CA, *trusted: trustme.CA) -> None:
        """A new certificate of this CA, and trust in those: in use when this returns."""
        self.folder.write(issue(authority), pem_of(*trusted))
        written = self.folder.cert.read_bytes()
        await until(lambda: self.certificates.current().cert == written, "the new certificate")

    async def trusts(self, *trusted: trustme.CA) -> None:
        """Trust in those CAs, with the certificate that is there."""
        self.folder.write((self.folder.cert.read_bytes(), self.folder.key.read_bytes()), pem_of(*trusted))
        await until(lambda: self.certificates.current().ca == pem_of(*trusted), "the new CAs")


class Load:
    """Clients that ask about ever new pictures, one after another."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.answers = 0
        self._cluster = cluster
        self._stopped = False
        self._pictures = itertools.count()

    async def run(self) -> None:
        while not self._stopped:
            text = await self._cluster.stream(user("?", picture(f"load-{next(self._pictures)}")))
            assert text == whole_text(8)
            self.answers += 1

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        clients = [asyncio.create_task(self.run()) for _ in range(CLIENTS)]
        try:
            yield
        finally:
            self._stopped = True
            await asyncio.gather(*clients)

    async def more(self) -> None:
        """Waits until requests that began after this moment have been answered."""
        seen = self.answers
        await until(lambda: self.answers > seen + 2 * CLIENTS, "answers")


@pytest.fixture
def old() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def new() -> trustme.CA:
    return trustme.CA()


def channels_of(cluster: FakeCluster) -> list[aio.Channel]:
    return [cluster.pool.channel(pool, address) for pool, address in cluster.pool.workers]


async def moved(cluster: FakeCluster, before: list[aio.Channel]) -> None:
    """Waits until every worker has another channel than before."""
    await until(lambda: not set(channels_of(cluster)) & set(before), "new channels to all workers")


async def is_answered(address: str, side: Side) -> bool:
    async with make_channel(address, tls=side.certificates.current()) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10.0)
        except aio.AioRpcError:
            return False
        return True


async def test_a_new_ca_is_brought_in_and_the_old_one_taken_out_under_load(store, tmp_path, old, new):
    proxy, workers = Side(tmp_path / "proxy", old), Side(tmp_path / "workers", old)
    stranger = Side(tmp_path / "stranger", old)
    async with FakeCluster(
        store, encoders=2, internal=proxy.certificates, worker_certificates=workers.certificates
    ) as cluster:
        load = Load(cluster)
        pd = cluster.pd_workers[0]
        async with load.running():
            await load.more()
            first = channels_of(cluster)
            await proxy.trusts(old, new)
            await workers.trusts(old, new)
            await moved(cluster, first)
            await workers.takes(new, old, new)
            await load.more()
            second = channels_of(cluster)
            pd.gate.clear()
            await until(lambda: len(pd.requests) == CLIENTS, "requests in the middle of their answers")
            await proxy.takes(new, old, new)
            await moved(cluster, second)
            await until(lambda: cluster.dispatcher.in_flight == CLIENTS, "the same, or those after them")
            pd.gate.set()
            await load.more()
            third = channels_of(cluster)
            await proxy.trusts(new)
            await workers.trusts(new)
            await moved(cluster, third)
            await load.more()
            assert await is_answered(pd.address, proxy)
            assert not await is_answered(pd.address, stranger)
        assert len(pd.attaches) == 1, "the stream of events goes on over its first connection"
        assert {submit.attempt for submit in pd.submits} == {1}
        await cluster.at_rest()


async def test_a_worker_that_has_not_read_its_files_yet_stays_connected(
    store, tmp_path, old, new, caplog, monkeypatch
):
    """Files reach machines at different times, and sometimes in the wrong order."""
    monkeypatch.setattr("triptych.base.rpc.worker_connection.RETRY_SECONDS", 1.0)
    proxy, workers = Side(tmp_path / "proxy", old), Side(tmp_path / "workers", old)
    async with FakeCluster(
        store, internal=proxy.certificates, worker_certificates=workers.certificates
    ) as cluster:
        load = Load(cluster)
        async with load.running():
            await load.more()
            first = channels_of(cluster)
            await proxy.takes(new, new)
            await until(lambda: caplog.text.count("does not answer over TLS") == 2, "two warnings")
            await load.more()
            assert channels_of(cluster) == first
            await workers.takes(new, new)
            await moved(cluster, first)
            await load.more()
        assert caplog.text.count("does not answer over TLS") == 2
        assert {submit.attempt for submit in cluster.pd_workers[0].submits} == {1}


async def test_a_channel_that_was_replaced_ends_when_its_last_stream_has(store, tmp_path, old, monkeypatch):
    monkeypatch.setattr("triptych.base.rpc.channels._IDLE_MS", 1000)
    proxy, workers = Side(tmp_path / "proxy", old), Side(tmp_path / "workers", old)
    async with FakeCluster(
        store, internal=proxy.certificates, worker_certificates=workers.certificates
    ) as cluster:
        encoder, pd = cluster.encoders[0], cluster.pd_workers[0]
        before = channels_of(cluster)
        await proxy.takes(old, old)
        await moved(cluster, before)
        replaced = cluster.pool.connection("encoder", encoder.address)._replaced
        await until(lambda: not replaced, "the end of a channel without calls")
        attached = cluster.pool.connection("pd", pd.address)._replaced
        assert len(attached) == 1
        pd.break_streams()
        await until(lambda: len(pd.attaches) == 2, "a new stream")
        await until(lambda: not attached, "the end of the channel whose stream has broken")
