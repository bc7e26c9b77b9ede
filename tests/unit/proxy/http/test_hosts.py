"""Names and origins under which a proxy without keys answers on loopback."""

from __future__ import annotations

import pytest

from triptych.base.config import ProxyConfig
from triptych.base.errors import ConfigError
from triptych.proxy.http.hosts import OwnNames, own_names, read_origins

OWN = [
    "localhost",
    "LOCALHOST:8000",
    "localhost.",
    "127.0.0.1",
    "127.0.0.1:8000",
    "127.1.2.3:1",
    "[::1]:8000",
]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "10.0.0.4:80",
]
FOREIGN += ["", "[::1", "[fe80::1]:8000", "0.0.0.0:8000", "2130706433", "127.1"]


@pytest.mark.parametrize("host", OWN)
def test_this_machines_names_are_its_own(host):
    assert OwnNames().has_host(host)
    assert OwnNames().has_origin(f"http://{host}")


@pytest.mark.parametrize("host", [name for name in FOREIGN if name != "[::1"])
def test_other_names_are_foreign(host):
    assert not OwnNames().has_host(host)
    assert not OwnNames().has_origin(f"https://{host}")


@pytest.mark.parametrize("origin", ["null", "file://", "chrome-extension://localhost", "localhost", ""])
def test_an_origin_that_is_no_page_of_this_machine_is_foreign(origin):
    assert not OwnNames().has_origin(origin)


def test_allowed_hosts_and_origins_are_its_own_too():
    names = OwnNames("chat.example, 10.0.0.4", "https://page.example")
    assert names.has_host("Chat.Example:8000")
    assert names.has_host("10.0.0.4")
    assert names.has_origin("https://chat.example")
    assert names.has_origin("https://page.example")
    assert not names.has_host("page.example")
    assert not names.has_origin("http://page.example")
    assert OwnNames("*").has_host("evil.example")
    assert not OwnNames("chat.example").has_host("evil.example")


@pytest.mark.parametrize("name", ["https://chat.example", "chat.example:8000", "*.example", "a b", "-"])
def test_a_name_that_is_none_is_refused_by_its_flag(name):
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        own_names(ProxyConfig(allowed_hosts=name), keys=True)


def test_a_proxy_with_keys_or_for_other_machines_answers_under_every_name():
    assert own_names(ProxyConfig(host="127.0.0.1"), keys=False) is not None
    assert own_names(ProxyConfig(host="127.0.0.1"), keys=True) is None
    assert own_names(ProxyConfig(host="0.0.0.0"), keys=False) is None


@pytest.mark.parametrize(
    "origin", ["chat.example", "https://chat.example/", "https://chat.example/app", "https://", "a b"]
)
def test_an_origin_that_no_browser_would_send_is_refused_by_its_flag(origin):
    with pytest.raises(ConfigError, match="--allowed-origins"):
        read_origins(f"https://page.example, {origin}")


def test_origins_are_read_as_browsers_write_them():
    text = "HTTPS://Chat.Example, http://localhost:3000, app://desk, *"
    assert read_origins(text) == ["https://chat.example", "http://localhost:3000", "app://desk", "*"]
