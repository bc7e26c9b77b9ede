"""Devices, and what is required of a GPU."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from support.fakes.fake_cuda import FakeCuda, fake_cuda
from triptych.base.cpu.threads import in_short_lived_thread
from triptych.base.errors import ConfigError, InternalError
from triptych.base.machine import device as devices
from triptych.base.machine import device_fault
from triptych.base.machine.copy_stream import CopyStream
from triptych.base.machine.device import Accelerator, CudaDevice, Device, memory_of
from triptych.base.machine.device_fault import DeviceLost, check_device, failure_of, is_sticky
from triptych.base.ranks.process_group import device_of
from triptych.base.types import ItemPlan
from triptych.ec_connector.connectors.host_buffers import DeviceCopier
from triptych.models.defaults import resolve_device
from triptych.pd_worker.engine import Command, Engine

CUDA = torch.device("cuda", 1)
PLAN = ItemPlan("a" * 64, "n", "image", 2, 4, "float32", 2, (), (1, 2, 4))


class MetaDevice(CudaDevice):
    """Another accelerator: tensors without data, with the streams of the fake torch.cuda."""

    type = "meta"

    @property
    def module(self) -> Any:
        return torch.cuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return fake_cuda(monkeypatch)


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> FakeCuda:
    monkeypatch.setitem(devices.DEVICES, "meta", MetaDevice)
    record = lambda tensor, stream: cuda.calls.append(("record_stream", stream.name))  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    return cuda


def test_a_cpu_has_no_streams_and_selects_nothing(cuda: FakeCuda) -> None:
    cpu = Device.of(torch.device("cpu"))
    cpu.open()
    cpu.select()
    cpu.empty_cache()
    assert type(cpu.copy_stream()) is CopyStream
    assert cpu.on_host and not isinstance(cpu, Accelerator) and cuda.calls == []


def test_a_copy_to_the_device_is_waited_for_by_an_event_that_leaves_the_core_free(meta: FakeCuda) -> None:
    copier = DeviceCopier("meta")
    tensor, wait = copier.to_device([torch.zeros(32, dtype=torch.uint8)], PLAN)
    assert tensor.shape == (2, 4) and wait is not None
    in_short_lived_thread(wait)
    assert meta.calls == [
        ("record_stream", "model"),
        ("Event", {"blocking": True}),
        ("record", "stream"),
        ("set_device", "meta:0"),
        ("event.synchronize", "meta:0"),
    ]


def test_another_accelerator_is_one_class(meta: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetaDevice, "available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 9))
    assert resolve_device("meta") == torch.device("meta", 0)
    assert ("set_device", "meta:0") in meta.calls
    assert memory_of(torch.device("meta")).free() == 7
    assert device_of(torch.device("meta"), 2) == torch.device("meta", 2)
    monkeypatch.setattr(MetaDevice, "available", lambda: False)
    with pytest.raises(ConfigError, match="--device meta: this torch finds no"):
        resolve_device("meta")


def test_copies_of_swapped_blocks_wait_for_the_model_and_the_model_for_them(meta: FakeCuda) -> None:
    stream = Device.of(torch.device("meta")).copy_stream()
    with stream.after_model():
        meta.calls.append(("copy", None))
    stream.block_model()
    stream.synchronize()
    assert meta.calls == [
        ("wait_stream", ("stream", "model")),
        ("copy", None),
        ("wait_stream", ("model", "stream")),
        ("set_device", "meta:0"),
        ("synchronize", "meta:0"),
    ]


class OneStep(Engine):
    """An engine that ends in its first step."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__(None, None, None, list.clear, None, CUDA)  # type: ignore[arg-type]
        self.cuda, self.devices = cuda, list[str | None]()

    def _drain_inbox(self, *, sleep: bool) -> list[Command]:
        return []

    def _step(self, commands: object) -> bool:
        self.devices.append(self.cuda.here)
        raise SystemExit


def test_the_thread_of_an_engine_selects_its_gpu_before_its_first_step(cuda: FakeCuda) -> None:
    engine, ended = OneStep(cuda), threading.Event()
    engine.beat.on_death(ended.set)
    engine.start()
    assert ended.wait(30)
    assert engine.devices == ["cuda:1"] and "engine" in cuda.selected


def test_only_the_devices_allocator_makes_a_copy_fail_for_memory(meta, monkeypatch):
    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    copier = DeviceCopier("meta")
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(MemoryError, match="meta:0 has no 32 bytes free"):
        copier.to_device([], PLAN)


CPU, ON_CUDA = torch.device("cpu"), torch.device("cuda", 0)


class FakeAcceleratorError(RuntimeError):
    """As torch.AcceleratorError, which nothing but an accelerator can raise, has it."""

    def __init__(self, text: str, error_code: int) -> None:
        super().__init__(text)
        self.error_code = error_code


def behind(error: BaseException) -> BaseException:
    try:
        try:
            raise error
        except BaseException as cause:
            raise ValueError("the step failed") from cause
    except ValueError as outer:
        return outer


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: unspecified launch failure"),
        RuntimeError("HIP error: an illegal memory access was encountered"),
        FakeAcceleratorError("a text of another version", 719),
        behind(RuntimeError("CUDA error: misaligned address")),
    ],
)
def test_an_error_that_every_later_call_returns_is_sticky(error):
    assert is_sticky(error)
    with pytest.raises(DeviceLost):
        check_device(error, CPU)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: invalid configuration argument"),
        FakeAcceleratorError("CUDA error: out of memory", 2),
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        ValueError("CUDA error: an illegal memory access was encountered, says a user's text"),
    ],
)
def test_an_error_of_one_call_is_not_and_on_a_cpu_ends_no_process(error):
    assert not is_sticky(error)
    check_device(error, CPU)


def test_a_device_that_fails_its_test_after_any_failure_is_lost(monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error: unknown to us")

    monkeypatch.setattr(device_fault, "probe", fail)
    for error in (ValueError("something"), None):
        with pytest.raises(DeviceLost, match="cuda:0 fails a test"):
            check_device(error, ON_CUDA)


def test_a_full_device_is_not_a_lost_one(monkeypatch):
    def full(device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device_fault, "probe", full)
    check_device(ValueError("something"), ON_CUDA)


def test_device_lost_is_not_caught_by_except_exception():
    assert not issubclass(DeviceLost, Exception)


def test_a_device_without_memory_is_named_to_the_client_and_is_not_lost() -> None:
    full, other = torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("a shape")
    error = failure_of(full, ON_CUDA, "a step of this request")
    assert isinstance(error, InternalError) and "cuda:0 had no free memory for a step" in error.message
    assert failure_of(other, ON_CUDA, "a step") is other
    check_device(full, CPU)


ROOT = Path(__file__).parents[3]

#: Prints the imported distributions that neither torch nor the list brings.
_IMPORTS = """
import gc, importlib, importlib.metadata as metadata, importlib.util, pathlib, re, sys, warnings

gc.disable()
warnings.simplefilter("ignore")

def name_of(text):
    return re.sub(r"[-_.]+", "-", re.match(r"[\\w.-]+", text).group()).lower()

def closure(names):
    seen, left = set(), [name_of(name) for name in names]
    while left:
        name = left.pop()
        if name in seen:
            continue
        try:
            needs = metadata.distribution(name).requires or []
        except metadata.PackageNotFoundError:
            continue  # for another platform
        seen.add(name)
        left += [name_of(need) for need in needs if "extra ==" not in need]
    return seen

for file in pathlib.Path("benchmarks/gpu").glob("*.py"):
    importlib.import_module(f"benchmarks.gpu.{file.stem}")
for number, file in enumerate(sorted(pathlib.Path("tests/gpu").glob("test_*.py"))):
    spec = importlib.util.spec_from_file_location(f"gpu{number}", file)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
# Of several distributions nothing says which one was imported.
owners = {top: given[0] for top, given in metadata.packages_distributions().items() if len(given) == 1}
used = {name_of(owners[top]) for top in {module.split(".")[0] for module in sys.modules} if top in owners}
lines = [line for line in open("tests/gpu/requirements.txt").read().splitlines() if line[:1] not in ("", "#")]
# gRPC, httpx2 and transformers import these where they are: other tests bring the last three.
optional = {"triptych", "triptych-bench", "setuptools", "grpcio-tools", "sniffio", "scipy", "zstandard"}
optional.add("psutil")
print(*sorted(used - closure([*lines, "torch"]) - optional))
"""


def test_the_list_of_wheels_has_all_that_tests_and_benchmarks_of_a_gpu_import() -> None:
    command = [sys.executable, "-c", _IMPORTS]
    path = f"{ROOT / 'tests'}:{ROOT}"
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, env={"PYTHONPATH": path, "PATH": ""}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
