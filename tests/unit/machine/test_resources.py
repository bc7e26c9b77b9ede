"""Resources of the machine, and the load of a worker."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.clock import Clock
from triptych.base.engine_beat import BUSY_SECONDS, BusyClock
from triptych.base.machine import resources as machine
from triptych.base.machine.gpu_load import gpu_reader, read_gpu
from triptych.base.machine.resources import (
    allowed_cpus,
    available_memory,
    cpu_quota,
    may_claim_cores,
    numa_nodes,
    threads_of_one_worker,
    usable_cpus,
)
from triptych.base.machine.worker_load import GpuLoad, WorkerLoad, decode_load, read_load

V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


class FakeMachine:
    """`cgroups` are the lines of /proc/self/cgroup, `mounts` those of /proc/self/mountinfo."""

    def __init__(self, root: Path, *, cgroups: str = "0::/", mounts: str = V2, meminfo: str = "") -> None:
        self.root = root
        self._write("proc/self/cgroup", cgroups)
        self._write("proc/self/mountinfo", "22 1 0:20 / /proc rw - proc proc rw\n" + mounts)
        self._write("proc/meminfo", meminfo or "MemTotal: 999 kB\nMemAvailable: 8388608 kB\n")

    def group(self, folder: str, files: Mapping[str, object]) -> FakeMachine:
        """Files of one cgroup, or of any other folder."""
        for name, content in files.items():
            self._write(f"{folder}/{name}", f"{content}\n")
        return self

    def _write(self, name: str, content: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


GIB = 1 << 30
V1 = "\n".join(
    f"{32 + i} 31 0:{29 + i} {{inside}} /sys/fs/cgroup/{names} rw - cgroup cgroup rw,{names}"
    for i, names in enumerate(("cpu,cpuacct", "cpuset", "memory"))
)
V1_PATHS = "5:memory:{0}\n3:cpuset:{0}\n2:cpu,cpuacct:{0}\n1:name=systemd:{0}\n"
TREE = "sys/fs/cgroup"
HOST = frozenset(range(64))


def test_a_machine_without_cgroups_is_as_large_as_the_affinity(tmp_path: Path):
    assert usable_cpus(HOST, tmp_path) == 64
    assert cpu_quota(tmp_path) is None
    assert threads_of_one_worker({3}, tmp_path) == 1


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [
        ("400000 100000", 4),
        ("350000 100000", 3),
        ("50000 100000", 1),
        ("max 100000", 64),
        ("1 0", 64),
        ("?", 64),
    ],
)
def test_a_pod_of_some_cpus_on_64_cores_uses_those_whole_ones_that_its_quota_pays_for(tmp_path, quota, cpus):
    FakeMachine(tmp_path).group(TREE, {"cpu.max": quota})
    assert usable_cpus(HOST, tmp_path) == cpus


@pytest.mark.parametrize(
    ("requested", "quota", "cpus", "threads"),
    [
        ("8", "max 100000", 8, 8),
        ("48", "max 100000", 48, 32),
        ("96", "max 100000", 64, 32),
        ("8", "1600000 100000", 8, 8),
        ("8", "400000 100000", 4, 4),
        ("0", "max 100000", 64, 32),
        ("", "max 100000", 64, 32),
        ("eight", "max 100000", 64, 32),
    ],
)
def test_a_pod_without_a_quota_uses_what_it_requests_of_64_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requested: str, quota: str, cpus: int, threads: int
):
    made = FakeMachine(tmp_path).group(TREE, {"cpu.max": quota})
    made.group("sys/devices/system/node/node0", {"cpulist": "0-31"})
    made.group("sys/devices/system/node/node1", {"cpulist": "32-63"})
    monkeypatch.setenv("TRIPTYCH_CPU_REQUEST", requested)
    assert usable_cpus(HOST, tmp_path) == cpus
    assert threads_of_one_worker(HOST, tmp_path) == threads


def test_the_tightest_quota_on_the_way_up_counts(tmp_path: Path):
    made = FakeMachine(tmp_path, cgroups="0::/kubepods/pod1/app")
    made.group(f"{TREE}/kubepods/pod1/app", {"cpu.max": "max 100000"})
    made.group(f"{TREE}/kubepods/pod1", {"cpu.max": "250000 100000"})
    made.group(f"{TREE}/kubepods", {"cpu.max": "6000000 100000"})
    made.group(f"{TREE}/kubepods/other", {"cpu.max": "100000 100000"})
    assert cpu_quota(tmp_path) == 2.5
    assert usable_cpus(HOST, tmp_path) == 2


@pytest.mark.parametrize("inside", ["/", "/docker/abc"])
def test_version_1_is_read_on_a_host_and_in_a_container(tmp_path: Path, inside: str):
    path = "/docker/abc"
    made = FakeMachine(tmp_path, cgroups=V1_PATHS.format(path), mounts=V1.format(inside=inside))
    below = path.removeprefix(inside.rstrip("/"))
    made.group(f"{TREE}/cpu,cpuacct{below}", {"cpu.cfs_quota_us": 300000, "cpu.cfs_period_us": 100000})
    made.group(f"{TREE}/cpuset{below}", {"cpuset.cpus": "8-15"})
    assert usable_cpus(HOST, tmp_path) == 3
    assert allowed_cpus(HOST, tmp_path) == set(range(8, 16))


def test_on_a_hybrid_host_the_quota_of_version_1_counts_beside_an_empty_version_2(tmp_path: Path):
    hybrid = V1.format(inside="/") + "\n41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    made = FakeMachine(tmp_path, cgroups=V1_PATHS.format("/") + "0::/\n", mounts=hybrid)
    made.group(f"{TREE}/cpu,cpuacct", {"cpu.cfs_quota_us": 100000, "cpu.cfs_period_us": 50000})
    made.group(f"{TREE}/unified", {"cgroup.procs": "1"})
    assert usable_cpus(HOST, tmp_path) == 2


def test_a_path_that_leads_out_of_a_container_means_what_is_mounted(tmp_path: Path):
    FakeMachine(tmp_path, cgroups="0::/../../elsewhere").group(TREE, {"cpu.max": "200000 100000"})
    assert usable_cpus(HOST, tmp_path) == 2


def test_a_mount_point_with_a_space_is_found(tmp_path: Path):
    made = FakeMachine(tmp_path, mounts=V2.replace("/sys/fs/cgroup", "/sys/my\\040cgroup"))
    made.group("sys/my cgroup", {"cpu.max": "200000 100000"})
    assert usable_cpus(HOST, tmp_path) == 2


def test_a_cpuset_and_the_affinity_are_both_kept(tmp_path: Path):
    FakeMachine(tmp_path).group(TREE, {"cpuset.cpus.effective": "2-5,9", "cpu.max": "max 100000"})
    assert allowed_cpus({1, 2, 3, 9}, tmp_path) == {2, 3, 9}
    assert usable_cpus({1, 2, 3, 9}, tmp_path) == 3
    # What names none of them cannot be this process's.
    assert usable_cpus({0, 1}, tmp_path) == 2


def test_the_threads_of_a_worker_fit_in_one_node(tmp_path: Path):
    made = FakeMachine(tmp_path)
    made.group("sys/devices/system/node/node0", {"cpulist": "0-15,32-47"})
    made.group("sys/devices/system/node/node1", {"cpulist": "16-31,48-63"})
    made.group("sys/devices/system/node/node10", {"cpulist": ""})
    assert [len(node) for node in numa_nodes(tmp_path)] == [32, 32]
    assert threads_of_one_worker(HOST, tmp_path) == 32
    assert threads_of_one_worker({0, 1, 2, 16}, tmp_path) == 3
    made.group(TREE, {"cpu.max": "400000 100000"})
    assert threads_of_one_worker(HOST, tmp_path) == 4


def test_a_core_is_claimed_only_where_no_other_container_can_claim_it(tmp_path, monkeypatch):
    cpus = {"online": "0-63"}
    host = FakeMachine(tmp_path / "host").group("sys/devices/system/cpu", cpus)
    host.group("proc/self/ns", {"pid": "", "cgroup": ""})
    # Inode numbers cannot be chosen, so the initial ones become those of the files.
    inodes = {name: (tmp_path / "host/proc/self/ns" / name).stat().st_ino for name in ("pid", "cgroup")}
    monkeypatch.setattr(machine, "_INITIAL_NAMESPACES", inodes)
    assert may_claim_cores(HOST, host.root)
    host.group(TREE, {"cpu.max": "400000 100000"})
    assert not may_claim_cores(HOST, host.root), "time is limited, not cores"

    container = FakeMachine(tmp_path / "pod").group("sys/devices/system/cpu", cpus)
    assert not may_claim_cores(HOST, container.root), "the whole host, and others see it so too"
    container.group(TREE, {"cpuset.cpus.effective": "0-3", "cpuset.cpus.partition": "member"})
    assert not may_claim_cores({0, 1, 2, 3}, container.root), "a pool of cores may be others' too"
    container.group(TREE, {"cpuset.cpus.partition": "isolated"})
    assert may_claim_cores({0, 1, 2, 3}, container.root)
    container.group(TREE, {"cpu.max": "200000 100000"})
    assert not may_claim_cores({0, 1, 2, 3}, container.root)


def test_memory_is_what_the_tightest_limit_on_the_way_up_leaves(tmp_path: Path):
    made = FakeMachine(tmp_path, cgroups="0::/pod/app")
    assert available_memory(tmp_path) == 8 * GIB
    made.group(f"{TREE}/pod/app", {"memory.max": "max", "memory.high": "max", "memory.current": GIB})
    assert available_memory(tmp_path) == 8 * GIB
    made.group(f"{TREE}/pod", {"memory.max": 4 * GIB, "memory.current": 3 * GIB})
    assert available_memory(tmp_path) == GIB
    made.group(f"{TREE}/pod", {"memory.stat": f"anon 5\ninactive_file {GIB}"})
    assert available_memory(tmp_path) == 2 * GIB, "cache that can be dropped is no use"
    made.group(f"{TREE}/pod/app", {"memory.high": GIB, "memory.current": 2 * GIB})
    assert available_memory(tmp_path) == 0


def worked(busy: BusyClock, clock: Clock, seconds: float) -> None:
    with busy.working(True):
        clock.now += seconds


def test_an_engine_that_never_rests_is_wholly_busy_in_the_middle_of_a_step_too() -> None:
    clock = Clock(100.0)
    busy = BusyClock(clock)
    for _ in range(20):
        worked(busy, clock, 1.0)
        assert busy.share() == 1.0
    with busy.working(True):
        clock.now += 3.0
        assert busy.share() == 1.0


def test_waits_inside_of_the_work_are_no_work() -> None:
    clock = Clock(100.0)
    busy = BusyClock(clock)
    with busy.working(True):
        clock.now += 1.0
        with busy.working(False):
            clock.now += 3.0
    assert busy.share() == pytest.approx(0.25)
    with busy.working(False):
        clock.now += 4.0
    assert busy.share() == pytest.approx(0.125)


def test_the_share_is_of_the_last_seconds_alone() -> None:
    clock = Clock(100.0)
    busy = BusyClock(clock)
    for _ in range(int(BUSY_SECONDS)):
        worked(busy, clock, 1.0)
        busy.share()
    for second in range(int(BUSY_SECONDS)):
        clock.now += 1.0
        assert busy.share() == pytest.approx(1.0 - (second + 1) / BUSY_SECONDS)
    assert busy.share() == 0.0


def test_a_report_is_read_as_it_was_written_and_anything_else_is_none() -> None:
    load = WorkerLoad("encoder-1", 0.5, 1 << 30, GpuLoad(0.25, 1, 2))
    assert decode_load(msgspec.json.encode(load)) == load
    assert decode_load(b'{"busy": 7, "later": [1], "name": "' + b"n" * 100 + b'"}') == WorkerLoad(
        "n" * 64, 1.0
    )
    for data in (b"", b"\xff", b"[]", b'{"busy": "x"}', msgspec.json.encode(WorkerLoad("n" * 5000))):
        assert decode_load(data) is None


def test_a_meter_names_the_worker_as_its_supervisor_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_SERVICE", "encoder-1")
    load = read_load(None, lambda: GpuLoad(0.5, 3, 4))
    assert (load.name, load.busy, load.gpu) == ("encoder-1", None, GpuLoad(0.5, 3, 4))
    assert load.memory_bytes > 1 << 20


class Driver:
    """NVIDIA's library with one GPU; `error` is what it answers to the question about its use."""

    def __init__(self, error: int = 0) -> None:
        self.error = error

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        return 0 if uuid == b"GPU-1" else 6

    def nvmlDeviceGetUtilizationRates(self, handle: Any, use: Any) -> int:
        ctypes.cast(use, ctypes.POINTER(ctypes.c_uint))[0] = 71
        return self.error

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        numbers = ctypes.cast(memory, ctypes.POINTER(ctypes.c_ulonglong))
        numbers[0], numbers[1], numbers[2] = 24, 8, 16
        return 0


def test_a_gpu_is_read_by_the_drivers_library() -> None:
    assert read_gpu(Driver(), "GPU-1") == GpuLoad(0.71, 16, 24)


def test_a_gpu_that_tells_nothing_is_left_out() -> None:
    assert read_gpu(Driver(error=3), "GPU-1") is None
    assert read_gpu(Driver(), "GPU-2") is None


def test_a_worker_on_a_cpu_has_no_gpu() -> None:
    assert gpu_reader("cpu") is None
