"""The systems: the same servers of vLLM on the same cores, with our connector where they are ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.baselines.matrix import Matrix, System, read_matrix
from benchmarks.baselines.measure import target_of
from benchmarks.vllm_fleet.systems import ONE, REPLICAS, Parts, systems_of
from triptych.integrations.vllm.options import parse_options

TINY = Path(__file__).parents[3] / "benchmarks" / "baselines" / "tiny.toml"
NAMESPACE = "a1" * 32


@pytest.fixture
def systems() -> dict[str, System]:
    environment = {"PEER": "/peer", "PEER_PRELOAD": "", "EPD_PROXY": "/peer/epd_proxy.py", "PATH": "/bin"}
    matrix: Matrix = read_matrix(TINY, environment)
    return systems_of(matrix, Parts(matrix, Path("/packages"), NAMESPACE))


def servers(system: System) -> list[tuple[str, ...]]:
    return [command for command in system.commands if any(word.endswith("/vllm") for word in command)]


def value(command: tuple[str, ...], name: str) -> str:
    """Of a flag, or of a variable before the command."""
    if name in command:
        return command[command.index(name) + 1]
    return next(word.partition("=")[2] for word in command if word.startswith(f"{name}="))


def test_every_system_has_both_cores_and_as_much_memory_for_a_server(systems: dict[str, System]) -> None:
    cores = {"triptych": ["0-1"], "triptych-pinned": ["1"], "vllm-epd": ["0", "1"]}
    cores |= dict.fromkeys(REPLICAS, ["0", "1"])
    assert set(systems) == {*ONE, *REPLICAS}
    for name, system in systems.items():
        if name == "vllm":
            assert system.env["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
            assert system.env["VLLM_CPU_KVCACHE_SPACE"] == "1"
            continue
        found = servers(system)
        assert [value(command, "VLLM_CPU_OMP_THREADS_BIND") for command in found] == cores[name]
        assert {value(command, "VLLM_CPU_KVCACHE_SPACE") for command in found} == {"1"}


def test_servers_differ_from_the_baselines_in_the_connector_alone(systems: dict[str, System]) -> None:
    (plain,) = systems["vllm"].commands
    alone = plain[plain.index("serve") : plain.index("--port")]
    for name in ("triptych", *REPLICAS):
        for command in servers(systems[name]):
            assert command[command.index("serve") : command.index("--port")] == alone


@pytest.mark.parametrize(
    ("name", "role"),
    [("triptych", "ec_consumer"), ("replicas-triptych", "ec_consumer"), ("replicas-store", "ec_both")],
)
def test_our_servers_load_the_connector_with_options_that_it_takes(
    systems: dict[str, System], name: str, role: str
) -> None:
    for command in servers(systems[name]):
        transfer = json.loads(value(command, "--ec-transfer-config").replace("${SCRATCH}", "/scratch"))
        assert transfer["ec_role"] == role
        options = parse_options(transfer["ec_connector_extra_config"])
        assert options.namespaces == (NAMESPACE,)
        assert value(command, "PYTHONPATH").endswith(":/packages")
    assert not any("--ec-transfer-config" in one for one in servers(systems["replicas"]))


def test_replicas_take_requests_in_turn(systems: dict[str, System]) -> None:
    target = target_of("http://a:1,http://b:2")
    assert target.urls == ("http://a:1", "http://b:2")
    assert target_of("http://a:1").urls == ("http://a:1",)
    assert [len(systems[name].url.split(",")) for name in REPLICAS] == [1, 2, 2]
    assert len(systems["replicas-triptych"].commands) == 7
