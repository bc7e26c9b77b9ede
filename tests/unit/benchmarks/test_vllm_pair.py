"""The words of two vLLM behind workers of ours, alike and apart."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.kills import systems
from benchmarks.kills.systems import Place
from benchmarks.vllm_pair import pair, tokens_read


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    ended = subprocess.CompletedProcess((), 0, stdout="n" * 64)
    monkeypatch.setattr(systems.subprocess, "run", lambda *words, **options: ended)
    return Place(tmp_path / "peer", tmp_path)


def commands(place: Place, threshold: int | None) -> dict[str, list[str]]:
    return {service.name: [*service.command] for service in pair(place, threshold).services}


def test_alike_they_have_neither_roles_nor_a_kv_connector(place: Place) -> None:
    for command in commands(place, None).values():
        assert not {"--role", "--kv-connector", "--kv-transfer-config", "--prefill-threshold"} & {*command}


def test_apart_each_worker_has_the_role_of_its_own_vllm(place: Place) -> None:
    found = commands(place, 256)
    assert found["proxy"][found["proxy"].index("--prefill-threshold") + 1] == "256"
    for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        server, worker = found[f"vllm-{role}"], found[f"worker-{role}"]
        kv = json.loads(server[server.index("--kv-transfer-config") + 1])
        assert (kv["kv_role"], kv["kv_buffer_device"]) == (kv_role, "cpu")
        port = server[server.index("--port") + 1]
        assert worker[worker.index("--engine-url") + 1].endswith(f":{port}")
        assert worker[worker.index("--role") + 1] == role


@pytest.mark.parametrize("threshold", [None, 256])
def test_each_vllm_has_a_core_and_ports_of_its_own(place: Place, threshold: int | None) -> None:
    servers = [one for one in pair(place, threshold).services if one.name.startswith("vllm")]
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_NIXL_SIDE_CHANNEL_PORT"):
        assert len({one.env[name] for one in servers}) == 2


def test_what_was_computed_or_cached_was_not_read_from_another_vllm() -> None:
    name = "vllm:prompt_tokens_by_source"
    sources = {"local_compute": 700, "local_cache_hit": 40, "external_kv_transfer": 1664}
    lines = [f'{name}_total{{engine="0",source="{source}"}} {count}' for source, count in sources.items()]
    assert tokens_read("\n".join([f"# TYPE {name} counter", *lines, ""])) == 1664
    assert tokens_read("") == 0
