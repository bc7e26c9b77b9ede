"""TLS flags come all together, and clear text off loopback only where somebody has said so."""

from __future__ import annotations

import pytest

from triptych.base.config import (
    EncoderConfig,
    ProxyConfig,
    check_front_encryption,
    check_worker_encryption,
    front_door_tls,
    internal_tls,
    with_tls_of,
)
from triptych.base.errors import ConfigError

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
