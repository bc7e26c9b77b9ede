"""What `triptych profile` says of the machine that it measured. Nothing is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from triptych.goodput.report.machine import Machine
from triptych.simulator.costs.published import QWEN3_VL_4B_SHAPE, published
from triptych.simulator.profile.profile import Profile, Settings
from triptych.simulator.profile.profile_report import report

MACHINE = Machine("abc", {}, "a chip", 2, 8.0, "Linux", "triptych profile", 0.1, 1.5)
SETTINGS = Settings("tiny", "cpu", "float32", 1, 1, False, 1.1, 1.0, 2048, 512)
FOUND = Profile(published("a100-80g"), QWEN3_VL_4B_SHAPE, SETTINGS, MACHINE, {}, {})


def drifted(drift: float) -> Profile:
    return replace(FOUND, settings=replace(SETTINGS, step_drift=drift))


@pytest.mark.parametrize("drift", [0.7, 1.3])
def test_a_machine_that_changed_its_speed_meanwhile_is_to_be_measured_again(drift: float) -> None:
    said = report(drifted(drift))
    assert f"took {drift:.2f} of what they had taken" in said and "measure again" in said


@pytest.mark.parametrize("drift", [0.9, 1.1])
def test_a_steady_machine_is_not_complained_of(drift: float) -> None:
    assert "measure again" not in report(drifted(drift))


def test_a_machine_that_others_used_is_to_be_measured_again() -> None:
    loaded = replace(FOUND, machine=replace(MACHINE, load_before=1.9))
    assert "LOADED MACHINE (1.9 on 2 cores)" in report(loaded)
