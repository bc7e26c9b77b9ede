"""A cluster's secrets stand in no command line, environment, log or file that others could read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import subprocess
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis

from support.data.checkpoints import build_checkpoint
from support.fakes.impostor import Impostor, registration
from support.matrix import matrix
from support.processes.cluster import Cluster, start_cluster, wait_for
from triptych.apps.launch.embedded_store import EmbeddedStore, find_server_binary
from triptych.registry.registry import Registry
from triptych.store.address import parse_store_url
from triptych.store.bulk import BulkError, BulkWriter
from triptych.store.bulk_reader import BulkReader
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore

pytestmark = pytest.mark.timeout(300)

PASSWORD = "correct/horse@battery:staple #1"
TOKEN = "internal-token-that-nobody-sees"
API_KEY = "api-key-that-nobody-sees"
#: As they stand in URLs, too.
SECRETS = [PASSWORD, quote(PASSWORD, safe=""), "battery", TOKEN, API_KEY]


@pytest.fixture
def guarded_store(tmp_path: Path) -> Iterator[Path]:
    """A real server's socket. It asks everybody for a password, and has a user `worker` with the same one."""
    server = EmbeddedStore(tmp_path / "store", 64 << 20)
    server.start()
    path = server.url.removeprefix("unix://")
    try:
        with redis.Redis(unix_socket_path=path) as client:
            client.acl_setuser(
                "worker", enabled=True, passwords=[f"+{PASSWORD}"], keys="*", commands=["+@all"]
            )
            client.config_set("requirepass", PASSWORD)
        yield Path(path)
    finally:
        server.stop()


def _families(pid: int) -> dict[int, str]:
    """The process and all that descend from it: name by process id."""
    parents: dict[int, tuple[int, str]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
                parents[int(folder.name)] = int(rest.split()[1]), name
    found = {pid: parents[pid][1]}
    while True:
        more = {p: name for p, (parent, name) in parents.items() if parent in found and p not in found}
        if not more:
            return found
        found |= more


def _assert_hidden(cluster: Cluster) -> set[str]:
    """No process of the cluster shows a secret in its words or variables; the processes' names."""
    processes = _families(cluster.process.pid)
    for pid, name in processes.items():
        for source in ("cmdline", "environ"):
            shown = ""
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                shown = Path(f"/proc/{pid}/{source}").read_text(errors="replace")
            assert not [secret for secret in SECRETS if secret in shown], (name, source)
    return set(processes.values())


def _assert_unwritten(cluster: Cluster) -> None:
    """No file of the cluster shows a secret, and the one about its processes is nobody else's to read."""
    assert stat.S_IMODE((cluster.run_dir / "cluster.json").stat().st_mode) == 0o600
    for file in cluster.run_dir.rglob("*"):
        if file.is_file():
            text = file.read_text(errors="replace")
            assert not [secret for secret in SECRETS if secret in text], file


async def _registered(url: str, impostor: Impostor) -> list[Any]:
    """The workers; from now on the impostor is registered beside each of them."""
    store = await EmbeddingStore.connect(url)
    try:
        registry = Registry(store)
        workers = await registry.workers()
        for worker in workers:
            await registry.register(registration(worker, impostor.address), term=600.0)
        return workers
    finally:
        await store.close()


@pytest.mark.parametrize("way", matrix(["file", "flag", "variable"]))
async def test_nobody_sees_a_secret_of_a_real_cluster(tmp_path: Path, guarded_store: Path, way: str) -> None:
    user = "worker" if way == "variable" else ""
    url = f"unix://{user}:{quote(PASSWORD, safe='')}@{guarded_store}"
    words: list[str] = []
    environment = {"TRIPTYCH_INTERNAL_TOKEN": TOKEN}
    if way == "flag":
        words = ["--store", url, "--internal-token", TOKEN, f"--api-key={API_KEY}"]
        environment = {}
    elif way == "variable":
        environment |= {"TRIPTYCH_STORE": url, "TRIPTYCH_API_KEY": API_KEY}
    else:
        (tmp_path / "password").write_text(PASSWORD + "\n")
        words = ["--store", f"unix://{guarded_store}", "--store-password-file", str(tmp_path / "password")]
        environment |= {"TRIPTYCH_API_KEY": API_KEY}
    folder = tmp_path / "cluster"
    start = partial(start_cluster, build_checkpoint("qwen3_vl"), folder, environment=environment)
    cluster = await asyncio.to_thread(start, "--threads", "1", *words)
    try:
        names = _assert_hidden(cluster)
        assert {"pd-0", "encoder-0"} <= names
        async with Impostor() as impostor:
            workers = await _registered(url, impostor)
            assert {worker.pool for worker in workers} == {"pd", "encoder"}
            seen = lambda: cluster.log.read_text().count("is ignored") >= 2  # noqa: E731
            await asyncio.to_thread(wait_for, "the impostor's registrations to be seen", seen)
            (model,) = await asyncio.to_thread(cluster.models, API_KEY)
            body = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
            reply = await asyncio.to_thread(cluster.post, body, key=API_KEY)
            assert reply["status"] == 200, reply
            assert impostor.methods == []
        cluster.kill("encoder-0")
        back = lambda: cluster.log.read_text().count("ready: encoder") == 2  # noqa: E731
        await asyncio.to_thread(wait_for, "the encoder's second start", back)
        _assert_hidden(cluster)
        _assert_unwritten(cluster)
    finally:
        await asyncio.to_thread(cluster.stop)
    _assert_log_is_clean(cluster)


def _assert_log_is_clean(cluster: Cluster) -> None:
    text = cluster.log.read_text()
    assert not [secret for secret in SECRETS if secret in text]
    assert "Traceback" not in text


async def test_a_wrong_password_is_told_without_it(guarded_store: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    url = f"unix://:{quote(PASSWORD + '-wrong', safe='')}@{guarded_store}"
    with pytest.raises(StoreUnavailable) as caught:
        await EmbeddingStore.connect(url)
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert "battery" not in shown
    assert str(guarded_store) in shown


async def test_a_server_that_repeats_the_login_gives_nothing_away(tmp_path, caplog):
    """Redis and Valkey repeat a command that they do not know, with what it was given."""
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "deaf.sock"
    words = ["--port", "0", "--unixsocket", str(path), "--rename-command", "AUTH", "NOPE", "--save", ""]
    with subprocess.Popen([str(find_server_binary()), *words], stdout=subprocess.DEVNULL) as server:
        try:
            await asyncio.to_thread(wait_for, "the server's socket", path.exists)
            url = f"unix://worker:{quote(PASSWORD, safe='')}@{path}"
            with pytest.raises(StoreUnavailable) as caught:
                await EmbeddingStore.connect(url)
            for error in (caught.value, await _bulk_error(url)):
                shown = "".join(traceback.format_exception(error))
                assert "battery" not in shown and "correct" not in shown, shown
            assert "battery" not in caplog.text
        finally:
            server.terminate()


async def _bulk_error(url: str) -> Exception:
    errors = []
    for kind in (BulkReader, BulkWriter):
        with pytest.raises(BulkError) as caught:
            await kind.open(parse_store_url(url))
        errors.append(caught.value)
    return ExceptionGroup("both", errors)


@pytest.mark.slow
def test_files_of_a_cluster_are_nobody_elses_whatever_the_umask(tmp_path: Path) -> None:
    made, before = tmp_path / "made", os.umask(0)
    try:
        words = ("--threads", "1", "--run-dir", str(made))
        cluster = start_cluster(build_checkpoint("qwen3_vl"), tmp_path / "log", *words)
    finally:
        os.umask(before)
    try:
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (made, *made.iterdir())}
        assert (modes["made"], modes["cluster.json"], modes["store.sock"]) == (0o700, 0o600, 0o700), modes
    finally:
        cluster.stop()
