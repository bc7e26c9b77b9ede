"""Who gives way to whom, and for how long."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from support.processes.cluster import wait_for
from triptych.cpu.core_page import SLOTS, CorePage, crowded, fits
from triptych.cpu.cpus import OwnCore
from triptych.errors import ConfigError
from triptych.machine.resources import usable_cpus

CORES = usable_cpus()


@pytest.mark.parametrize(
    ("ahead", "own", "cores", "runs"),
    [
        (b"\0\0", 2, 2, True),
        (b"\1\0", 1, 2, True),
        (b"\1\0", 2, 2, False),
        (b"\1\1", 1, 2, False),
        (b"", 8, 2, True),
        (b"\4", 4, 16, True),
    ],
)
def test_a_tower_runs_where_cores_are_left_or_nobody_is_ahead(ahead, own, cores, runs):
    assert fits(ahead, own, cores) is runs


def test_a_tower_waits_for_the_step_ahead_and_goes_on_when_it_ends(tmp_path):
    path = str(tmp_path / "cores")
    decoder = CorePage(path, 0, CORES)
    tower = CorePage(path, 1, 1, patience=30.0)
    behind = CorePage(path, 2, CORES, patience=30.0)
    waited: list[float] = []
    done = threading.Event()

    def encode() -> None:
        with tower:
            waited.append(tower.give_way())
            done.wait(30)

    def page() -> bytes:
        return Path(path).read_bytes()[:3]

    thread = threading.Thread(target=encode)
    with decoder:
        thread.start()
        # It computes nothing while it waits.
        wait_for("the tower to give way", lambda: page() == bytes([CORES, 0, 0]))
    wait_for("the tower to go on", lambda: page() == b"\0\1\0")
    done.set()
    thread.join(30)
    assert waited and behind.give_way() == 0.0


def test_a_step_that_never_ends_slows_a_tower_down_and_does_not_stop_it(tmp_path):
    path = str(tmp_path / "cores")
    tower = CorePage(path, 1, 1, patience=0.001)
    with CorePage(path, 0, CORES), tower:
        assert tower.give_way() >= 0.001


@pytest.mark.parametrize(
    ("others", "own", "cores", "lacking"),
    [(b"", 2, 2, False), (b"\1", 1, 2, False), (b"\1\1", 1, 2, True), (b"\1", 2, 2, True)],
)
def test_cores_are_lacking_when_more_threads_compute_than_there_are(others, own, cores, lacking):
    assert crowded(others, own, cores) is lacking


def test_steps_are_kept_apart_while_a_tower_lacks_cores_and_no_longer(tmp_path):
    path = str(tmp_path / "cores")
    decoder = CorePage(path, 0, CORES, interval=3600.0)
    tower = CorePage(path, 1, 1)
    steps: list[float] = []

    def step() -> None:
        steps.append(decoder.rest())

    step()
    step()
    assert steps == [0.0, 0.0]
    thread = threading.Thread(target=step)
    with tower:
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
    thread.join(30)
    assert len(steps) == 3 and steps[2] > 0


class _Core(OwnCore):
    def __init__(self) -> None:
        self.told: list[str] = []

    def keep(self) -> None:
        self.told.append("keep")

    def let_go(self) -> None:
        self.told.append("let go")


def test_a_decoder_keeps_to_its_core_until_a_tower_computes(tmp_path):
    path = str(tmp_path / "cores")
    core = _Core()
    decoder = CorePage(path, 0, 1, core=core)
    decoder.rest()
    with CorePage(path, 1, 1):
        decoder.rest()
    decoder.rest()
    assert core.told == ["keep", "let go", "keep"]


def test_a_step_rests_no_longer_than_its_interval(tmp_path):
    path = str(tmp_path / "cores")
    decoder = CorePage(path, 0, CORES, interval=0.002)
    with CorePage(path, 1, 1):
        decoder.rest()
        decoder.rest()


def test_a_step_rests_for_its_share_of_the_interval(tmp_path):
    path = str(tmp_path / "cores")
    decoder = CorePage(path, 0, CORES, interval=3600.0)
    with CorePage(path, 1, 1):
        decoder.rest()
        # An hour for each that would gain; none does.
        assert decoder.rest(0.0) == 0.0
        assert decoder.rest(1e-6) > 0.0


def test_a_worker_started_again_takes_back_what_its_killed_forerunner_left(tmp_path):
    path = str(tmp_path / "cores")
    CorePage(path, 0, CORES).__enter__()
    CorePage(path, 0, CORES)
    assert CorePage(path, 1, CORES, patience=30.0).give_way() == 0.0


def test_a_page_that_cannot_be_is_an_error_of_its_flag(tmp_path):
    with pytest.raises(ConfigError, match="--core-page"):
        CorePage(str(tmp_path / "none" / "cores"), 0, 1)
    with pytest.raises(ConfigError, match="--core-slot"):
        CorePage(str(tmp_path / "cores"), SLOTS, 1)
