"""Limits that are given, and those measured in their place."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks.gpu import device_limits
from benchmarks.gpu.device_limits import DeviceLimits, add_limit_flags, limits_of, measured_limits


def limits(*words: str) -> DeviceLimits:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    add_limit_flags(parser)
    return limits_of(parser.parse_args(words))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_limits, "_READ", {"cpu": 1 << 16})
    monkeypatch.setattr(device_limits, "_SIDE", {"cpu": 32})


def test_limits_of_the_data_sheet_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(device_limits, "measured_limits")
    given = limits("--peak-tflops", "989", "--bandwidth-gbs", "4800")
    assert given == DeviceLimits(4.8e12, 9.89e14)
    assert given.said().startswith("Limits of the device: 4800 GB/s, 989.00 TFLOP/s.")


def test_what_is_not_given_is_measured(small: None) -> None:
    found = limits("--peak-tflops", "989")
    assert found.flops == 9.89e14
    assert 0 < found.bandwidth < 1e14


def test_both_rates_of_a_cpu_are_measured_in_the_models_dtype(small: None) -> None:
    found = measured_limits("cpu", torch.bfloat16)
    assert found.bandwidth > 0 and found.flops > 0
