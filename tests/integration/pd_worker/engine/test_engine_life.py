"""The engine's thread: idle, woken, failing, stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence

import pytest
import torch

from support.engine.engine_cell import Checkpoint, EngineCell, Prompt, engine_cell, reference
from support.engine.engine_events import kind
from support.engine.engine_requests import CountingText
from triptych.base.cpu.step_pacer import CoreWaits, FollowsRows, StepPacer
from triptych.base.cpu.threads import use_threads_here
from triptych.base.engine_beat import BusyClock
from triptych.base.errors import InternalError, InvalidRequest, Unavailable
from triptych.base.types import FinishReason, Placement
from triptych.ec_connector.factory import ECConnectorFactory
from triptych.models.registry import before_each_layer
from triptych.pd_worker.core.outputs import ModelRunnerOutput, SchedulerOutput
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.core.request_events import EngineEvent

ONE = Prompt("What is this?", ((1, 96, 64),))
TWO = Prompt("And what is that?", ((2, 64, 96),))
TEXT = Prompt("Say something about the weather, and then about the sea.")


def prompt_ids(checkpoint: Checkpoint, prompt: Prompt) -> list[int]:
    return reference(checkpoint.path, prompt, 8).prompt_token_ids


@pytest.fixture
def cell(checkpoint: Checkpoint) -> Iterator[EngineCell]:
    with engine_cell(checkpoint) as running:
        yield running


def test_a_budget_below_the_number_of_sequences_is_a_warning(checkpoint, caplog):
    for tokens, warnings in ((8, []), (4, ["--max-num-batched-tokens 4 is below --max-num-seqs 8"])):
        with engine_cell(checkpoint, max_num_seqs=8, max_num_batched_tokens=tokens):
            said = [
                one.getMessage().partition(":")[0] for one in caplog.records if one.levelname == "WARNING"
            ]
        assert said == warnings


def test_the_log_and_the_metrics_name_the_kernels_in_use_and_why_no_faster_ones(checkpoint, caplog):
    caplog.set_level("INFO", "triptych.pd_worker.native")
    with engine_cell(checkpoint, attention_backend="sdpa") as cell:
        found = [
            sample.labels
            for family in cell.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "triptych_pd_kernel" and sample.value == 1
        ]
    kernels = {labels["part"]: (labels["kernel"], labels["why"]) for labels in found}
    assert kernels.keys() == {"linear", "attention", "pages"}
    assert kernels["linear"] == ("oneDNN", "ours multiplies bfloat16: --dtype bfloat16")
    assert kernels["attention"][0] == "sdpa"
    assert f"kernel of linear: oneDNN ({kernels['linear'][1]})" in caplog.text


def test_events_come_in_order_and_once_per_step(cell: EngineCell, checkpoint: Checkpoint) -> None:
    request = cell.request(ONE, prompt_ids(checkpoint, ONE), 8)
    cell.finish([request])
    kinds = [kind(event) for event in cell.events]
    assert kinds[0] == "admitted"
    assert kinds[-9:] == [*["tokens"] * 8, "finished"]
    admitted = cell.wait(request.request_id, "admitted")
    assert list(admitted.prompt_token_ids) == prompt_ids(checkpoint, ONE)
    places = [Placement(place.offset, place.length) for place in admitted.placements]
    assert places == [feature.placement for feature in request.features]


def test_the_engine_is_busy_in_its_steps_alone(cell, checkpoint, monkeypatch):
    cell.answer([TEXT], 8)
    seconds, execute = 0.0, cell.engine.runner.execute

    def step(output: SchedulerOutput) -> ModelRunnerOutput:
        nonlocal seconds
        seconds += 1.0
        return execute(output)

    monkeypatch.setattr(cell.engine.runner, "execute", step)
    cell.engine.beat.busy = clock = BusyClock(lambda: seconds)
    cell.answer([TEXT], 8)
    assert clock.share() == 1.0
    cell.assert_at_rest()
    seconds += 10.0
    assert clock.share() < 1.0


def test_without_a_transfer_no_connector_is_made_and_text_alone_is_answered(checkpoint, monkeypatch):
    def no_connector(*_: object) -> None:
        raise AssertionError("a connector was made")

    monkeypatch.setattr(ECConnectorFactory, "create_connector", no_connector)
    with engine_cell(checkpoint, connector=None) as cell:
        assert not cell.engine.runner.is_ec_transfer_instance()
        assert cell.answer([TEXT], 8) == [reference(checkpoint.path, TEXT, 8).token_ids]
        with pytest.raises(InvalidRequest, match="loads no items"):
            cell.engine.submit(cell.request(ONE, prompt_ids(checkpoint, ONE), 8))
        cell.assert_at_rest()


def test_what_can_never_run_is_refused_at_the_door(checkpoint: Checkpoint) -> None:
    with engine_cell(checkpoint, encoder_cache_memory=1024) as cell:
        with pytest.raises(InvalidRequest, match="--encoder-cache-memory is 1.0 KiB"):
            cell.engine.submit(cell.request(ONE, prompt_ids(checkpoint, ONE), 8))
        cell.answer([TEXT], 8)


def test_requests_left_at_the_stop_end_with_unavailable(cell: EngineCell, checkpoint: Checkpoint) -> None:
    request = cell.request(ONE, prompt_ids(checkpoint, ONE), 8, publish=False)
    cell.engine.submit(request)
    cell.engine.stop()
    assert cell.wait(request.request_id, "finished").error.code == Unavailable.code
    with pytest.raises(Unavailable):
        cell.engine.submit(request)
    cell.assert_at_rest()


def test_an_engine_whose_scheduling_fails_answers_and_lives_on(cell, checkpoint, monkeypatch):
    schedule, failed = cell.engine.scheduler.schedule, threading.Event()

    def fail_once(now: float) -> SchedulerOutput:
        if cell.engine.scheduler.num_waiting and not failed.is_set():
            failed.set()
            raise RuntimeError("planning failed")
        return schedule(now)

    monkeypatch.setattr(cell.engine.scheduler, "schedule", fail_once)
    request = cell.request(TEXT, prompt_ids(checkpoint, TEXT), 8)
    cell.engine.submit(request)
    assert cell.wait(request.request_id, "finished").error.code == InternalError.code
    cell.assert_at_rest()
    assert cell.answer([TEXT], 8) == [reference(checkpoint.path, TEXT, 8).token_ids]


class Panic(BaseException):
    """What is no Exception, as pyo3's panics are."""


def _adds_together(cell: EngineCell, requests: Sequence[EngineRequest]) -> None:
    """All in one batch of commands."""
    with cell.engine._condition:
        for request in requests:
            cell.engine.submit(request)


def test_a_request_that_cannot_be_taken_in_ends_alone_in_its_batch_of_commands(cell, checkpoint, monkeypatch):
    requests = [cell.request(TEXT, prompt_ids(checkpoint, TEXT), 8) for _ in range(3)]
    add = cell.engine.scheduler.add

    def fail_second(request: EngineRequest, now: float) -> None:
        if request is requests[1]:
            raise RuntimeError("no room in the mind")
        add(request, now)

    monkeypatch.setattr(cell.engine.scheduler, "add", fail_second)
    _adds_together(cell, requests)
    ends = [cell.wait(request.request_id, "finished") for request in requests]
    assert [type(end.error) for end in ends] == [type(None), InternalError, type(None)]
    want = reference(checkpoint.path, TEXT, 8).token_ids
    assert [cell.tokens(request.request_id) for request in requests] == [want, [], want]
    cell.assert_at_rest()


def test_a_request_that_fails_when_half_of_it_is_taken_in_leaves_nothing(cell, checkpoint, monkeypatch):
    good, bad = (cell.request(TEXT, prompt_ids(checkpoint, TEXT), 8) for _ in range(2))

    class Broken(CountingText):
        @property
        def finished(self) -> FinishReason | None:  # type: ignore[override]
            raise RuntimeError("the text is broken")

        @finished.setter
        def finished(self, value: FinishReason | None) -> None: ...

    bad.output = Broken(8)
    _adds_together(cell, [bad, good])
    assert cell.wait(bad.request_id, "finished").error.code == InternalError.code
    assert cell.wait(good.request_id, "finished").error is None
    cell.assert_at_rest()


def test_a_key_that_cannot_be_marked_ready_ends_the_requests_on_it_and_no_others(
    cell: EngineCell, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (
        cell.request(prompt, prompt_ids(checkpoint, prompt), 8, publish=False) for prompt in (ONE, TWO)
    )
    keys = [request.features[0].mm_hash for request in (one, two)]
    mark = cell.engine.scheduler.mark_ready

    def fail_on_one(mm_hashes: Iterable[str], now: float) -> None:
        if keys[0] in (named := list(mm_hashes)):
            raise RuntimeError("no such mark")
        mark(named, now)

    monkeypatch.setattr(cell.engine.scheduler, "mark_ready", fail_on_one)
    for request in (one, two):
        cell.engine.submit(request)
        checkpoint.publish(cell.store, request.features)
    cell.engine.items_ready(keys)
    assert cell.wait(one.request_id, "finished").error.code == InternalError.code
    assert cell.wait(two.request_id, "finished").error is None
    assert cell.tokens(two.request_id) == reference(checkpoint.path, TWO, 8).token_ids
    cell.assert_at_rest()


def test_a_request_that_cannot_be_cancelled_keeps_no_other_from_it(cell, checkpoint, monkeypatch):
    stuck, other = (cell.request(ONE, prompt_ids(checkpoint, ONE), 8, publish=False) for _ in range(2))
    cancel = cell.engine.scheduler.cancel

    def fail_on_stuck(request_ids: Iterable[str], proxy_id: str) -> None:
        for request_id in request_ids:
            if request_id == stuck.request_id:
                raise RuntimeError("it will not go")
            cancel([request_id], proxy_id)

    monkeypatch.setattr(cell.engine.scheduler, "cancel", fail_on_stuck)
    for request in (stuck, other):
        cell.engine.submit(request)
    cell.engine.cancel([stuck.request_id, other.request_id], "proxy")
    assert cell.wait(other.request_id, "finished").reason is FinishReason.ABORT


@pytest.mark.parametrize("where", ["schedule", "execute"])
def test_an_engine_that_dies_answers_nobody_so_that_their_proxies_go_elsewhere(
    cell: EngineCell, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    dead = threading.Event()
    cell.engine.beat.on_death(dead.set)

    def panic(_: object) -> None:
        raise Panic("the engine's thread ends")

    request = cell.request(TEXT, prompt_ids(checkpoint, TEXT), 8)
    monkeypatch.setattr(cell.engine.scheduler if where == "schedule" else cell.engine.runner, where, panic)
    cell.engine.submit(request)
    assert dead.wait(30)
    assert cell.engine.beat.dead
    assert not any(kind(event) == "finished" for event in cell.events)


@pytest.mark.parametrize("where", ["_compute", "start_load_caches"])
def test_a_lost_device_ends_the_engine_and_answers_nobody(cell, checkpoint, monkeypatch, where):
    """Whichever part of the step meets it, those included that fail alone for any other reason.

    Of a swap `test_failing_transfers.py` shows it.
    """
    dead = threading.Event()
    cell.engine.beat.on_death(dead.set)

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    runner = cell.engine.runner
    owners = {"_compute": runner, "start_load_caches": runner.get_ec_transfer()}
    monkeypatch.setattr(owners[where], where, fail)
    cell.engine.submit(cell.request(ONE, prompt_ids(checkpoint, ONE), 8))
    assert dead.wait(30)
    assert not any(kind(event) == "finished" for event in cell.events)


def test_an_engine_at_rest_and_one_at_work_beat_and_a_stopped_one_is_not_dead(cell, checkpoint):
    for work in (False, True):
        before = cell.engine.beat.count
        if work:
            cell.answer([TEXT], 8)
        deadline = time.monotonic() + 30
        while cell.engine.beat.count == before:
            assert time.monotonic() < deadline, "no beat"
            time.sleep(0.01)
    cell.engine.stop()
    assert not cell.engine.beat.dead


def test_events_that_nobody_takes_do_not_stop_the_engine(cell, checkpoint, monkeypatch):
    take, failed = cell.take, threading.Event()

    def fail_once(events: list[EngineEvent]) -> None:
        take(events)
        if not failed.is_set():
            failed.set()
            raise RuntimeError("nobody there")

    monkeypatch.setattr(cell, "take", fail_once)
    assert cell.answer([TEXT], 8) == [reference(checkpoint.path, TEXT, 8).token_ids]
    assert failed.is_set()


def test_many_threads_may_submit_and_cancel(cell: EngineCell, checkpoint: Checkpoint) -> None:
    requests = [cell.request(TEXT, prompt_ids(checkpoint, TEXT), 6) for _ in range(12)]

    def drive(part: int) -> None:
        for request in requests[part::3]:
            cell.engine.submit(request)
        cell.engine.cancel([requests[part].request_id], "proxy")

    threads = [threading.Thread(target=drive, args=(part,)) for part in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends = [cell.wait(request.request_id, "finished") for request in requests]
    assert {end.error for end in ends} == {None}
    cell.assert_at_rest()


class _Threads(StepPacer):
    """Gives every layer another number of threads than the one before."""

    def __init__(self) -> None:
        self.layers = 0
        self.rests = threading.Event()

    def choose_threads(self) -> None:
        self.layers += 1
        use_threads_here(1 + self.layers % 2)

    def rest(self) -> None:
        self.rests.set()

    def __enter__(self) -> None:
        self.rests.clear()


def test_the_answer_is_the_same_while_the_number_of_threads_changes_and_then_the_cores_are_free() -> None:
    pacer, checkpoint = _Threads(), Checkpoint.open("qwen3_vl")
    before_each_layer(checkpoint.decoder.module, pacer.choose_threads)
    try:
        with engine_cell(checkpoint, pacer=pacer) as cell:
            prompts = [ONE, TWO, TEXT]
            wanted = [reference(checkpoint.path, prompt, 8).token_ids for prompt in prompts]
            assert cell.answer(prompts, 8) == wanted
            assert pacer.rests.wait(30)
    finally:
        torch.set_num_threads(1)
    assert pacer.layers > 16


class _Rows(FollowsRows):
    """Two threads from 8 rows on, however many cores there are; notes what each step had."""

    def __init__(self, waits: CoreWaits) -> None:
        super().__init__(2, 8, waits=waits)
        self.steps: list[tuple[int, int]] = []

    def plan(self, rows: int) -> None:
        super().plan(rows)
        self.steps.append((rows, torch.get_num_threads()))


class _OthersHaveCores(CoreWaits):
    limit = 1


@pytest.mark.parametrize(
    ("waits", "of_prompts", "limited"),
    [(CoreWaits(lambda: 0.0, lambda: 0.0), 2, False), (_OthersHaveCores(), 1, True)],
)
def test_prompts_on_two_threads_and_decodes_on_one_give_what_generate_gives(
    waits: CoreWaits, of_prompts: int, limited: bool
) -> None:
    pacer, checkpoint = _Rows(waits), Checkpoint.open("qwen3_vl")
    try:
        with engine_cell(checkpoint, pacer=pacer) as cell:
            prompts = [ONE, TWO, TEXT]
            wanted = [reference(checkpoint.path, prompt, 8).token_ids for prompt in prompts]
            assert cell.answer(prompts, 8) == wanted
            counted = cell.metric("triptych_pd_limited_steps_total")
    finally:
        torch.set_num_threads(1)
    assert {threads for rows, threads in pacer.steps if rows < 8} == {1}
    assert {threads for rows, threads in pacer.steps if rows >= 8} == {of_prompts}
    assert counted == (limited and sum(rows >= 8 for rows, _ in pacer.steps))
