"""When steps begin, and which core they run on."""

from __future__ import annotations

import threading
import time

import pytest

from triptych.base.cpu import core_page
from triptych.base.cpu import step_pacer as module
from triptych.base.cpu.core_page import CorePage
from triptych.base.cpu.step_pacer import FollowsRows, SharedCores, StepPacer, step_pacer
from triptych.base.cpu.threads import OwnCore
from triptych.base.machine.resources import usable_cpus

CORES = usable_cpus()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "cores")


def _seconds(pacer: StepPacer, *shares: float) -> float:
    """From before the first of these waits to after the last: what comes between them takes time, too."""
    start = time.monotonic()
    for share in shares:
        pacer.wait(share)
    return time.monotonic() - start


def test_steps_are_kept_apart_while_a_tower_lacks_cores_and_no_longer(path):
    decoder, tower = step_pacer(path, 0, CORES, interval=3600.0), step_pacer(path, 1, 1)
    decoder.wait()
    decoder.wait()
    thread = threading.Thread(target=decoder.wait)
    with tower:
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
    tower.rest()
    thread.join(30)
    assert not thread.is_alive()


def test_a_step_waits_no_longer_than_its_interval(path):
    decoder = step_pacer(path, 0, CORES, interval=0.002)
    with step_pacer(path, 1, 1):
        assert _seconds(decoder, 1.0, 1.0) >= 0.002


def test_a_step_waits_for_its_share_of_the_interval(path):
    decoder = step_pacer(path, 0, CORES, interval=3600.0)
    with step_pacer(path, 1, 1):
        decoder.wait()
        # An hour for each that would gain; none does.
        assert _seconds(decoder, 0.0, 1e-6) >= 0.0036


def test_a_tower_computes_on_all_cores_until_a_decoder_wants_one(path, monkeypatch):
    monkeypatch.setattr(core_page, "usable_cpus", lambda: 2)
    given: list[int] = []
    tower = SharedCores(CorePage(path, 1, 1, maximum=2), set_threads=given.append)
    decoder = step_pacer(path, 0, 1)
    with tower:
        tower.choose_threads()
        with decoder:
            tower.choose_threads()
            tower.choose_threads()
        # Between two steps the decoder needs its core still.
        tower.choose_threads()
        decoder.rest()
        tower.choose_threads()
    assert given == [2, 1, 2]


def test_a_decoder_steps_on_one_core_beside_a_tower_and_on_both_alone(path, monkeypatch):
    monkeypatch.setattr(core_page, "usable_cpus", lambda: 2)
    given: list[int] = []
    decoder = SharedCores(CorePage(path, 0, 1, maximum=2), set_threads=given.append)
    tower = step_pacer(path, 1, 1)
    with tower, decoder:
        pass
    with decoder:
        decoder.choose_threads()
        tower.rest()
        decoder.choose_threads()
    assert given == [1, 2]


def test_a_worker_that_rests_or_ends_is_seen_no_more(path):
    other, worker = CorePage(path, 1, 1), step_pacer(path, 0, 1)
    for end in (worker.rest, worker.close):
        with worker:
            pass
        assert not other.alone
        end()
        assert other.alone


class _Core(OwnCore):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def pin(self) -> None:
        self.calls.append("pin")

    def unpin(self) -> None:
        self.calls.append("unpin")

    def release(self) -> None:
        self.calls.append("release")


def test_a_decoder_keeps_to_its_core_until_a_tower_computes(path):
    core = _Core()
    decoder = SharedCores(CorePage(path, 0, 1), core=core)
    decoder.plan(1)
    tower = step_pacer(path, 1, 1)
    with tower:
        decoder.plan(1)
    tower.rest()
    decoder.plan(512)
    decoder.close()
    assert core.calls == ["pin", "unpin", "pin", "release"]


def test_a_narrow_decoder_leaves_its_core_for_steps_of_many_rows_and_takes_all_cores(path, monkeypatch):
    monkeypatch.setattr(core_page, "usable_cpus", lambda: 4)
    core, given = _Core(), list[int]()
    decoder = SharedCores(CorePage(path, 0, 1, maximum=4), core=core, set_threads=given.append, many=64)
    tower = step_pacer(path, 1, 2)
    for rows in (63, 64, 1):
        decoder.plan(rows)
        with decoder:
            pass
    assert (core.calls, given) == (["pin", "unpin", "pin"], [1, 4, 1])
    with tower:
        # What towers leave, and no core of its own.
        for rows in (64, 63):
            decoder.plan(rows)
            with decoder:
                pass
    assert (core.calls[3:], given[3:]) == (["unpin", "unpin"], [2, 1])


def test_a_step_of_few_rows_shows_others_one_thread_however_many_the_worker_has_at_least(path, monkeypatch):
    monkeypatch.setattr(core_page, "usable_cpus", lambda: 4)
    decoder = SharedCores(CorePage(path, 0, 3, maximum=4), many=64)
    for rows, threads in ((63, 1), (64, 4)):
        decoder.plan(rows)
        with decoder:
            assert CorePage(path, 1, 1)._others()[0] == threads


def test_without_a_page_a_narrow_decoders_threads_follow_the_rows_too() -> None:
    given: list[int] = []
    pacer = FollowsRows(2, 64, given.append)
    for rows in (63, 64, 450, 16, 1, 64):
        pacer.plan(rows)
    assert given == [1, 2, 1, 2], "set when they change, not in every step"


@pytest.mark.parametrize(("maximum", "many", "follows"), [(2, 64, True), (1, 64, False), (2, 0, False)])
def test_without_a_page_only_a_narrow_decoder_of_several_cores_changes_its_threads(maximum, many, follows):
    assert isinstance(step_pacer("", 0, 1, maximum=maximum, many=many), FollowsRows) == follows


@pytest.mark.parametrize(
    ("threads", "own_core", "many", "claims"),
    [(1, True, 0, 1), (1, False, 0, 0), (2, True, 0, 0), (2, True, 64, 1), (2, False, 64, 0)],
)
def test_a_worker_with_steps_of_one_thread_that_may_claims_a_core(
    path, monkeypatch, threads, own_core, many, claims
):
    claimed: list[_Core] = []

    def claim() -> _Core:
        claimed.append(core := _Core())
        core.core = 6001
        return core

    monkeypatch.setattr(module, "may_claim_cores", lambda: True)
    monkeypatch.setattr(module, "claim_core", claim)
    step_pacer(path, 0, 1, maximum=threads, own_core=own_core, many=many).close()
    assert len(claimed) == claims
