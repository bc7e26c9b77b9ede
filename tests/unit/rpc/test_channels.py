"""Channels between services, and calls that a server does not know."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import trustme
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from support.certificates import CertificateFolder, issue, pem_of
from support.waiting import until
from triptych.base.rpc.channels import UnknownCalls, listen, make_channel, make_server
from triptych.base.rpc.tls.certificates import Certificates
from triptych.base.rpc.tls.material import TlsMaterial


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def folder(tmp_path: Path, authority: trustme.CA) -> CertificateFolder:
    return CertificateFolder(tmp_path / "server").write(issue(authority), pem_of(authority))


@pytest.fixture
def certificates(folder: CertificateFolder) -> Certificates:
    return Certificates(folder.internal)


@asynccontextmanager
async def serving(certificates: Certificates, *, mutual: bool = True) -> AsyncIterator[int]:
    """The port of a health service."""
    server = make_server()
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    port = listen(server, "127.0.0.1:0", certificates, mutual=mutual)
    await server.start()
    yield port
    await server.stop(None)


async def answer(channel: aio.Channel) -> str:
    """The status code of a health check."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=10.0)
    except aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def answer_to(port: int, material: TlsMaterial | None) -> str:
    async with make_channel(f"127.0.0.1:{port}", tls=material) as channel:
        return await answer(channel)


async def test_a_service_with_a_certificate_of_the_ca_is_answered(certificates: Certificates) -> None:
    async with serving(certificates) as port:
        assert await answer_to(port, certificates.current()) == "OK"


async def test_others_are_refused_and_members_are_served_meanwhile(certificates, authority):
    ours = certificates.current()
    stranger = issue(trustme.CA())
    expired = issue(authority, days=-0.1)
    async with serving(certificates) as port, make_channel(f"127.0.0.1:{port}", tls=ours) as member:
        assert await answer(member) == "OK"
        for client in (
            None,  # clear text
            replace(ours, cert=b"", key=b""),
            replace(ours, cert=stranger[0], key=stranger[1]),
            replace(ours, cert=expired[0], key=expired[1]),
        ):
            assert await answer_to(port, client) == "UNAVAILABLE"
            assert await answer(member) == "OK"


async def test_a_server_of_another_ca_or_name_is_not_called(certificates, tmp_path, authority):
    ours = certificates.current()
    other = trustme.CA()
    fake = CertificateFolder(tmp_path / "other").write(issue(other), pem_of(other))
    async with serving(Certificates(fake.internal)) as port:
        assert await answer_to(port, ours) == "UNAVAILABLE"
    elsewhere = replace(CertificateFolder(tmp_path / "name").internal, name="another.name")
    CertificateFolder(tmp_path / "name").write(issue(authority, "another.name"), pem_of(authority))
    async with serving(Certificates(elsewhere)) as port:
        assert await answer_to(port, ours) == "UNAVAILABLE"
        assert await answer_to(port, replace(ours, name="another.name")) == "OK"


async def test_a_server_without_mutual_tls_asks_for_no_certificate(certificates: Certificates) -> None:
    async with serving(certificates, mutual=False) as port:
        assert await answer_to(port, replace(certificates.current(), cert=b"", key=b"")) == "OK"
        assert await answer_to(port, None) == "UNAVAILABLE"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
async def test_old_versions_of_tls_are_refused(certificates: Certificates, version: ssl.TLSVersion) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        context.minimum_version = context.maximum_version = version

    def connect(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=10.0) as plain, context.wrap_socket(plain):
            pass

    async with serving(certificates, mutual=False) as port:
        with pytest.raises(ssl.SSLError, match="(?i)version|alert|eof"):
            await asyncio.to_thread(connect, port)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        await asyncio.to_thread(connect, port)


async def test_new_files_hold_for_new_connections_and_old_ones_go_on(certificates, folder):
    old = certificates.current()
    other = trustme.CA()
    async with serving(certificates) as port, make_channel(f"127.0.0.1:{port}", tls=old) as before:
        assert await answer(before) == "OK"
        folder.write(issue(other), pem_of(other))
        await until(lambda: certificates.current() is not old, "the new files")
        assert await answer_to(port, certificates.current()) == "OK"
        assert await answer_to(port, old) == "UNAVAILABLE"
        assert await answer(before) == "OK"
        assert before.get_state() is grpc.ChannelConnectivity.READY


async def test_a_call_that_a_release_lacks_is_named_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    server = make_server("token", [UnknownCalls(lambda: now[0])])
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    caplog.set_level(logging.WARNING)
    try:
        async with make_channel(f"127.0.0.1:{port}") as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert caplog.records == []
            challenge = channel.unary_unary("/triptych.v1.Auth/Challenge")
            for said in (1, 1, 2):
                with pytest.raises(aio.AioRpcError) as caught:
                    await challenge(b"")
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
                assert [record.levelname for record in caplog.records] == ["WARNING"] * said
                now[0] += 40.0
        assert "'/triptych.v1.Auth/Challenge'" in caplog.text and "proxies first" in caplog.text
    finally:
        await server.stop(None)
