"""Sizes as people write them."""

from __future__ import annotations

import pytest

from triptych.base.config import format_size, parse_size
from triptych.base.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1048576", 1 << 20), ("512MiB", 512 << 20), ("2g", 2 << 30), ("1.5 KB", 1536), ("0", 0)],
)
def test_sizes_are_read_as_people_write_them(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "many", "12 parsecs", "-5MiB", "5MiBB"])
def test_an_invalid_size_is_an_error_that_shows_the_format(text):
    with pytest.raises(ConfigError, match="512MiB"):
        parse_size(text)


def test_sizes_are_shown_in_the_largest_fitting_unit():
    assert [format_size(n) for n in (10, 2048, 3 << 20, 5 << 40)] == [
        "10 B",
        "2.0 KiB",
        "3.0 MiB",
        "5120.0 GiB",
    ]
