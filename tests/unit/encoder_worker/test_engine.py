"""The step loop: batches in, one answer per item out, saves beside the tower."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from support.fakes.encoder_engine import FAILING, Bench, SlowTower, Told, Tower, item
from support.fakes.fake_connector import SlowWorker
from support.fakes.fake_cuda import fake_cuda
from triptych.base.cpu.step_pacer import StepPacer
from triptych.base.engine_beat import BusyClock
from triptych.base.errors import InternalError, InvalidRequest
from triptych.ec_connector.base import EncoderOutput
from triptych.ec_connector.connectors.host_buffers import PinnedMemory
from triptych.ec_connector.int8_rows import rows_of
from triptych.encoder_worker import host_copier
from triptych.encoder_worker.engine import Encoded, TowerItem
from triptych.models.base import PreparedItem
from triptych.protos.encoder_pb2 import EncodeEvent, ItemReady

SAVED = EncodeEvent(ready=ItemReady())


@pytest.fixture
def b() -> Iterator[Bench]:
    with Bench() as bench:
        yield bench


def test_the_engines_thread_selects_its_gpu_before_it_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, selected = fake_cuda(monkeypatch), list[str | None]()
    monkeypatch.setattr(host_copier, "PinnedMemory", lambda nbytes, device: PinnedMemory(nbytes))

    class OnGpu(Tower):
        device = torch.device("cuda", 1)

        def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
            selected.append(cuda.here)
            return super().encode(items)

    with Bench(OnGpu()) as bench:
        bench.encode([item("a")])
        bench.take(2)
    assert selected == ["cuda:1"]


def test_an_item_for_which_the_device_has_no_memory_fails_by_name_and_alone(b: Bench) -> None:
    encode = b.tower.encode

    def full(items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        if any((item.tensors["rows"] == 2).any() for item in items):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(items)

    b.tower.encode = full  # type: ignore[method-assign]
    b.encode([item("a"), item("b", value=2.0)])
    ends = {told.mm_hash: told.event.error for told in b.take(3) if told.kind == "encoded"}
    assert ends["a"] is None
    assert (
        isinstance(ends["b"], InternalError) and "had no free memory for a whole image" in ends["b"].message
    )


def test_the_tower_is_busy_in_its_batches_and_not_while_it_waits_for_its_turn() -> None:
    seconds = 0.0

    class Working(Tower):
        def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
            nonlocal seconds
            seconds += 2.0
            return super().encode(items)

    class Waiting(StepPacer):
        def __enter__(self) -> None:
            nonlocal seconds
            seconds += 3.0

    bench = Bench(Working(), pacer=Waiting())
    bench.engine.beat.busy = clock = BusyClock(lambda: seconds)
    with bench:
        bench.encode([item("a")])
        bench.take(3)
    assert clock.share() == pytest.approx(0.4)


def test_each_batch_has_a_thread_that_ends_with_it() -> None:
    seen: list[threading.Thread] = []

    class Noting(Tower):
        def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
            seen.append(threading.current_thread())
            assert torch.is_inference_mode_enabled()
            return super().encode(items)

    with Bench(Noting(), thread_per_batch=True) as bench:
        for key in ("a", "b"):
            bench.encode([item(key)])
            assert {told.kind for told in bench.take(3)} == {"encoded", "ready", "done"}
    assert len(set(seen)) == 2
    assert not any(thread.is_alive() for thread in seen)


class _Turns(StepPacer):
    """Notes what a tower tells its pacer."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def rest(self) -> None:
        self.told.append("rest")

    def __enter__(self) -> None:
        self.told.append("begin")


def test_an_engine_whose_batch_failed_is_idle(b: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(items: Sequence[TowerItem]) -> object:
        raise ValueError("nobody has thought of this")

    monkeypatch.setattr(b.engine, "_encode_isolated", fails)
    b.encode([item("a")])
    while b.take(1)[0].kind != "done":
        pass
    now = time.monotonic()
    assert b.engine.last_progress() >= now


def test_each_layer_of_a_long_batch_is_progress() -> None:
    tower = SlowTower()
    with Bench(tower) as bench:
        bench.encode([item("a")])
        bench.take(3)
        bench.encode([item("b")])
        assert tower.in_second.wait(30)
        before = time.monotonic()
        assert bench.engine.last_progress() <= before
        bench.engine.beat.tick()
        assert bench.engine.last_progress() >= before
        tower.let_go.set()
        bench.take(3)


def test_a_save_that_is_asked_for_twice_pins_its_output_once() -> None:
    with Bench(connector="Slow") as bench:
        bench.encode([item("a")])
        bench.take(2)
        output = bench.outputs["a"]
        bench.engine.save(output)
        bench.encode([item("b")])
        bench.take(2)
        assert isinstance(bench.saver, SlowWorker)
        assert [key for key, _ in bench.saver.saves] == ["a", "a", "b"]
        bench.saver.land("a")
        assert bench.take(1)[0].event == SAVED
        assert list(bench.outputs._pinned) == ["b"]


@pytest.mark.parametrize("value", [1.0, FAILING])
def test_a_tower_leaves_its_cores_to_others_as_soon_as_a_batch_has_ended_or_failed(value: float) -> None:
    pacer = _Turns()
    with Bench(pacer=pacer) as bench:
        bench.encode([item("a", value=value)])
        while bench.take(1)[0].kind != "done":
            pass
        assert pacer.told == ["begin", "rest"]


def test_a_batch_is_one_call_and_every_item_is_saved(b: Bench) -> None:
    b.encode([item("a"), item("b", digest="d")])
    events = b.take(5)
    assert [told.mm_hash for told in events if told.kind == "encoded"] == ["a", "b"]
    assert [told.mm_hash for told in events if told.event == SAVED] == ["a", "b"]
    assert [told.event for told in events if told.kind == "done"] == [(2, 1)]
    assert b.saver.saves == [("a", ""), ("b", "d")]


def int8_item(key: str, *, value: float = 1.0) -> TowerItem:
    one = item(key, value=value)
    return replace(one, plan=replace(one.plan, dtype="int8", scales=2))


def test_rows_are_put_in_8_bits_where_the_plan_says_so_and_checked_before(b: Bench) -> None:
    b.encode([int8_item("a"), int8_item("b", value=math.nan), item("c")])
    ends = {told.mm_hash: told.event for told in b.take(6) if told.kind == "encoded"}
    stored = ends["a"].output
    assert stored.data.dtype == torch.int8 and stored.data.numel() == stored.plan.nbytes
    assert torch.equal(rows_of(stored, 0, 2), torch.ones(2, 4))
    assert isinstance(ends["b"].error, InvalidRequest) and "its values overflow" in ends["b"].error.message
    assert ends["c"].output.data.dtype == torch.float32


def test_the_seconds_of_a_batch_are_its_items_work_by_their_sizes(b: Bench) -> None:
    b.encode([item("c")])
    b.take(3)
    kept = b.outputs.get("c")
    small, large = (
        replace(one, plan=replace(one.plan, grid_thw=grid))
        for one, grid in ((item("a"), (1, 1, 2)), (item("b"), (1, 2, 3)))
    )
    b.encode([small, large, TowerItem(kept.plan, None, kept, "", lambda: True)])
    found = {told.mm_hash: told.event for told in b.take(7) if told.kind == "encoded"}
    seconds = found["a"].seconds
    assert seconds > 0.0
    assert found["a"].work == pytest.approx(seconds / 4)
    assert found["b"].work == pytest.approx(seconds * 3 / 4)
    assert found["c"].work == 0.0


def test_a_bad_item_takes_no_other_with_it(b: Bench) -> None:
    b.encode([item("a"), item("bad", value=FAILING), item("c")])
    events = {told.mm_hash: told.event for told in b.take(6) if told.kind == "encoded"}
    assert isinstance(events["bad"].error, RuntimeError)
    assert events["a"].saving and events["c"].saving
    assert b.tower.batches == [3, 1, 1, 1]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_rows_with_nan_or_infinity_fail_their_item_and_are_not_saved(b: Bench, bad: float) -> None:
    b.encode([item("a"), item("bad", value=bad), item("large", value=1e38)])
    events = {told.mm_hash: told.event for told in b.take(6) if told.kind == "encoded"}
    error = events["bad"].error
    assert isinstance(error, InvalidRequest) and error.param == "image"
    assert events["a"].saving and events["large"].saving
    assert b.tower.batches == [3], "the others are not encoded again"
    assert [key for key, _ in b.saver.saves] == ["a", "large"]


def test_rows_that_do_not_fit_the_plan_are_an_error(b: Bench) -> None:
    b.encode([item("a", rows=3)])
    encoded, _ = b.take(2)
    assert isinstance(encoded.event.error, InternalError)
    assert b.saver.saves == []


def test_what_nobody_waits_for_is_kept_but_not_saved(b: Bench) -> None:
    b.encode([item("a", needed=False)])
    encoded, _ = b.take(2)
    assert not encoded.event.saving
    assert b.saver.saves == []
    assert b.outputs.get("a") is not None


def test_a_kept_output_does_not_use_the_tower(b: Bench) -> None:
    b.encode([item("a")])
    b.take(3)
    kept = b.outputs.get("a")
    b.encode([TowerItem(kept.plan, None, kept, "", lambda: True)])
    assert [told.event for told in b.take(3) if told.kind == "done"] == [(0, 0)]
    assert b.tower.batches == [1]
    assert len(b.saver.saves) == 2


def test_a_save_that_does_not_land_is_reported_and_may_be_repeated(b: Bench) -> None:
    b.saver.refused = {"a"}
    b.saver.broken = {"b"}
    b.encode([item("a"), item("b")])
    unsaved = {told.mm_hash: told.event.failed for told in b.take(5) if told.kind == "failed"}
    assert {key: failed.error.message for key, failed in unsaved.items()} == {
        "a": "no room",
        "b": "RuntimeError",
    }
    assert all(failed.retryable for failed in unsaved.values())
    b.saver.refused = set()
    b.engine.save(b.outputs.get("a"))
    assert b.take(1) == [Told("a", SAVED)]


def test_a_save_that_lands_is_told_while_the_next_batch_is_in_the_tower() -> None:
    tower = SlowTower()
    with Bench(tower, "Slow") as bench:
        bench.encode([item("a")])
        bench.take(2)
        bench.encode([item("b")])
        try:
            assert tower.in_second.wait(30)
            bench.saver.land("a")  # type: ignore[attr-defined]
            assert bench.take(1) == [Told("a", SAVED)]
        finally:
            tower.let_go.set()


class Panic(BaseException):
    """What is no Exception, as pyo3's panics are."""


@pytest.mark.parametrize("thread_per_batch", [False, True])
def test_a_tower_that_panics_ends_the_engine_and_answers_nobody(thread_per_batch: bool) -> None:
    class Panicking(Tower):
        def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
            raise Panic("the engine's thread ends")

    assert _dies(Panicking(), thread_per_batch=thread_per_batch).events.empty()


@pytest.mark.parametrize("thread_per_batch", [False, True])
def test_a_lost_device_ends_the_engine_and_answers_nobody(thread_per_batch: bool) -> None:
    class Lost(Tower):
        def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
            self.batches.append(len(items))
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    bench = _dies(Lost(), thread_per_batch=thread_per_batch)
    assert bench.events.empty()
    assert bench.tower.batches == [2], "the items are not tried one by one"


def _dies(tower: Tower, *, thread_per_batch: bool) -> Bench:
    bench, dead = Bench(tower, thread_per_batch=thread_per_batch), threading.Event()
    bench.engine.beat.on_death(dead.set)
    with bench:
        bench.encode([item("a"), item("b")])
        assert dead.wait(30)
        assert bench.engine.beat.dead
    return bench


def test_an_item_that_cannot_be_answered_keeps_no_other_from_its_answer(b: Bench) -> None:
    def broken() -> bool:
        raise RuntimeError("nobody knows")

    bad = item("bad")
    b.encode([item("a"), TowerItem(bad.plan, bad.prepared, None, "", broken), item("c")])
    events = b.take(6)
    encoded = {told.mm_hash: told.event for told in events if told.kind == "encoded"}
    assert isinstance(encoded["bad"].error, InternalError)
    assert [told.mm_hash for told in events if told.event == SAVED] == ["a", "c"]
    assert events[-1].kind == "done"


def test_a_batch_that_cannot_begin_is_answered_and_the_engine_lives_on(b, monkeypatch):
    step = b.engine._step

    def fail_once(batch: Sequence[TowerItem]) -> None:
        monkeypatch.setattr(b.engine, "_step", step)
        raise RuntimeError("no thread left")

    monkeypatch.setattr(b.engine, "_step", fail_once)
    b.encode([item("a"), item("b")])
    first, second, done = b.take(3)
    assert isinstance(first.event, Encoded) and isinstance(first.event.error, InternalError)
    assert isinstance(second.event, Encoded) and isinstance(second.event.error, InternalError)
    assert done == ("", (0, 0))
    b.encode([item("a")])
    assert Told("a", SAVED) in b.take(3)


def test_a_save_whose_output_cannot_be_unpinned_keeps_no_other_from_its_answer(b, monkeypatch):
    unpin = b.outputs.unpin

    def fail_on_a(mm_hash: str) -> None:
        if mm_hash == "a":
            raise RuntimeError("it sticks")
        unpin(mm_hash)

    monkeypatch.setattr(b.outputs, "unpin", fail_on_a)
    b.saver.output.saved += ["a", "b"]
    b.saver.on_progress()
    assert b.take(2) == [Told("a", SAVED), Told("b", SAVED)]


def test_an_event_that_is_not_taken_ends_no_engine(b: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    emit = b.engine._emit
    refused = threading.Event()

    def refuse_once(mm_hash: str, event: Encoded | EncodeEvent) -> None:
        if not refused.is_set():
            refused.set()
            raise RuntimeError("the loop is closed")
        emit(mm_hash, event)

    monkeypatch.setattr(b.engine, "_emit", refuse_once)
    b.encode([item("a")])
    assert [told.kind for told in b.take(2)] == ["ready", "done"]


def test_an_engine_at_rest_beats(b: Bench) -> None:
    before = b.engine.beat.count
    deadline = time.monotonic() + 30
    while b.engine.beat.count == before:
        assert time.monotonic() < deadline, "no beat"
        time.sleep(0.01)


def test_an_item_that_is_refused_is_logged_with_its_trace(b: Bench, caplog: pytest.LogCaptureFixture) -> None:
    traced = replace(item("bad", value=float("inf")), trace_id="f" * 32)
    b.encode([traced])
    b.take(2)
    [record] = [record for record in caplog.records if "NaN" in record.message]
    assert (record.trace_id, record.mm_hash) == ("f" * 32, "bad")  # type: ignore[attr-defined]


@pytest.mark.parametrize("finite", [True, False, None])
def test_the_pass_that_serves_an_output_says_whether_it_is_finite(b, monkeypatch, finite):
    served = list[str]()

    def serve(output: EncoderOutput) -> bool | None:
        served.append(output.plan.mm_hash)
        return finite

    monkeypatch.setattr(b.saver, "serve", serve)
    b.encode([item("a"), item("nobody waits", needed=False), item("infinite", value=math.inf)])
    told = b.take(6 if finite else 4)
    encoded = {each.mm_hash: each.event for each in told if each.kind == "encoded"}
    assert served == ["a", "infinite"]
    refused = {key for key, event in encoded.items() if isinstance(event.error, InvalidRequest)}
    assert refused == {True: set(), False: {"a", "infinite"}, None: {"infinite"}}[finite]


def test_an_output_that_cannot_be_served_is_checked_and_saved(b, monkeypatch):
    def broken(output: EncoderOutput) -> bool | None:
        raise OSError("no memory file")

    monkeypatch.setattr(b.saver, "serve", broken)
    b.encode([item("a"), item("infinite", value=math.inf)])
    events = b.take(4)
    assert [told.mm_hash for told in events if told.event == SAVED] == ["a"]
    errors = [type(told.event.error) for told in events if told.kind == "encoded"]
    assert errors == [type(None), InvalidRequest]
