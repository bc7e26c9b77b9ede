"""Two engines on one device: each in its turn."""

from __future__ import annotations

import threading

import pytest

from support.processes.cluster import wait_for
from triptych.apps.colocated import DeviceLock
from triptych.base.errors import InternalError

PATIENCE = 30.0


def test_engines_that_both_want_the_device_alternate():
    lock, taken = DeviceLock(), []
    both = threading.Barrier(2)

    def engine(name: str) -> None:
        both.wait(PATIENCE)
        for _ in range(50):
            with lock:
                taken.append(name)
                # The step lasts until the other one asks for the device, as two busy engines' steps do.
                wait_for("the other engine", lambda: lock.waiting or done.is_set(), PATIENCE)
        done.set()

    done = threading.Event()
    threads = [threading.Thread(target=engine, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(taken) == 100
    while_both = taken[: 2 * min(len(taken) // 2, 49)]
    assert all(one != other for one, other in zip(while_both, while_both[1:], strict=False))


def test_an_engine_alone_takes_every_turn_and_an_error_gives_it_back():
    lock = DeviceLock(patience=0.0)
    for _ in range(3):
        with pytest.raises(ValueError, match="step"), lock:
            raise ValueError("step")
    with lock:
        assert lock.waiting == 0


def test_a_step_that_hangs_is_an_error_for_the_other_engine_which_does_not_wait_for_ever():
    lock = DeviceLock(patience=0.001)
    errors: list[Exception] = []

    def other() -> None:
        try:
            with lock:
                raise AssertionError("two at once")
        except InternalError as error:
            errors.append(error)

    with lock:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(PATIENCE)
    assert "not free" in str(errors[0])
    assert lock.waiting == 0
    with lock:
        pass
