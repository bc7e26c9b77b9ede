"""What a device error means for the process: which errors never go away, and which only end a request."""

from __future__ import annotations

import pytest
import torch

from triptych.base.errors import InternalError
from triptych.base.machine import device_fault
from triptych.base.machine.device_fault import DeviceLost, check_device, failure_of, is_sticky

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


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
            check_device(error, CUDA)


def test_a_full_device_is_not_a_lost_one(monkeypatch):
    def full(device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device_fault, "probe", full)
    check_device(ValueError("something"), CUDA)


def test_device_lost_is_not_caught_by_except_exception():
    assert not issubclass(DeviceLost, Exception)


def test_a_device_without_memory_is_named_to_the_client_and_is_not_lost() -> None:
    full, other = torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("a shape")
    error = failure_of(full, CUDA, "a step of this request")
    assert isinstance(error, InternalError) and "cuda:0 had no free memory for a step" in error.message
    assert failure_of(other, CUDA, "a step") is other
    check_device(full, CPU)
