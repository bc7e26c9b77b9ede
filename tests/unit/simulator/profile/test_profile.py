"""What `triptych profile` says of the machine that it measured. Nothing is measured."""

from __future__ import annotations

from dataclasses import replace

from triptych.goodput.report.machine import Machine
from triptych.simulator.costs.costs import QWEN3_VL_4B_SHAPE, published
from triptych.simulator.profile.profile import Profile, Settings, report

MACHINE = Machine("abc", {}, "a chip", 2, 8.0, "Linux", "triptych profile", 0.1, 1.5)
SETTINGS = Settings("tiny", "cpu", "float32", 1, 1, False, 2048, 512)
FOUND = Profile(published("a100-80g"), QWEN3_VL_4B_SHAPE, SETTINGS, MACHINE, {}, {})


def test_an_idle_machine_gets_no_warning() -> None:
    assert "measure again" not in report(FOUND)


def test_a_loaded_machine_gets_a_warning() -> None:
    loaded = replace(FOUND, machine=replace(MACHINE, load_before=1.9))
    assert "LOADED MACHINE (1.9 on 2 cores)" in report(loaded)
