"""Rooflines against figures computed by hand."""

from __future__ import annotations

import pytest

from benchmarks.when_to_disaggregate.reports import QWEN3_VL_8B
from triptych.simulator.costs.costs import CHIPS, CPU_RATIO, QWEN3_VL_4B, published


def test_parameters_of_qwen3_vl_4b_are_those_of_its_config() -> None:
    # A layer: 2560 x 4096 twice, 2560 x 1024 twice, 2560 x 9728 three times.
    assert QWEN3_VL_4B.text_parameters == 36 * (2 * 2560 * 4096 + 2 * 2560 * 1024 + 3 * 2560 * 9728)
    assert QWEN3_VL_4B.text_parameters + QWEN3_VL_4B.head_parameters == 4_022_272_000
    # A block: 4 x 1024² + 2 x 1024 x 4096; the patch embedding takes 2 x 3 x 16 x 16 numbers to 1024.
    assert QWEN3_VL_4B.vit_parameters == 24 * 12 * 1024**2 + 1536 * 1024
    assert QWEN3_VL_4B.merger_parameters == 4 * (4096 * 4096 + 4096 * 2560)


def test_an_a100_reads_its_weights_once_a_step_and_multiplies_every_token() -> None:
    costs = published("a100-80g").pd
    # 8.04 GB at 77 % of 2039 GB/s are 5.124 ms, and 3 ms of overhead.
    assert costs.step == pytest.approx(8.124e-3, rel=1e-3)
    # 7.27 GFLOP at 60 % of 312 TFLOPS.
    assert costs.prefill_token == pytest.approx(38.8e-6, rel=1e-3)
    # 147456 bytes at 1570 GB/s; 4 x 32 x 128 x 36 FLOP at 156 TFLOPS.
    assert costs.context_token == pytest.approx(93.9e-9, rel=1e-3)
    assert costs.prefill_context == pytest.approx(3.781e-9, rel=1e-3)


def test_an_a100_encodes_a_picture_of_640_by_640_in_13_ms() -> None:
    # 5.53 ms for the call; 1600 x 661.6 MFLOP at 187 TFLOPS: 5.66 ms; 1600² x 98304 FLOP at 156: 1.61 ms.
    assert published("a100-80g").encoder.tower(1, 1600) == pytest.approx(12.79e-3, rel=2e-3)


def test_h200_reads_faster_than_h100_and_computes_as_fast() -> None:
    h100, h200 = published("h100").pd, published("h200").pd
    assert h200.prefill_token == h100.prefill_token
    assert h200.context_token / h100.context_token == pytest.approx(3350 / 4800)


def test_every_device_has_a_cost_model_that_says_it_was_not_measured() -> None:
    for name in CHIPS:
        assert "not measured" in published(name).source


def test_a_cpu_node_takes_twelve_times_as_long_as_an_l40s_for_a_large_picture() -> None:
    cpu, gpu = (published(name, QWEN3_VL_8B).encoder.tower(1, 120 * 68) for name in ("cpu", "l40s"))
    # The 5 ms of launches are the same for both.
    assert (cpu - 5e-3) / (gpu - 5e-3) == pytest.approx(CPU_RATIO, rel=0.02)
