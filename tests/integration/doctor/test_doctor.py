"""The doctor over a real store, and over a running cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from support.processes.cluster import Cluster, running_cluster, wait_for
from triptych.apps.doctor.finding import CheckOutcome, CheckResult
from triptych.apps.doctor.store import check_store
from triptych.apps.launch.model_path import DEMO_MODEL
from triptych.store.embedding_store import EmbeddingStore

#: What `serve` says to people, on stdout.
GREETING = ("Triptych answers", "Paste ", "The picture:", "The answer:", "  ", "Ctrl-C")


async def _by_check(url: str) -> dict[str, CheckResult]:
    return {result.check: result for _, results in await check_store(url) for result in results}


async def test_a_user_who_may_ask_for_little_learns_what_it_may(store: EmbeddingStore, store_url: str):
    await store.control.execute("ACL", "SETUSER", "default", "-time", "-eval", "-evalsha")
    try:
        findings = await _by_check(store_url)
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
