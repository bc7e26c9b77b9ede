"""Ports of one proxy: no two of its servers are to listen at one."""

from __future__ import annotations

import pytest

from triptych.base.config import ProxyConfig, ScalingConfig, check_ports_differ
from triptych.base.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (ProxyConfig(port=9000, grpc_port=9000), "--grpc-port 9000 is --port's too"),
        (ProxyConfig(port=9000, metrics_port=9000), "--metrics-port 9000 is --port's too"),
        (ProxyConfig(scaling=ScalingConfig(scaler_port=8001)), "--scaler-port 8001 is --grpc-port's too"),
    ],
)
def test_a_port_that_two_servers_are_given_is_refused(config: ProxyConfig, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_ports_differ(config)


def test_free_ports_and_other_addresses_are_no_conflict() -> None:
    check_ports_differ(ProxyConfig(port=0, grpc_port=0))
    check_ports_differ(ProxyConfig(port=9000, metrics_port=9000, metrics_host="127.0.0.2"))
