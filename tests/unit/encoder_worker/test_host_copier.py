"""Outputs pass through a buffer of fixed size and arrive as they were."""

from __future__ import annotations

import pytest
import torch

from triptych.encoder_worker.host_copier import HostCopier, staged

SHAPES = [(3, 8), (0, 8), (40, 8), (1, 4), (7, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [4, 32, 100, 1 << 16])
def test_outputs_arrive_unchanged_with_any_buffer_size(size: int, dtype: torch.dtype) -> None:
    outputs = [torch.randn(shape).to(dtype) for shape in SHAPES]
    outputs.append(torch.randn(5, 6).to(dtype).T)
    staging = torch.empty(size, dtype=torch.uint8)
    copies = staged(outputs, staging, lambda: None)
    for copy, output in zip(copies, outputs, strict=True):
        assert torch.equal(copy, output)
        assert copy.is_contiguous()
        assert copy.untyped_storage().nbytes() == output.numel() * output.element_size()


def test_nothing_is_read_from_the_buffer_before_its_copies_are_waited_for() -> None:
    """The copies of a device end only when they are waited for."""
    outputs = [torch.full((6,), float(number)) for number in range(5)]
    staging = torch.empty(40, dtype=torch.uint8)
    pending: list[tuple[torch.Tensor, torch.Tensor]] = []
    copy = torch.Tensor.copy_

    def late(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            pending.append((self, source.clone()))
            return self
        return copy(self, source)

    def wait() -> None:
        for target, source in pending:
            copy(target, source)
        pending.clear()
        waits.append(1)

    waits: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", late)
        copies = staged(outputs, staging, wait)
    assert all(torch.equal(one, other) for one, other in zip(copies, outputs, strict=True))
    assert len(waits) == 3, "120 bytes through 40"


def test_on_a_cpu_a_contiguous_output_is_not_copied() -> None:
    output = torch.randn(3, 4)
    assert HostCopier(torch.device("cpu"))([output])[0].data_ptr() == output.data_ptr()
