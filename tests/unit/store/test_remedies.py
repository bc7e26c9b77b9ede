"""Remedies for errors of the store: each error has one, and only one."""

from __future__ import annotations

import pytest

from triptych.base.errors import ConfigError
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore, connect_configured
from triptych.store.remedies import with_remedy

FALLBACK = "start the store, or correct its address"


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("Authentication required.", "give --store-password-file"),
        ("WRONGPASS invalid username-password pair", "the user or the password is wrong"),
        ("DB index is out of range", "leave the number out of --store"),
        ("Error 111 connecting to h:1. Connect call failed ('h', 1).", "start the store, or correct host"),
        ('Protocol error, got "H" as reply type byte', "no Redis or Valkey answers there"),
        ("no answer in 5 s (at its TLS port, write rediss://)", "write rediss://"),
        ("something that nobody has seen", FALLBACK),
    ],
)
async def test_a_store_that_cannot_be_used_is_told_with_one_remedy(
    monkeypatch: pytest.MonkeyPatch, error: str, remedy: str
) -> None:
    async def refuse(url: str) -> EmbeddingStore:
        raise StoreUnavailable(f"store {url} is not reachable: {with_remedy(error)}")

    monkeypatch.setattr(EmbeddingStore, "connect", refuse)
    with pytest.raises(ConfigError) as told:
        await connect_configured("redis://h:1/0")
    assert remedy in str(told.value)
    assert (FALLBACK in str(told.value)) == (remedy == FALLBACK)
