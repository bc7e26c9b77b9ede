"""Rooflines against figures computed by hand."""

from __future__ import annotations

from triptych.simulator.costs.costs import QWEN3_VL_4B


def test_parameters_of_qwen3_vl_4b_are_those_of_its_config() -> None:
    # A layer: 2560 x 4096 twice, 2560 x 1024 twice, 2560 x 9728 three times.
    assert QWEN3_VL_4B.text_parameters == 36 * (2 * 2560 * 4096 + 2 * 2560 * 1024 + 3 * 2560 * 9728)
    assert QWEN3_VL_4B.text_parameters + QWEN3_VL_4B.head_parameters == 4_022_272_000
    # A block: 4 x 1024² + 2 x 1024 x 4096; the patch embedding takes 2 x 3 x 16 x 16 numbers to 1024.
    assert QWEN3_VL_4B.vit_parameters == 24 * 12 * 1024**2 + 1536 * 1024
    assert QWEN3_VL_4B.merger_parameters == 4 * (4096 * 4096 + 4096 * 2560)
