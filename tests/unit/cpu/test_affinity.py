"""Cores: what a flag says, what a process claims, and which threads run there."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from triptych.base.cpu import core_page
from triptych.base.cpu.core_page import SLOTS, CorePage, crowded
from triptych.base.cpu.threads import OwnCore, claim_core, parse_cpus, pin
from triptych.base.errors import ConfigError
from triptych.base.machine.resources import usable_cpus


@pytest.mark.parametrize("text", ["a", "1-", "3-2", "1,,2", "-1"])
def test_what_names_no_cores_is_an_error_of_the_flag(text):
    with pytest.raises(ConfigError, match="--cpus"):
        parse_cpus(text)


def test_a_core_that_is_not_there_is_an_error_that_lists_those_that_are():
    missing = max(os.sched_getaffinity(0)) + 1
    with pytest.raises(ConfigError, match=f"--cpus '{missing}'.*cores .*only"):
        pin(str(missing))


def test_a_core_has_one_claim_at_a_time_and_the_first_core_none(monkeypatch):
    cores = {5000, 5001, 5002}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    first, second = claim_core(), claim_core()
    assert first is not None and second is not None
    assert (first.core, second.core) == (5002, 5001)
    assert claim_core() is None
    first.release()
    again = claim_core()
    assert again is not None and again.core == 5002
    again.release()
    second.release()
    cores = {5000}
    assert claim_core() is None


def test_a_process_pinned_to_its_core_has_every_thread_there_until_it_is_unpinned():
    everywhere = os.sched_getaffinity(0)
    core = OwnCore(max(everywhere), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    done = threading.Event()
    helper = threading.Thread(target=done.wait, args=(30,))
    helper.start()
    threads = (0, helper.native_id or 0)
    try:
        core.pin()
        assert [os.sched_getaffinity(thread) for thread in threads] == [{max(everywhere)}] * 2
        core.unpin()
        assert [os.sched_getaffinity(thread) for thread in threads] == [everywhere] * 2
        core.pin()
    finally:
        core.release()
        assert [os.sched_getaffinity(thread) for thread in threads] == [everywhere] * 2
        done.set()
        helper.join(30)


def test_a_core_that_has_gone_offline_is_released_without_an_error(caplog):
    everywhere = os.sched_getaffinity(0)
    core = OwnCore(5000, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    core.pin()
    core.unpin()
    core.pin()
    core.release()
    assert os.sched_getaffinity(0) == everywhere
    assert [record.getMessage() for record in caplog.records] == ["core 5000 is given up: Invalid argument"]


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
    monkeypatch.setattr(core_page, "usable_cpus", lambda: 4)
    path = str(tmp_path / "cores")
    tower, decoder = CorePage(path, 1, 2, maximum=4), CorePage(path, 2, 2, maximum=4)
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
