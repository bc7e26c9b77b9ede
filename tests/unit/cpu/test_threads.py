"""Every count of threads and workers follows the quota, not the cores of the machine."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from triptych.apps.launch import serve
from triptych.apps.launch.plan.cores import share_cores
from triptych.base.config import ServeConfig, WorkerRange
from triptych.base.cpu.core_page import CorePage
from triptych.base.cpu.threads import (
    decoder_threads,
    in_short_lived_thread,
    library_environment,
    many_rows,
    media_threads,
    threads_beside,
    threads_of_rank,
    tower_threads,
    use_threads,
)
from triptych.base.machine import resources as machine

ROOT = Path(serve.__file__).resolve().parents[3]
#: Who may ask for cores by their numbers, or hand them on.
BY_NUMBER = {
    "triptych/base/machine/resources.py",
    "triptych/base/cpu/threads.py",
    "triptych/apps/launch/plan/cluster.py",
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
    assert decoder_threads(0, 4096) == 4
    assert tower_threads(0, "0-63") == 4
    assert tower_threads(0, "") == 2
    assert (media_threads(0), media_threads(3)) == (4, 3)
    assert [threads_of_rank(decoder_threads(0, 4096), ranks) for ranks in (1, 2, 3, 8)] == [4, 2, 1, 1]
    names = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    monkeypatch.setattr(os, "environ", {})
    library_environment()
    assert [os.environ[name] for name in names] == ["4", "4", "4"]
    os.environ["OMP_NUM_THREADS"] = "3"
    library_environment()
    assert os.environ["OMP_NUM_THREADS"] == "3", "what the user says counts"


@pytest.mark.usefixtures("pod_of_four")
def test_a_pod_that_requests_cpus_without_a_limit_computes_with_those_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "cpu_quota", lambda *_: None)
    names = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    monkeypatch.setattr(os, "environ", {"TRIPTYCH_CPU_REQUEST": "8"})
    assert decoder_threads(0, 4096) == 8
    assert tower_threads(0, "") == 8, "no other worker shares what a container requests"
    assert tower_threads(3, "") == 3
    library_environment()
    assert [os.environ[name] for name in names] == ["8", "8", "8"]


@pytest.mark.usefixtures("pod_of_four")
def test_a_pod_of_four_cpus_on_64_cores_starts_encoders_for_four(monkeypatch, tmp_path):
    monkeypatch.setattr(serve, "check_memory", lambda config: {})
    chosen, _ = serve.share_machine(ServeConfig())
    assert (chosen.encoders, chosen.encoder_threads) == (WorkerRange.fixed(4), 1)
    assert chosen == share_cores(ServeConfig(), 4)
    page = CorePage(str(tmp_path / "cores"), 0, 4)
    assert page._cores == 4


@pytest.mark.parametrize(
    ("others", "minimum", "maximum", "cores", "threads"),
    [
        (0, 1, 2, 2, 2),
        (1, 1, 2, 2, 1),
        (2, 1, 2, 2, 1),
        (5, 1, 2, 2, 1),
        # A quota, or a worker pinned to fewer cores than its bound.
        (0, 1, 64, 4, 4),
        (3, 2, 8, 8, 5),
        (7, 2, 8, 8, 2),
        # What the user says: a bound from both sides.
        (0, 3, 3, 8, 3),
        (8, 3, 3, 8, 3),
    ],
)
def test_a_worker_takes_the_cores_that_others_leave_within_its_bounds(
    others, minimum, maximum, cores, threads
):
    assert threads_beside(others, minimum, maximum, cores) == threads


@pytest.mark.usefixtures("pod_of_four")
@pytest.mark.parametrize(
    ("threads", "hidden_size", "few", "many"),
    [(0, 256, 1, 256), (0, 1023, 1, 256), (0, 1024, 4, 0), (3, 256, 3, 0)],
)
def test_a_narrow_decoder_takes_more_threads_from_so_many_rows_on_unless_they_are_given(
    threads, hidden_size, few, many
):
    assert decoder_threads(threads, hidden_size) == few
    assert many_rows(threads, hidden_size) == many


def test_torch_gets_both_thread_counts_and_may_get_them_twice():
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


_SHORT_LIVED = """
import os, sys, time, torch
from triptych.base.cpu.threads import in_short_lived_thread

def threads():
    return len(os.listdir("/proc/self/task"))

def work():
    return float(torch.ones(1 << 20).sum())

torch.set_num_threads(2)
before = threads()
assert in_short_lived_thread(work) == 1 << 20
deadline = time.monotonic() + 30
while threads() > before and time.monotonic() < deadline:
    time.sleep(0.01)
after = threads()
work()
print(after - before, threads() - after)
"""


def test_a_short_lived_thread_leaves_no_threads_and_one_that_stays_does():
    run = subprocess.run([sys.executable, "-c", _SHORT_LIVED], capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["0", "1"], run.stderr


_ENGINE = """
import os, threading, time
from pathlib import Path
import torch
import triptych.demo
from triptych.base.config import PDConfig
from triptych.base.cpu.threads import in_short_lived_thread, use_threads
from triptych.base.metrics import PDMetrics
from triptych.pd_worker.native import build_engine, load_model

def threads():
    return set(map(int, os.listdir("/proc/self/task"))) - {one.native_id for one in threading.enumerate()}

use_threads(2)
model = str(Path(triptych.demo.__file__).parent / "model")
config = PDConfig(model=model, dtype="bfloat16", threads=2, kv_memory=16 << 20, encoder_cache_memory=1 << 20)
model = in_short_lived_thread(load_model, config)
before = threads()
engine = build_engine(config, model.decoder, None, print, PDMetrics("m"))
deadline = time.monotonic() + 30
while threads() - before and time.monotonic() < deadline:
    time.sleep(0.01)
print(len(threads() - before))
torch.ones(1 << 20).sum()
print(len(threads() - before))
"""


def test_building_an_engine_leaves_no_threads_of_openmp_beside_those_of_its_steps():
    run = subprocess.run([sys.executable, "-c", _ENGINE], capture_output=True, text=True, timeout=120)
    assert run.stdout.split() == ["0", "1"], run.stderr


def test_a_short_lived_thread_gives_what_its_work_gives():
    def failing(word: str, *, times: int) -> str:
        raise ValueError(word * times)

    assert in_short_lived_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ValueError, match="nono"):
        in_short_lived_thread(failing, "no", times=2)


_START = """
import os, sys
from triptych.apps.cli.commands.services import _start
from triptych.base.config import PDConfig
_start("pd", PDConfig())
print("torch" in sys.modules, os.environ["PYTORCH_ALLOC_CONF"])
import torch
"""


def test_a_services_environment_is_complete_before_it_imports_torch() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTORCH")}
    done = subprocess.run(
        [sys.executable, "-c", _START], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["False", "expandable_segments:True"]


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "expandable_segments:True"), ({"PYTORCH_CUDA_ALLOC_CONF": "x"}, None)]
)
def test_torchs_memory_is_configured_and_a_users_setting_counts(monkeypatch, given, expected):
    monkeypatch.setattr(os, "environ", dict(given))
    library_environment()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected


def test_in_a_service_a_thread_waits_for_the_interpreter_a_tenth_as_long() -> None:
    program = (
        "import sys; from triptych.apps.cli.commands.services import _start; "
        "from triptych.base.config import ProxyConfig; "
        "usual = sys.getswitchinterval(); _start('proxy', ProxyConfig()); "
        "print(sys.getswitchinterval() / usual)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "0.1", done.stderr
