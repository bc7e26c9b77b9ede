"""Addresses, tokens and TLS flags that cannot work are refused with a remedy."""

from __future__ import annotations

import pytest

from triptych.base.config import (
    EncoderConfig,
    ProxyConfig,
    check_advertise,
    check_bind,
    check_front_encryption,
    check_worker_encryption,
    front_door_tls,
    internal_tls,
    read_internal_token,
    with_tls_of,
)
from triptych.base.errors import ConfigError


def test_a_worker_bound_to_the_network_needs_a_token():
    with pytest.raises(ConfigError, match="--internal-token"):
        check_bind("0.0.0.0", "")
    check_bind("0.0.0.0", "secret")
    check_bind("127.0.0.1", "")


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", ":1"])
def test_an_unreachable_address_is_not_advertised(address):
    with pytest.raises(ConfigError, match="--advertise"):
        check_advertise(address)


def test_the_token_may_come_from_a_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("hush-0123456789a\n")
    assert read_internal_token("", str(path)) == "hush-0123456789a"
    with pytest.raises(ConfigError, match="both set"):
        read_internal_token("x", str(path))
    path.write_text("\n")
    with pytest.raises(ConfigError, match="one line"):
        read_internal_token("", str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_internal_token("", str(tmp_path / "none"))
    path.write_text("hush-012345678\n")
    for given in (("hush", ""), ("", str(path))):
        with pytest.raises(ConfigError, match="16 characters") as caught:
            read_internal_token(*given)
        assert "hush" not in str(caught.value)


def test_a_token_file_has_one_token_or_two_while_it_is_rotated(tmp_path):
    path = tmp_path / "token"
    path.write_text("the-new-token-of-all\n\nthe-old-token-of-all\n")
    assert read_internal_token("", str(path)) == "the-new-token-of-all\nthe-old-token-of-all"
    for content in ("one-token-of-three\n" * 3, "the-new-token-of-all\nshort", "\n"):
        path.write_text(content)
        with pytest.raises(ConfigError, match="--internal-token-file"):
            read_internal_token("", str(path))


ALL = {"tls_cert_file": "c", "tls_key_file": "k", "tls_ca_file": "ca"}


@pytest.mark.parametrize("missing", ALL)
def test_a_flag_that_is_missing_is_named(missing: str) -> None:
    given = {name: value for name, value in ALL.items() if name != missing}
    with pytest.raises(ConfigError, match=f"needs --{missing.replace('_', '-')} too"):
        internal_tls(EncoderConfig(**given))
    assert internal_tls(EncoderConfig()) is None
    found = internal_tls(EncoderConfig(**ALL))
    assert found is not None and (found.cert, found.key, found.ca) == ("c", "k", "ca")
    with pytest.raises(ConfigError, match="--http-cert-file needs --http-key-file too"):
        front_door_tls(ProxyConfig(http_cert_file="c"))


def test_the_name_of_the_services_is_not_left_out() -> None:
    with pytest.raises(ConfigError, match="--tls-name"):
        internal_tls(EncoderConfig(**ALL, tls_name=""))


def test_workers_talk_to_other_machines_by_tls_or_as_they_are_told() -> None:
    with pytest.raises(ConfigError, match="--tls-cert-file.*--insecure"):
        check_worker_encryption("0.0.0.0", EncoderConfig())
    check_worker_encryption("127.0.0.1", EncoderConfig())
    check_worker_encryption("0.0.0.0", EncoderConfig(**ALL))
    check_worker_encryption("0.0.0.0", EncoderConfig(insecure=True))


def test_a_front_door_in_clear_text_says_what_it_shows() -> None:
    with pytest.raises(ConfigError, match="shows API keys, prompts.*--http-cert-file.*--insecure"):
        check_front_encryption(ProxyConfig(host="0.0.0.0", api_key_file="keys"))
    with pytest.raises(ConfigError, match="shows prompts"):
        check_front_encryption(ProxyConfig(host="0.0.0.0", **ALL))
    check_front_encryption(ProxyConfig())
    check_front_encryption(ProxyConfig(host="0.0.0.0", insecure=True))
    check_front_encryption(ProxyConfig(host="0.0.0.0", http_cert_file="c", http_key_file="k"))


def test_workers_have_the_tls_of_their_cluster() -> None:
    given = with_tls_of(EncoderConfig(), ProxyConfig(**ALL, tls_name="n", insecure=True))
    assert internal_tls(given) == internal_tls(EncoderConfig(**ALL, tls_name="n")) and given.insecure
