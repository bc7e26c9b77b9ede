"""A real cluster with TLS at every port: members and clients are served, all others are refused."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from httpx2 import Client as HttpClient
from openai import OpenAI

from support.certificates import NAME, CertificateFolder, issue, pem_of
from support.processes.cluster import PATIENCE, Cluster, free_port, running_cluster, scrape
from triptych.apps.client import Client
from triptych.apps.launch.model_path import DEMO_MODEL
from triptych.demo import examples

pytestmark = pytest.mark.timeout(300)


@dataclass
class Encrypted:
    """The cluster, its files, and the CAs that they come from now."""

    cluster: Cluster
    services: CertificateFolder
    front: CertificateFolder
    authority: trustme.CA
    scaler: tuple[str, int]

    @property
    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.front.ca))

    @property
    def ports(self) -> dict[str, tuple[str, int]]:
        """Host and port of every TLS port."""
        found = {worker.pool: worker.address for worker in self.cluster.workers()}
        found |= {"http": self.cluster.url.removeprefix("https://"), "grpc": self.cluster.grpc_address}
        return {name: (host, int(port)) for name, (host, _, port) in _parted(found)}

    def answers(self) -> bool:
        """Whether a question about a picture is answered, over a connection of its own."""
        with Client(self.cluster.url, ca_file=str(self.front.ca), retries=0) as client:
            text = client.ask(examples.EXAMPLE_QUESTION, [examples.EXAMPLE_IMAGE], temperature=0)
        return text == examples.EXPECTED_ANSWER


def _parted(addresses: dict[str, str]) -> Iterator[tuple[str, tuple[str, str, str]]]:
    return ((name, address.rpartition(":")) for name, address in addresses.items())


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encrypted]:
    folder = tmp_path_factory.mktemp("encrypted")
    authority = trustme.CA()
    services = CertificateFolder(folder / "services").write(
        issue(authority, NAME, "localhost"), pem_of(authority)
    )
    front = CertificateFolder(folder / "front").write(issue(authority, "127.0.0.1"), pem_of(authority))
    metrics_port, scaler_port = free_port(), free_port()
    words = ("--metrics-port", str(metrics_port), "--encoders", "1..2", "--scaler-port", str(scaler_port))
    with running_cluster(DEMO_MODEL, folder / "run", *services.flags, *front.front_flags, *words) as cluster:
        cluster.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        yield Encrypted(cluster, services, front, authority, ("127.0.0.1", scaler_port))


def test_clients_that_trust_the_ca_are_answered(encrypted: Encrypted) -> None:
    assert encrypted.answers()
    with urllib.request.urlopen(f"{encrypted.cluster.url}/ready", context=encrypted.trust) as reply:
        assert reply.status == 200
    with OpenAI(
        base_url=f"{encrypted.cluster.url}/v1", api_key="-", http_client=HttpClient(verify=encrypted.trust)
    ) as client:
        (model,) = client.models.list().data
        question = [{"role": "user", "content": "hello"}]
        chunks = client.chat.completions.create(
            model=model.id,
            messages=question,
            stream=True,
            max_tokens=3,  # type: ignore[arg-type]
        )
        assert len([chunk for chunk in chunks if chunk.choices]) >= 3
    asked = subprocess.run(
        [sys.executable, "-m", "triptych.apps.cli", "ask", examples.EXAMPLE_QUESTION]
        + ["--url", encrypted.cluster.url, "--ca-file", str(encrypted.front.ca)]
        + ["--image", str(examples.EXAMPLE_IMAGE)],
        text=True, capture_output=True, timeout=PATIENCE, check=True,
    )  # fmt: skip
    assert asked.stdout.strip() == examples.EXPECTED_ANSWER


def test_a_client_that_does_not_know_the_ca_is_told_what_to_give(encrypted: Encrypted) -> None:
    asked = subprocess.run(
        [sys.executable, "-m", "triptych.apps.cli", "ask", "?", "--url", encrypted.cluster.url],
        text=True,
        capture_output=True,
        timeout=PATIENCE,
    )
    assert asked.returncode == 1
    assert "--ca-file" in asked.stderr and "Traceback" not in asked.stderr


def test_every_process_shows_when_its_certificates_expire(encrypted: Encrypted) -> None:
    name = "triptych_certificate_expiry_seconds"
    month = time.time() + 30 * 86400
    for pool in ("encoder", "pd"):
        for page in encrypted.cluster.metrics(pool):
            assert page[name] == pytest.approx(month, abs=3600)
    page = urllib.request.urlopen(encrypted.cluster.metrics_url, timeout=10).read().decode()
    shown = [line.split("{")[1].split("}")[0] for line in page.splitlines() if line.startswith(name + "{")]
    assert sorted(shown) == ['certificate="front_door"', 'certificate="internal"']
    assert scrape(encrypted.cluster.metrics_url)[name] > month


def test_kedas_port_is_encrypted_and_asks_for_no_certificate(encrypted: Encrypted) -> None:
    context = ssl.create_default_context(cafile=str(encrypted.services.ca))
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(encrypted.scaler, 10.0) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        assert secured.selected_alpn_protocol() == "h2"


def client_context(
    pair: tuple[bytes, bytes] | None = None, folder: Path = Path(), alpn: str = "h2"
) -> ssl.SSLContext:
    """A client's that verifies nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([alpn])
    if pair is not None:
        made = CertificateFolder(folder).write(pair)
        context.load_cert_chain(made.cert, made.key)
    return context


#: What a gRPC client says first, and a SETTINGS frame.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def is_served(place: tuple[str, int], context: ssl.SSLContext | None) -> bool:
    """Whether the port speaks HTTP with this client; False when it cuts it off."""
    with contextlib.suppress(OSError), socket.create_connection(place, 20.0) as plain:
        side = plain if context is None else context.wrap_socket(plain)
        with side:
            side.sendall(PREFACE)
            return side.recv(1 << 12).startswith((b"\x00\x00", b"HTTP"))
    return False


@pytest.mark.parametrize("context", [None, client_context()], ids=["clear text", "no certificate"])
def test_workers_refuse_all_that_are_no_members(encrypted, tmp_path, context):
    member = client_context(issue(encrypted.authority), tmp_path)
    for pool in ("encoder", "pd"):
        assert not is_served(encrypted.ports[pool], context)
        assert is_served(encrypted.ports[pool], member)
    assert encrypted.answers()
