"""What a worker sees of the others' threads."""

from __future__ import annotations

import pytest

from triptych.base.cpu import step_pacer
from triptych.base.cpu.step_pacer import SLOTS, CorePage, crowded
from triptych.base.errors import ConfigError
from triptych.base.machine.resources import usable_cpus

CORES = usable_cpus()


@pytest.mark.parametrize(
    ("others", "own", "cores", "lacking"),
    [(b"", 2, 2, False), (b"\1", 1, 2, False), (b"\1\1", 1, 2, True), (b"\1", 2, 2, True)],
)
def test_cores_are_lacking_when_more_threads_compute_than_there_are(others, own, cores, lacking):
    assert crowded(others, own, cores) is lacking


def test_a_worker_sees_others_while_they_compute_and_never_itself(tmp_path):
    path = str(tmp_path / "cores")
    decoder, tower = CorePage(path, 0, 1), CorePage(path, 1, CORES)
    decoder.begin()
    assert decoder.alone and not tower.alone
    tower.begin()
    assert not decoder.alone and decoder.crowded
    tower.end()
    assert decoder.alone and not decoder.crowded


def test_a_tower_takes_the_cores_that_nobody_uses_and_gives_them_back(tmp_path, monkeypatch):
    monkeypatch.setattr(step_pacer, "usable_cpus", lambda: 4)
    path = str(tmp_path / "cores")
    tower, decoder = CorePage(path, 1, 2, most=4), CorePage(path, 2, 2, most=4)
    assert tower.begin() == 4
    assert decoder.begin() == 2
    assert tower.begin() == 2 and decoder.begin() == 2
    tower.end()
    assert decoder.begin() == 4
    decoder.end()
    assert tower.alone and not tower.crowded


def test_a_worker_started_again_takes_back_what_its_killed_forerunner_left(tmp_path):
    path = str(tmp_path / "cores")
    CorePage(path, 0, CORES).begin()
    CorePage(path, 0, CORES)
    assert CorePage(path, 1, CORES).alone


def test_a_page_that_cannot_be_is_an_error_of_its_flag(tmp_path):
    with pytest.raises(ConfigError, match="--core-page"):
        CorePage(str(tmp_path / "none" / "cores"), 0, 1)
    with pytest.raises(ConfigError, match="--core-slot"):
        CorePage(str(tmp_path / "cores"), SLOTS, 1)
