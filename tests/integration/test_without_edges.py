"""The core without its edges: a copy of the product in which their folders are deleted answers a picture."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from support.data.checkpoints import build_checkpoint
from support.data.traffic import picture
from support.processes.cluster import PATIENCE, Cluster, data_url, start_cluster

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]


def edges() -> list[str]:
    """The modules that the import contract names as edges."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    [contract] = [each for each in linter["contracts"] if each["type"] == "protected"]
    return list(contract["protected_modules"])


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of processes that run the copy: nothing of the checkout is found there."""
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(ROOT / "triptych", folder / "triptych", ignore=shutil.ignore_patterns("__pycache__"))
    for edge in filter(lambda name: name.startswith("triptych."), edges()):
        path = folder / edge.replace(".", "/")
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.with_suffix(".py").unlink()
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


def status_of(cluster: Cluster, path: str, body: bytes | None = None) -> int:
    try:
        with urllib.request.urlopen(f"{cluster.url}{path}", body, timeout=PATIENCE) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_proxy_encoder_and_pd_worker_answer_a_picture(core: dict[str, str], tmp_path: Path) -> None:
    cluster = start_cluster(build_checkpoint("qwen3_vl", tmp_path / "m"), tmp_path / "run", environment=core)
    try:
        image = {"type": "image_url", "image_url": {"url": data_url(picture(0, 64, 64))}}
        content = [image, {"type": "text", "text": "what is it?"}]
        reply = cluster.post({"messages": [{"role": "user", "content": content}], "max_tokens": 2})
        assert reply["usage"]["completion_tokens"] == 2
        assert status_of(cluster, "/metrics") == 200
        body = json.dumps({"input": "x", "messages": []}).encode()
        gone = ["/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank"]
        assert {path: status_of(cluster, path, body) for path in gone} == dict.fromkeys(gone, 404)
        assert [status_of(cluster, path) for path in ("/", "/cluster", "/openapi.json")] == [404] * 3
    finally:
        cluster.stop()


def test_the_command_line_has_the_commands_of_the_core(core: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "triptych.apps.cli"]
    known = {**os.environ, **core}
    shown = subprocess.run([*command, "--help"], env=known, capture_output=True, text=True, check=True).stdout
    listed = {line.split()[0] for line in shown.partition("Commands:")[2].splitlines() if line.strip()}
    assert {"serve", "proxy", "encoder", "pd"} <= listed
    assert not listed & {"ask", "top", "doctor", "check", "store", "bench", "plan"}
    ray = [*command, "serve", str(tmp_path), "--launcher", "ray"]
    refused = subprocess.run(ray, env=known, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "--launcher ray: triptych.apps.launch.ray is not installed here" in refused.stderr
