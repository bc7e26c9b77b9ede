"""When steps begin, and which core they run on."""

from __future__ import annotations

import threading
import time

import pytest

from triptych.base.cpu import step_pacer as module
from triptych.base.cpu.step_pacer import CorePage, SharedCores, StepPacer, step_pacer
from triptych.base.cpu.threads import OwnCore
from triptych.base.machine.resources import usable_cpus

CORES = usable_cpus()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "cores")


def _seconds(pacer: StepPacer, share: float = 1.0) -> float:
    start = time.monotonic()
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
        decoder.wait()
        assert _seconds(decoder) >= 0.0015


def test_a_step_waits_for_its_share_of_the_interval(path):
    decoder = step_pacer(path, 0, CORES, interval=3600.0)
    with step_pacer(path, 1, 1):
        decoder.wait()
        # An hour for each that would gain; none does.
        decoder.wait(0.0)
        assert _seconds(decoder, 1e-6) >= 0.003


def test_a_tower_computes_on_all_cores_until_a_decoder_wants_one(path, monkeypatch):
    monkeypatch.setattr(module, "usable_cpus", lambda: 2)
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
    monkeypatch.setattr(module, "usable_cpus", lambda: 2)
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
    decoder.wait()
    tower = step_pacer(path, 1, 1)
    with tower:
        decoder.wait()
    tower.rest()
    decoder.wait()
    decoder.close()
    assert core.calls == ["pin", "unpin", "pin", "release"]


@pytest.mark.parametrize(("threads", "own_core", "claims"), [(1, True, 1), (1, False, 0), (2, True, 0)])
def test_a_worker_of_one_thread_that_may_claims_a_core(path, monkeypatch, threads, own_core, claims):
    claimed: list[_Core] = []

    def claim() -> _Core:
        claimed.append(core := _Core())
        core.core = 6001
        return core

    monkeypatch.setattr(module, "may_claim_cores", lambda: True)
    monkeypatch.setattr(module, "claim_core", claim)
    step_pacer(path, 0, threads, own_core=own_core).close()
    assert len(claimed) == claims
