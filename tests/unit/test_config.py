"""Flags: sizes as people write them, and addresses that cannot work refused with a remedy."""

from __future__ import annotations

import pytest

from triptych.config import (
    EncoderConfig,
    PDConfig,
    ProxyConfig,
    check_advertise,
    check_bind,
    flags_of,
    format_size,
    parse_size,
)
from triptych.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1048576", 1 << 20), ("512MiB", 512 << 20), ("2g", 2 << 30), ("1.5 KB", 1536), ("0", 0)],
)
def test_sizes_are_read_as_people_write_them(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "many", "12 parsecs", "-5MiB", "5MiBB"])
def test_a_text_that_is_no_size_says_how_to_write_one(text):
    with pytest.raises(ConfigError, match="512MiB"):
        parse_size(text)


def test_sizes_are_shown_in_the_largest_fitting_unit():
    assert [format_size(n) for n in (10, 2048, 3 << 20, 5 << 40)] == [
        "10 B",
        "2.0 KiB",
        "3.0 MiB",
        "5120.0 GiB",
    ]


@pytest.mark.parametrize("config", [ProxyConfig, EncoderConfig, PDConfig])
def test_every_flag_has_a_help_text_and_a_default(config):
    flags = flags_of(config)
    assert len(flags) > 8
    assert all(metadata["help"] and default is not None for _, default, metadata in flags)


def test_a_worker_bound_to_the_network_needs_a_token():
    with pytest.raises(ConfigError, match="--internal-token"):
        check_bind("0.0.0.0", "")
    check_bind("0.0.0.0", "secret")
    check_bind("127.0.0.1", "")


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", ":1"])
def test_an_address_that_nobody_can_reach_is_not_advertised(address):
    with pytest.raises(ConfigError, match="--advertise"):
        check_advertise(address)
