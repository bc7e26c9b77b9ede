"""Outputs pass through two buffers of fixed size and arrive as they were."""

from __future__ import annotations

import math

import pytest
import torch

from triptych.encoder_worker.host_copier import HostCopier, copied

SHAPES = [(3, 8), (0, 8), (40, 8), (1, 4), (7, 3)]


def empty(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty(output.shape, dtype=output.dtype) for output in outputs]


class Device:
    """Copies to the host that have no effect before a buffer's `wait`; `calls` are in their order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.copy = torch.Tensor.copy_
        copy_later = self.copy_later
        patch.setattr(
            torch.Tensor,
            "copy_",
            lambda target, source, non_blocking=False: copy_later(target, source, non_blocking),
        )

    def copy_later(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        if not non_blocking:
            self.calls.append("host copy")
            return self.copy(target, source)
        self.calls.append("device copy")
        self.pending.append((target, source.clone()))
        return target


class Buffer:
    """One buffer of the device. Its wait ends the copies that were begun before its mark, in their order."""

    def __init__(self, name: str, size: int, device: Device | None = None) -> None:
        self.name, self.bytes = name, torch.empty(size, dtype=torch.uint8)
        self._device, self._marked = device, 0
        if device is not None:
            self.bytes.fill_(255)

    def record(self) -> None:
        if (device := self._device) is not None:
            device.calls.append(f"mark {self.name}")
            self._marked = len(device.pending)

    def wait(self) -> None:
        if (device := self._device) is not None:
            device.calls.append(f"wait for {self.name}")
            for index in range(self._marked):
                device.copy(*device.pending[index])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [4, 32, 100, 1 << 16])
def test_outputs_arrive_unchanged_with_any_buffer_size(size: int, dtype: torch.dtype) -> None:
    outputs = [torch.randn(shape).to(dtype) for shape in SHAPES]
    outputs.append(torch.randn(5, 6).to(dtype).T)
    targets = empty(outputs)
    copies = copied(outputs, (Buffer("a", size), Buffer("b", size)), targets)
    for (copy, finite), target, output in zip(copies, targets, outputs, strict=True):
        assert copy is target and torch.equal(copy, output) and finite


def test_a_buffer_is_emptied_while_the_device_fills_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 bytes of bounds and 72 of outputs, through two buffers of 40."""
    outputs = [torch.full((6,), float(number)) for number in range(3)]
    device = Device(monkeypatch)
    copies = copied(outputs, (Buffer("a", 40, device), Buffer("b", 40, device)), empty(outputs))
    assert all(torch.equal(copy, output) for (copy, _), output in zip(copies, outputs, strict=True))
    assert [call for call in device.calls if not call.endswith("copy")] == [
        *("mark a", "mark b", "wait for a", "mark a", "wait for b", "wait for a")
    ]
    marked = device.calls.index("mark b")
    assert "host copy" not in device.calls[:marked], "nothing is read before the next copies have begun"


def test_nothing_is_written_over_before_it_has_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = [torch.full((6,), float(number)) for number in range(20)]
    device = Device(monkeypatch)
    copies = copied(outputs, (Buffer("a", 16, device), Buffer("b", 16, device)), empty(outputs))
    assert all(torch.equal(copy, output) for (copy, _), output in zip(copies, outputs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_output_that_is_not_finite_is_told_from_the_others(value: float, dtype: torch.dtype) -> None:
    outputs = [torch.randn(4, 8).to(dtype) for _ in range(3)]
    outputs[1][3, 7] = value
    for copies in (
        copied(outputs, (Buffer("a", 64), Buffer("b", 64)), empty(outputs)),
        HostCopier(torch.device("cpu"))(outputs),
    ):
        assert [finite for _, finite in copies] == [True, False, True]


def test_on_a_cpu_a_contiguous_output_is_not_copied() -> None:
    output = torch.randn(3, 4)
    assert HostCopier(torch.device("cpu"))([output])[0][0].data_ptr() == output.data_ptr()


def test_on_a_cpu_an_output_goes_into_its_target() -> None:
    output, target = torch.randn(3, 4).T, torch.empty(4, 3)
    assert HostCopier(torch.device("cpu"))([output], [target])[0][0] is target
    assert torch.equal(target, output)
