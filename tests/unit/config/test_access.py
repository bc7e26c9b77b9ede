"""Addresses and tokens that cannot work are refused with a remedy."""

from __future__ import annotations

import pytest

from triptych.base.config import check_advertise, check_bind, read_internal_token
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
