from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from triptych.apps.launch import embedded_store
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.base.errors import ConfigError
from triptych.store.embedding_store import EmbeddingStore


async def test_it_serves_on_a_private_socket_and_leaves_nothing_running(tmp_path: Path) -> None:
    server = EmbeddedStore(tmp_path / "store", 32 << 20)
    server.start()
    pid, path = server.pid, Path(server.url.removeprefix("unix://"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    store = await EmbeddingStore.connect(server.url)
    assert (await store.memory()).max_bytes == 32 << 20
    await store.close()
    server.stop()
    server.stop()
    assert not path.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did not start"):
        EmbeddedStore(tmp_path, -5).start()


def test_a_path_too_long_for_a_socket_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TMPDIR"):
        EmbeddedStore(tmp_path / ("x" * 100), 1 << 20).start()


def test_without_any_server_binary_the_remedies_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_store, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="triptych\\[embedded\\].*--store"):
        embedded_store.find_server_binary()
