"""What the doctor says of kernels."""

from __future__ import annotations

import pytest

from triptych.apps.doctor.finding import CheckOutcome
from triptych.apps.doctor.kernels import check_kernels
from triptych.base.config import PDConfig
from triptych.models.weights import kernel_report
from triptych.models.weights.kernel_report import Capabilities


def test_each_part_is_a_line_and_a_reason_makes_it_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    has = Capabilities(compiled=True, instructions=4, blocked=True, block=32)
    monkeypatch.setattr(kernel_report.Capabilities, "of_this", lambda: has)
    found = {result.check: result for result in check_kernels(PDConfig(dtype="bfloat16"))}
    assert {name: result.found for name, result in found.items()} == {
        "kernel of linear": "AMX",
        "kernel of attention": "AMX",
        "kernel of pages": "2 MiB",
    }
    assert all(result.verdict == CheckOutcome.OK for result in found.values())
    linear = check_kernels(PDConfig(linear_kernel="onednn", dtype="bfloat16"))[0]
    assert linear.verdict == CheckOutcome.NOTE and "--linear-kernel onednn" in linear.found


def test_this_machine_has_a_line_for_each_part_and_a_gpu_none() -> None:
    assert len(check_kernels(PDConfig())) == 3
    assert check_kernels(PDConfig(device="cuda:0")) == []
