"""Which ports a cluster takes where another one has the usual ones."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from click.testing import CliRunner

from triptych.apps.cli.app import app
from triptych.apps.launch import serve, supervisor
from triptych.base.config import ProxyConfig
from triptych.base.errors import ConfigError


def _chosen(
    monkeypatch: pytest.MonkeyPatch, taken: Collection[int], fixed: Collection[str] = (), **ports: int
) -> tuple[int, int]:
    """HTTP's and gRPC's port, where others have the ports in `taken`."""

    def port_error(host: str, port: int) -> str:
        return "Address already in use" if port in taken else ""

    for module in (serve, supervisor):
        monkeypatch.setattr(module, "port_error", port_error)
    proxy = serve.with_free_ports(ProxyConfig(**ports), fixed)
    return proxy.port, proxy.grpc_port


@pytest.mark.parametrize(
    ("taken", "fixed", "ports", "chosen"),
    [
        ((), (), {}, (8000, 8001)),
        ((8000, 8001), (), {}, (8002, 8003)),
        ((8000,), (), {}, (8002, 8003)),
        ((8001, 8002), (), {}, (8004, 8005)),
        ((8001,), ("port",), {"port": 9000}, (9000, 8003)),
        ((8001,), ("port",), {"port": 8003}, (8003, 8005)),
        ((8000,), ("grpc_port",), {"grpc_port": 8002}, (8004, 8002)),
        ((), ("port", "grpc_port"), {"port": 0, "grpc_port": 0}, (0, 0)),
    ],
)
def test_the_next_free_pair_is_taken_and_what_was_named_stays(monkeypatch, taken, fixed, ports, chosen):
    assert _chosen(monkeypatch, taken, fixed, **ports) == chosen


@pytest.mark.parametrize(
    ("taken", "fixed", "flag"),
    [
        ((8000,), ("port",), "--port 8000"),
        ((8001,), ("grpc_port",), "--grpc-port 8001"),
        (range(8000, 9000), (), "--port 8000"),
    ],
)
def test_a_port_that_was_named_and_a_full_range_are_refused_by_flag(monkeypatch, taken, fixed, flag):
    with pytest.raises(ConfigError, match=flag):
        _chosen(monkeypatch, taken, fixed)


@pytest.mark.parametrize(
    ("arguments", "variables", "fixed"),
    [
        ((), {}, set()),
        (("--port", "8000"), {}, {"port"}),
        ((), {"TRIPTYCH_GRPC_PORT": "9"}, {"grpc_port"}),
    ],
)
def test_a_port_is_named_by_its_flag_or_its_variable(monkeypatch, arguments, variables, fixed):
    calls: list[Collection[str]] = []
    monkeypatch.setattr(serve, "serve_cluster", lambda config, fixed: calls.append(fixed))
    CliRunner().invoke(app, ["serve", *arguments], env=variables, catch_exceptions=False)
    assert calls == [fixed]
