"""When steps begin, and which core they run on."""

from __future__ import annotations

import threading
import time

import pytest

from triptych.base.cpu import core_page
from triptych.base.cpu import step_pacer as module
from triptych.base.cpu.core_page import CorePage
from triptych.base.cpu.step_pacer import CoreWaits, FollowsRows, SharedCores, StepPacer, step_pacer
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
    page = CorePage(path, 0, 1, maximum=4)
    decoder = SharedCores(page, core=core, set_threads=given.append, many=64, waits=Steps().waits)
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
    decoder = SharedCores(CorePage(path, 0, 3, maximum=4), many=64, waits=Steps().waits)
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


class Steps:
    """Steps of 50 ms on a clock of their own."""

    def __init__(self) -> None:
        self.now = self.cpu = 0.0
        self.waits = CoreWaits(lambda: self.now, lambda: self.cpu)
        self.given: list[int] = []
        self.limited: list[bool] = []

    def threads(self, pacer: StepPacer, computes: float = 1.0, rows: int = 64) -> int:
        """Those of a step whose first thread computes for this share of its time."""
        pacer.plan(rows)
        self.limited.append(pacer.limited)
        with pacer:
            self.now += 0.05
            self.cpu += 0.05 * computes
        return self.given[-1]


@pytest.mark.parametrize("with_page", [False, True])
def test_steps_of_many_rows_take_one_thread_while_others_have_their_cores(path, monkeypatch, with_page):
    monkeypatch.setattr(core_page, "usable_cpus", lambda: 2)
    steps = Steps()
    if with_page:
        page = CorePage(path, 0, 1, maximum=2)
        pacer = SharedCores(page, set_threads=steps.given.append, many=64, waits=steps.waits)
    else:
        pacer = FollowsRows(2, 64, steps.given.append, steps.waits)
    assert [steps.threads(pacer, computes) for computes in (1.0, 0.3, 1.0, 0.5, 0.41)] == [2] * 5
    assert [steps.threads(pacer, 0.5) for _ in range(5)] == [1] * 5, "and they are not judged by it"
    steps.now += 0.01
    assert steps.threads(pacer, 0.5) == 2, "tried again after a quarter of a second"
    steps.now += 0.26
    assert steps.threads(pacer) == 1, "and then after half a second"
    steps.now += 0.2
    assert [steps.threads(pacer) for _ in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("with_page", [False, True])
def test_threads_of_a_wide_decoder_are_halved_too_as_often_as_they_wait(path, monkeypatch, with_page):
    monkeypatch.setattr(core_page, "usable_cpus", lambda: 8)
    steps = Steps()
    if with_page:
        page = CorePage(path, 0, 1, maximum=8)
        pacer = SharedCores(page, set_threads=steps.given.append, waits=steps.waits)
    else:
        pacer = FollowsRows(8, 0, steps.given.append, steps.waits)
    assert [steps.threads(pacer, 0.3, rows=1) for _ in range(6)] == [8, 8, 4, 2, 1, 1]
    assert steps.limited == [False, False, True, True, True, True]
    steps.now += 2.0
    assert [steps.threads(pacer, rows=1) for _ in range(2)] == [8, 8]
    assert not steps.limited[-1]


def test_half_of_the_threads_that_have_their_cores_do_not_bring_the_others_back_sooner(path, monkeypatch):
    monkeypatch.setattr(core_page, "usable_cpus", lambda: 8)
    steps = Steps()
    page = CorePage(path, 0, 1, maximum=8)
    pacer = SharedCores(page, set_threads=steps.given.append, waits=steps.waits)

    def threads_until_all_are_tried() -> list[int]:
        """Of the steps before one of eight threads, which waits."""
        found = []
        while (threads := steps.threads(pacer, 1.0 if steps.waits.limit else 0.1)) != 8:
            found.append(threads)
        return found

    steps.threads(pacer, 0.1)
    steps.threads(pacer, 0.1)
    counts = [threads_until_all_are_tried() for _ in range(3)]
    assert {threads for found in counts for threads in found} == {4}
    assert [len(found) for found in counts] == [5, 10, 20], "a quarter of a second, a half, a whole one"


def test_a_towers_threads_follow_the_page_alone(path, monkeypatch):
    monkeypatch.setattr(core_page, "usable_cpus", lambda: 2)
    steps = Steps()
    tower = SharedCores(CorePage(path, 0, 1, maximum=2), set_threads=steps.given.append, waits=steps.waits)
    for _ in range(2):
        with tower:
            steps.now += 1.0
    assert steps.given == [2] and steps.waits.limit is None


def test_a_pause_doubles_up_to_a_limit_and_halves_when_cores_are_free_again():
    steps = Steps()

    def step(seconds: float, cpu: float) -> None:
        steps.waits.begin()
        steps.now, steps.cpu = steps.now + seconds, steps.cpu + cpu
        steps.waits.end(2)

    def pause() -> float:
        """Seconds until steps take all threads again."""
        waited = 0.0
        while steps.waits.limit == 1:
            steps.now, waited = steps.now + 0.125, waited + 0.125
        return waited

    pauses = []
    for _ in range(7):
        step(1.0, 0.05)
        pauses.append(pause())
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    for _ in range(3):
        step(1.0, 1.0)
    step(0.004, 0.0)
    assert steps.waits.limit is None, "too short to say anything"
    step(1.0, 0.05)
    assert pause() == 1.0


@pytest.mark.parametrize(
    ("maximum", "follows", "changes"), [(2, True, True), (1, True, False), (2, False, False)]
)
def test_without_a_page_a_decoder_of_several_cores_changes_its_threads(maximum, follows, changes):
    assert isinstance(step_pacer("", 0, 1, maximum=maximum, follows=follows), FollowsRows) == changes


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
