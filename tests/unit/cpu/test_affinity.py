"""Cores: what a flag says, what a process claims, and which threads run there."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from triptych.base.cpu.affinity import OwnCore, claim_core, parse_cpus, pin
from triptych.base.errors import ConfigError


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
