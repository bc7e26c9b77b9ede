"""The store's password in a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from triptych.ec_connector.store.address import StoreAddress, parse_store_url
from triptych.errors import ConfigError
from triptych.launch.secrets.credentials import store_url


def _store(store: str, file: Path | str = "") -> str:
    return store_url(store, str(file))


def test_the_stores_password_may_come_from_a_file(tmp_path):
    path = tmp_path / "password"
    path.write_text("p@ss/w:rd #1\n")
    assert parse_store_url(_store("redis://bob@h:7000/1", path)).password == "p@ss/w:rd #1"
    assert parse_store_url(_store("unix:///run/s.sock?db=2", path)) == StoreAddress(
        path="/run/s.sock", db=2, password="p@ss/w:rd #1"
    )
    assert parse_store_url(_store("redis://bob@h:7000/1", path)).username == "bob"
    assert _store("redis://h") == "redis://h"


@pytest.mark.parametrize(
    ("store", "content", "named"),
    [
        ("redis://:old-secret@h", "hush", "leave one of them out"),
        ("auto", "hush", "--store"),
        ("", "hush", "--store"),
        ("http://h", "hush", "--store"),
        ("redis://h", "\n", "one line"),
        ("redis://h", "hush\nhush", "one line"),
        ("redis://h", None, "cannot be read"),
    ],
)
def test_a_password_file_that_cannot_be_used_is_named_with_the_remedy(tmp_path, store, content, named):
    path = tmp_path / "password"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=named) as caught:
        _store(store, path)
    assert not re.search("hush|secret", str(caught.value))
