"""Ports that cannot be bound: the error gives the system's reason, before a model is loaded."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from triptych.base.config import EncoderConfig
from triptych.base.errors import ConfigError
from triptych.base.rpc.ports import check_port, refused_port
from triptych.base.status_server import ServiceStatus, status_server
from triptych.proxy.http.server import bind
from triptych.registry.worker_server import worker_process

#: An address of documents, which no machine has.
FOREIGN = "203.0.113.9"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_of_a_taken_port_another_is_the_remedy_and_of_a_foreign_address_an_own_one(taken: int) -> None:
    check_port("127.0.0.1", 0, "--port")
    with pytest.raises(ConfigError, match=r"already in use\): --port N picks another$"):
        check_port("127.0.0.1", taken, "--port")
    with pytest.raises(ConfigError, match=f"put an address of this machine in place of {FOREIGN}"):
        check_port(FOREIGN, 0, "--port")
    assert "from 1024 on" in str(refused_port("127.0.0.1", 80, "--port", "Permission denied"))


def test_no_server_calls_a_port_taken_where_the_address_is_another_machines() -> None:
    with pytest.raises(ConfigError, match="an address of this machine"):
        bind(FOREIGN, 0)
    with (
        pytest.raises(ConfigError, match="an address of this machine"),
        status_server(FOREIGN, 0, ServiceStatus()),
    ):
        pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "--port"),
        ({"port": 0, "tls_cert_file": "c", "tls_key_file": "k", "tls_ca_file": "a"}, "--tls-cert-file"),
        ({"port": 0, "host": "0.0.0.0", "internal_token": "0123456789abcdef"}, "--tls-cert-file"),
    ],
)
async def test_what_a_worker_cannot_serve_with_is_refused_before_it_asks_the_store_or_loads(
    taken: int, given: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = EncoderConfig(**{"store": "redis://127.0.0.1:1/0", "port": taken, **given})
    with pytest.raises(ConfigError, match=message) as refused:
        async with worker_process(config):
            pass
    assert "--store" not in str(refused.value)
