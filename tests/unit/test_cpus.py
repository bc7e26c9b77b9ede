"""Cores and priorities: what a flag says, and that only the threads meant are changed."""

from __future__ import annotations

import os
import threading

import pytest

from triptych.cpus import lower_priority, parse_cpus, pin
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
