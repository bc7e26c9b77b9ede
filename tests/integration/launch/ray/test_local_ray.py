"""`triptych serve --launcher ray` alone: a Ray of its own on this machine, which ends with it."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.data.traffic import ask_all, expected, mixed_cases
from support.matrix import matrix
from support.options import assert_refused, triptych
from support.processes.cluster import free_port, start_cluster
from support.processes.processes import survivors
from support.processes.web import WebServer
from triptych.apps.launch.model_path import DEMO_MODEL

pytestmark = pytest.mark.timeout(240)

_RAY = ("serve", str(DEMO_MODEL), "--launcher", "ray")
_SHARED = ("--insecure", "--store", "redis://127.0.0.1:1/0", "--internal-token-file")


def gcs_of(pid):
    """The GCS of the Ray in which the process runs, as its raylet's command line names it."""
    while True:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        for word in words:
            if word.startswith("--gcs-address="):
                return word.partition("=")[2]
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def says_without_a_token(address):
    """The code with which a GCS answers a call that bears no token."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"", timeout=20)
        return refused.value.code()


async def test_a_ray_of_its_own_serves_exactly_and_ends_with_it(tmp_path, monkeypatch):
    model = build_checkpoint("qwen3_vl")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    environment = {"TRIPTYCH_INTERNAL_TOKEN": "", "HOME": str(tmp_path)}
    words = ("--launcher", "ray", "--pd-workers", "1")
    cluster = start_cluster(model, tmp_path / "run", *words, environment=environment)
    try:
        pids = [cluster.pid(name) for name in ("encoder-0", "pd-0", "proxy-0", "store")]
        cases = mixed_cases(4, seed=11)
        answers = await ask_all(cluster.url, cases, 64, model="qwen3_vl")
        assert_exact(expected(model, cases, 64), [answer.token_ids for answer in answers])
        assert await says_without_a_token(gcs_of(pids[1])) is grpc.StatusCode.UNAUTHENTICATED
        assert not (tmp_path / ".ray").exists()
    finally:
        code = cluster.stop()
    assert code == 0
    assert survivors(pids) == []
    assert not (tmp_path / "run" / "cluster.json").exists()


@pytest.fixture
def token_file(tmp_path):
    file = tmp_path / "token"
    file.write_text("t" * 32)
    return str(file)


def test_an_address_without_ray_is_refused_at_once(token_file):
    address = f"127.0.0.1:{free_port()}"
    result = triptych(*_RAY, *_SHARED, token_file, "--address", address)
    assert_refused(result, f"--address {address}", "no Ray answers there", "ray start --head")


async def test_an_address_at_which_something_else_answers_is_refused(token_file):
    import asyncio

    async with WebServer() as server:
        address = f"127.0.0.1:{server.port}"
        words = (*_RAY, *_SHARED, token_file, "--address", address)
        result = await asyncio.to_thread(triptych, *words)
    assert_refused(result, f"--address {address}", "is not Ray")


REFUSED = [
    (("--internal-token", "t" * 32), ("--internal-token-file", "Ray keeps")),
    (("--api-key", "k" * 32), ("--api-key-file", "Ray keeps")),
    (("--store", "redis://:hush-3@127.0.0.1:1/0"), ("--store-password-file", "Ray keeps")),
    (("--address", "127.0.0.1:1"), ("--store auto", "redis://10.0.0.5:6379/0")),
    (("--address", "127.0.0.1:1", "--store", "unix:///x"), ("--store unix:", "only this machine")),
    (("--address", "h:1", "--store", "redis://h/0"), ("--internal-token-file", "openssl rand")),
    (("--cluster-name", "A b"), ("--cluster-name", "a-z")),
    (("--cpus-per-worker", "1"), ("--cpus-per-worker", "num_cpus")),
    (("--device", "cuda:1"), ("--device cuda:1", "--device cuda")),
    (("--ray-resources", "/no/such.toml"), ("--ray-resources /no/such.toml cannot be read",)),
]


@pytest.mark.parametrize(("words", "said"), matrix(REFUSED, quick=2))
def test_what_cannot_be_served_on_ray_is_refused_with_the_remedy(words, said):
    result = triptych(*_RAY, *words)
    assert_refused(result, *said)
    assert not any(secret in result.stderr for secret in ("t" * 32, "k" * 32, "hush-3"))
