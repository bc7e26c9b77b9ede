"""Every count of threads and workers follows the quota, not the cores of the machine."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch

from triptych.cli.app import thread_environment
from triptych.cli.commands import serve
from triptych.config import EncoderConfig
from triptych.cpu.core_page import CorePage
from triptych.cpu.cpus import claim_core
from triptych.cpu.torch_threads import use_threads
from triptych.encoder_worker import worker as encoder_worker
from triptych.launch.plan.cores import share_cores
from triptych.machine import resources as machine
from triptych.pd_worker import service as pd_service

ROOT = Path(serve.__file__).resolve().parents[3]
#: Who may ask for cores by their numbers, or hand them on.
BY_NUMBER = {
    "triptych/machine/resources.py",
    "triptych/cpu/cpus.py",
    "triptych/cli/commands/serve.py",
    "pd_worker/service.py",
}


@pytest.fixture
def pod_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 cores of two nodes, of which a quota pays for four and a half."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(machine, "allowed_cpus", lambda *_: frozenset(range(64)))
    monkeypatch.setattr(machine, "cpu_quota", lambda *_: 4.5)
    monkeypatch.setattr(machine, "numa_nodes", lambda *_: [frozenset(range(32)), frozenset(range(32, 64))])


@pytest.mark.usefixtures("pod_of_four")
def test_a_pod_of_four_cpus_on_64_cores_computes_with_four_threads(monkeypatch: pytest.MonkeyPatch):
    assert pd_service.default_threads(4096) == 4
    assert encoder_worker.torch_threads(EncoderConfig(cpus="0-63")) == 4
    assert encoder_worker.torch_threads(EncoderConfig()) == 2
    names = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    monkeypatch.setattr(os, "environ", {})
    thread_environment()
    assert [os.environ[name] for name in names] == ["4", "4", "4"]
    os.environ["OMP_NUM_THREADS"] = "3"
    thread_environment()
    assert os.environ["OMP_NUM_THREADS"] == "3", "what the user says counts"


@pytest.mark.usefixtures("pod_of_four")
def test_a_pod_of_four_cpus_on_64_cores_starts_encoders_for_four(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    given = {"topology": "epd", "device": "cpu", "cpus_per_worker": 0, "cpu_sharing": "auto"}
    given |= {"encoders": 0, "encoder_threads": 0, "threads": 0}
    monkeypatch.setattr(serve, "check_memory", lambda *_: {})
    chosen, _ = serve._share_machine(tmp_path, given, 0)
    assert (chosen["encoders"], chosen["encoder_threads"]) == (4, 1)
    assert chosen == share_cores(given, 4)
    page = CorePage(str(tmp_path / "cores"), 0, 4)
    assert page._cores == 4


@pytest.mark.usefixtures("pod_of_four")
def test_a_pd_worker_under_a_quota_keeps_to_no_core(monkeypatch: pytest.MonkeyPatch, caplog):
    assert not machine.may_claim_cores()
    monkeypatch.setattr(pd_service, "claim_core", lambda cores: pytest.fail("a core is claimed"))
    monkeypatch.setattr(pd_service, "torch_threads", lambda config, decoder: 1)
    config = pd_service.PDConfig(keep_core=True, core_page="cores")
    with caplog.at_level("INFO"):
        assert pd_service._own_core(config, type("Model", (), {"decoder": None})()) is None  # type: ignore[arg-type]
    assert "keeps to no core" in caplog.text


def test_a_pd_worker_that_may_claims_a_core(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pd_service, "may_claim_cores", lambda: True)
    monkeypatch.setattr(pd_service, "torch_threads", lambda config, decoder: 1)
    monkeypatch.setattr(pd_service, "claim_core", lambda cores: claim_core({6000, 6001}))
    config = pd_service.PDConfig(keep_core=True, core_page="cores")
    core = pd_service._own_core(config, type("Model", (), {"decoder": None})())  # type: ignore[arg-type]
    assert core is not None and core.core == 6001
    core.release()


def test_torch_is_told_both_counts_and_a_second_time_does_no_harm():
    before = torch.get_num_threads()
    try:
        use_threads(1)
        use_threads(1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_no_service_counts_the_cores_of_the_machine():
    folders = ("triptych", "proxy", "pd_worker", "encoder_worker", "ec_connector")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    counting = {"cpu_count", "sched_getaffinity", "process_cpu_count"}
    found = {
        str(file.relative_to(ROOT))
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in counting
    }
    assert found <= BY_NUMBER, found - BY_NUMBER
