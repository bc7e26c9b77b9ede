"""The doctor over a store right or wrong, and over a running cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from support.processes.cluster import Cluster, free_port, running_cluster, wait_for
from support.stores.server import StoreServer
from support.stores.users import admin_url, guarded_server, role_url
from triptych.apps.cli.app import app
from triptych.apps.doctor.finding import CheckOutcome, CheckResult
from triptych.apps.doctor.store import check_store
from triptych.apps.launch.model_path import DEMO_MODEL
from triptych.base.config import MIB
from triptych.store import keys
from triptych.store.embedding_store import EmbeddingStore

#: What `serve` says to people, on stdout.
GREETING = ("Triptych answers", "Paste ", "The picture:", "The answer:", "  ", "Ctrl-C")


async def by_check(url: str, nbytes: int = MIB) -> dict[str, CheckResult]:
    return {result.check: result for _, results in await check_store(url, nbytes) for result in results}


async def test_a_user_who_may_ask_for_little_learns_what_it_may(store: EmbeddingStore, store_url: str):
    await store.control.execute("ACL", "SETUSER", "default", "-time", "-eval", "-evalsha")
    try:
        findings = await by_check(store_url, 0)
    finally:
        await store.control.execute("ACL", "SETUSER", "default", "+@all")
    assert findings["policy"].verdict is findings["clock"].verdict is CheckOutcome.OK
    assert findings["workers"].verdict is CheckOutcome.NOTE and "administrator" in findings["workers"].remedy


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(DEMO_MODEL, tmp_path_factory.mktemp("doctor"), "--log-format", "json") as running:
        yield running


def _doctor(cluster: Cluster) -> tuple[int, str]:
    words = ["doctor", "--store", cluster.store_url, "--url", cluster.url]
    done = subprocess.run(
        [sys.executable, "-m", "triptych.apps.cli", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | cluster.token,
    )
    assert not done.stderr
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_running_cluster_is_well_until_its_pd_worker_is_gone(cluster: Cluster):
    code, text = _doctor(cluster)
    assert code == 0, text
    assert "takes requests" in text and text.count("is reached") == 2 and "demo" in text
    pid = cluster.pid("pd-0")
    os.kill(pid, 19)  # it answers nobody, and is not replaced
    try:
        wait_for("the proxy to notice", lambda: "no PD worker is live" in _doctor(cluster)[1])
        assert _doctor(cluster)[0] == 1
    finally:
        os.kill(pid, 18)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_line_of_every_process_is_json_with_the_request_as_a_field(cluster: Cluster):
    reply = cluster.post({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2})
    assert reply["status"] == 200

    def ended() -> list[dict[str, object]]:
        lines = cluster.log.read_text().splitlines()
        # The greeting is for people: it goes to stdout.
        records = [json.loads(line) for line in lines if line.startswith("{")]
        return [record for record in records if record.get("status") == 200]

    record = wait_for("the record of the request", ended)[-1]
    assert len(str(record["request_id"])) == 32 and record["process"] == "proxy"
    assert record["completion_tokens"] == 2
    lines = cluster.log.read_text().splitlines()
    assert {"serve", "proxy", "encoder-0", "pd-0"} <= {
        json.loads(line)["process"] for line in lines if line.startswith("{")
    }
    others = [line for line in lines if line and not line.startswith(("{", *GREETING))]
    assert not others


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    with guarded_server(tmp_path) as server:
        yield server


async def test_a_store_with_the_roles_users_has_nothing_that_fails_and_keeps_nothing_of_the_check(server):
    found = await by_check(admin_url(server.url))
    assert found.keys() >= {"version", "policy", "memory", "latency", "bandwidth", "epoch", "TLS", "login"}
    # Rates and latency depend on the machine.
    steady = {result.verdict for check, result in found.items() if check not in ("latency", "bandwidth")}
    assert steady == {CheckOutcome.OK}
    assert server.call("KEYS", "*") == [keys.EPOCH.encode()]


@pytest.mark.parametrize("role", ["proxy", "encoder", "pd"])
async def test_a_roles_own_user_checks_what_it_may(server: StoreServer, role: str) -> None:
    found = await by_check(role_url(server.url, role))
    assert not [result for result in found.values() if result.verdict is CheckOutcome.FAIL]
    assert ("written" in found["bandwidth"].found) == (role == "encoder")
    assert not [key for key in server.call("KEYS", "*") if key.startswith(b"ec:")]


async def test_a_store_that_evicts_registrations_and_is_open_to_all_is_named_so(tmp_path: Path) -> None:
    server = StoreServer(tmp_path / "open")
    server.start()
    try:
        server.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        server.call("CONFIG", "SET", "maxmemory", "0")
        found = await by_check(server.url)
    finally:
        server.kill()
    assert found["policy"].verdict is CheckOutcome.FAIL
    assert found["memory"].verdict is CheckOutcome.FAIL
    assert found["login"].verdict is CheckOutcome.NOTE


def test_the_command_prints_the_table_and_ends_with_1_for_a_store_that_is_down() -> None:
    ran = CliRunner().invoke(app, ["store", "check", f"redis://127.0.0.1:{free_port()}/0"])
    assert ran.exit_code == 1
    assert "FAIL  reach" in ran.output
    assert "start the store" in ran.output
