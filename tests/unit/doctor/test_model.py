"""Devices by what torch sees, and the model's folder."""

from __future__ import annotations

import pytest

from triptych.config import ServeConfig
from triptych.doctor.finding import CheckOutcome
from triptych.doctor.model import check_devices, check_model, device_finding


@pytest.mark.parametrize(
    ("device", "gpus", "verdict"),
    [
        ("cpu", [], CheckOutcome.OK),
        ("cpu", ["H200"], CheckOutcome.OK),
        ("cuda", ["H200"], CheckOutcome.OK),
        ("cuda:1", ["H200", "H200"], CheckOutcome.OK),
        ("cuda", [], CheckOutcome.FAIL),
        ("cuda:1", ["H200"], CheckOutcome.FAIL),
        ("cuda:x", ["H200"], CheckOutcome.FAIL),
        ("tpu", [], CheckOutcome.FAIL),
    ],
)
def test_a_device_is_one_that_torch_sees(device, gpus, verdict):
    assert device_finding(device, gpus).verdict is verdict


def test_each_device_is_looked_at_once():
    assert len(check_devices(["cpu", "cpu"])) == 1


def test_the_demo_model_is_found():
    (finding,) = check_model(ServeConfig())
    assert finding.verdict is CheckOutcome.OK and "qwen3_vl" in finding.found


def test_a_folder_without_weights_fails(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (finding,) = check_model(ServeConfig(model=str(tmp_path)))
    assert finding.verdict is CheckOutcome.FAIL and "safetensors" in finding.found


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing"])
def test_a_folder_that_is_not_there_fails(model):
    assert check_model(ServeConfig(model=model))[0].verdict is CheckOutcome.FAIL


def test_a_hub_id_is_not_looked_up():
    assert check_model(ServeConfig(model="some/model"))[0].verdict is CheckOutcome.NOTE
