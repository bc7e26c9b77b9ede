"""Cores and priorities: what a flag says, and that only the threads meant are changed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest

from triptych.cpu.cpus import OwnCore, claim_core, in_passing_thread, lower_priority, parse_cpus, pin
from triptych.errors import ConfigError


def test_cores_are_written_one_by_one_or_as_spans():
    assert parse_cpus("0,2-4, 9") == {0, 2, 3, 4, 9}


@pytest.mark.parametrize("text", ["a", "1-", "3-2", "1,,2", "-1"])
def test_what_names_no_cores_is_an_error_of_the_flag(text):
    with pytest.raises(ConfigError, match="--cpus"):
        parse_cpus(text)


def test_a_core_that_is_not_there_is_an_error_that_lists_those_that_are():
    missing = max(os.sched_getaffinity(0)) + 1
    with pytest.raises(ConfigError, match=f"--cpus '{missing}'.*cores .*only"):
        pin(str(missing))


def test_a_niced_thread_nices_what_it_starts_and_nobody_else():
    found: dict[str, int] = {}

    def priority(name: str) -> None:
        found[name] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def run(target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments)  # type: ignore[arg-type]
        thread.start()
        thread.join(30)

    def engine() -> None:
        lower_priority(5)
        priority("engine")
        run(priority, "its helper")

    priority("before")
    run(engine)
    run(priority, "after")
    assert found == {"before": found["before"], "engine": 5, "its helper": 5, "after": found["before"]}
    assert found["before"] < 5


def test_a_core_has_one_claim_at_a_time_and_the_first_core_none():
    first = claim_core({5000, 5001, 5002})
    second = claim_core({5000, 5001, 5002})
    assert first is not None and second is not None
    assert (first.core, second.core) == (5002, 5001)
    assert claim_core({5000, 5001, 5002}) is None
    first.release()
    again = claim_core({5001, 5002})
    assert again is not None and again.core == 5002
    again.release()
    second.release()
    assert claim_core({5000}) is None


def test_a_process_that_keeps_to_its_core_has_every_thread_there_until_it_lets_go():
    everywhere = os.sched_getaffinity(0)
    core = OwnCore(max(everywhere), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    done = threading.Event()
    helper = threading.Thread(target=done.wait, args=(30,))
    helper.start()
    threads = (0, helper.native_id or 0)
    try:
        core.keep()
        assert [os.sched_getaffinity(thread) for thread in threads] == [{max(everywhere)}] * 2
        core.let_go()
        assert [os.sched_getaffinity(thread) for thread in threads] == [everywhere] * 2
        core.keep()
    finally:
        core.release()
        assert [os.sched_getaffinity(thread) for thread in threads] == [everywhere] * 2
        done.set()
        helper.join(30)


def test_a_core_that_is_gone_is_given_up_and_nothing_fails(caplog):
    everywhere = os.sched_getaffinity(0)
    core = OwnCore(5000, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    core.keep()
    core.let_go()
    core.keep()
    core.release()
    assert os.sched_getaffinity(0) == everywhere
    assert [record.getMessage() for record in caplog.records] == ["core 5000 is given up: Invalid argument"]


_PASSING = """
import os, sys, time, torch
from triptych.cpu.cpus import in_passing_thread

def threads():
    return len(os.listdir("/proc/self/task"))

def work():
    return float(torch.ones(1 << 20).sum())

torch.set_num_threads(2)
before = threads()
assert in_passing_thread(work) == 1 << 20
deadline = time.monotonic() + 30
while threads() > before and time.monotonic() < deadline:
    time.sleep(0.01)
after = threads()
work()
print(after - before, threads() - after)
"""


def test_a_passing_thread_leaves_no_threads_and_one_that_stays_does():
    run = subprocess.run([sys.executable, "-c", _PASSING], capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["0", "1"], run.stderr


def test_a_passing_thread_gives_what_its_work_gives():
    def failing(word: str, *, times: int) -> str:
        raise ValueError(word * times)

    assert in_passing_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ValueError, match="nono"):
        in_passing_thread(failing, "no", times=2)
