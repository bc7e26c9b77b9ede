from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from support.data.items import bare_plan
from support.data.job_events import job_failed, job_ready
from support.data.lifecycles import IDS, PLACES, at_worker, begun, looked_up, planned, ready, states
from support.data.pd_events import pd_admitted, pd_finished, pd_loaded, pd_missing
from triptych.base.delta import Delta
from triptych.base.errors import InternalError, InvalidRequest, RequestError, Unavailable
from triptych.base.types import FinishReason, Usage
from triptych.protos.convert import error_to_proto
from triptych.protos.pd_pb2 import (
    ITEM_STATE_PENDING,
    ITEM_STATE_READY,
    ITEM_STATE_UNENCODED,
    Admitted,
    ItemPlacement,
    Resume,
)
from triptych.proxy import events
from triptych.proxy.call.chat import Done
from triptych.proxy.events import lost
from triptych.proxy.requests import instructions as do
from triptych.proxy.requests.lifecycle import MAX_ITEM_LOSSES, Lifecycle, Phase


def loaded(attempt: int, key: str, *, held: bool = False) -> do.TellJobs:
    """What the jobs are told of an item that the PD worker has."""
    return do.TellJobs(pd_loaded(attempt, key), held)


def missed(attempt: int, key: str, digest: str = "") -> do.TellJobs:
    """What the jobs are told of an item that the PD worker has not found."""
    return do.TellJobs(pd_missing(attempt, key, digest))


def given_up(reason: str, error: RequestError | None) -> events.WorkerEvent:
    """The end of the first attempt without its answer."""
    event = pd_finished(1, 2, 0, reason=reason)
    if error is not None:
        event.finished.error.CopyFrom(error_to_proto(error))
    return event


def kinds(instructions: Sequence[do.Instruction]) -> list[type]:
    return [type(instruction) for instruction in instructions]


def failure(instructions: Sequence[do.Instruction]) -> RequestError:
    """The error in which they end."""
    return instructions[-1].error  # type: ignore[attr-defined, no-any-return]


def test_text_is_submitted_at_once() -> None:
    assert Lifecycle().deliver(events.Fetched({}, 0.0)) == [do.Submit(1)]


def test_items_are_looked_up_together_and_only_the_missing_ones_get_jobs() -> None:
    machine = Lifecycle()
    assert machine.deliver(events.Fetched({"a": "", "b": ""}, 0.0)) == [do.LookUpItems(("a", "b"))]
    assert looked_up(machine, "a") == [do.StartJobs(("b",))]


def test_the_request_is_submitted_once_every_item_is_planned() -> None:
    machine = begun("a", "b")
    looked_up(machine)
    assert not machine.deliver(planned("a"))
    assert machine.deliver(planned("b")) == [do.Submit(1)]


def test_an_item_that_becomes_ready_during_submit_is_notified_after_it() -> None:
    machine = begun("a")
    looked_up(machine)
    machine.deliver(planned("a"))
    assert not machine.deliver(ready("a"))
    assert machine.deliver(events.Accepted(1)) == [do.NotifyItems(("a",))]


def test_an_item_found_stored_by_its_job_counts_as_planned() -> None:
    machine = begun("a")
    looked_up(machine)
    assert machine.deliver(ready("a")) == [do.Submit(1)]
    assert states(machine) == {"a": ITEM_STATE_READY}


def test_admission_allows_the_jobs_to_run_and_shows_the_prompt() -> None:
    machine = begun()
    admitted = pd_admitted(1, IDS, [])
    assert machine.deliver(admitted) == [do.TellJobs(admitted), do.Emit(Admitted(prompt_token_ids=IDS))]


def test_a_loaded_item_returns_its_share() -> None:
    assert at_worker("a").deliver(pd_loaded(1, "a")) == [loaded(1, "a")]


def test_a_missing_item_is_encoded_again_at_once_then_ever_later_and_its_last_loss_ends_the_request() -> None:
    machine = at_worker("a")
    for pause in (0, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0):
        again = [missed(1, "a", "d"), do.StartJobs(("a",), True, "d", pause=pause)]
        assert machine.deliver(pd_missing(1, "a", "d")) == again
        machine.deliver(ready("a"))
    assert failure(machine.deliver(pd_missing(1, "a", "d"))).status == 503


def test_a_loss_that_is_reported_again_before_the_item_is_back_is_one_loss() -> None:
    machine = at_worker("a")
    assert machine.deliver(pd_missing(1, "a", "")) == [
        missed(1, "a"),
        do.StartJobs(("a",), True),
    ]
    for _ in range(5):
        assert not machine.deliver(pd_missing(1, "a", ""))
    assert machine.deliver(ready("a")) == [do.NotifyItems(("a",))]


def test_an_item_that_others_had_and_lost_is_no_loss_of_a_request_that_still_waits_for_it() -> None:
    machine = begun("a")
    looked_up(machine)
    machine.deliver(planned("a"))
    machine.deliver(events.Accepted(1))
    for _ in range(5):
        assert not machine.deliver(pd_missing(1, "a", ""))
    assert machine.deliver(ready("a")) == [do.NotifyItems(("a",))]


def test_tokens_come_once_and_frames_of_other_attempts_are_dropped() -> None:
    machine = at_worker()
    assert machine.tokens(1, 0, [5, 6], "ab") == Delta("ab", [5, 6])
    assert machine.tokens(1, 0, [5, 6], "ab") is None
    assert machine.tokens(2, 2, [7], "c") is None
    assert machine.tokens(1, 2, [7], "c") == Delta("c", [7])


def test_a_lost_worker_makes_the_next_attempt_go_on_from_what_was_received() -> None:
    machine = at_worker("a")
    machine.tokens(1, 0, [5, 6], "añ")
    end, submit = machine.deliver(lost(1))
    assert end == do.EndAttempt(cancel=True)
    assert submit == do.Submit(2, resumes=True)
    assert states(machine) == {"a": ITEM_STATE_READY}
    place = ItemPlacement(offset=0, length=1)
    assert machine.resume == Resume(
        prompt_token_ids=IDS, placements=[place], output_token_ids=(5, 6), text_sent_chars=2
    )
    assert not machine.deliver(lost(1))


def test_a_gap_in_the_stream_ends_the_attempt() -> None:
    machine = at_worker()
    machine.tokens(1, 0, [5], "a")
    gap = machine.tokens(1, 3, [9], "x")
    assert gap == lost(1)
    assert kinds(machine.deliver(gap)) == [do.EndAttempt, do.Submit]


def test_the_prompt_is_shown_once_over_all_attempts() -> None:
    machine = at_worker()
    machine.deliver(lost(1))
    admitted = pd_admitted(2, IDS, [])
    assert machine.deliver(admitted) == [do.TellJobs(admitted)]


def test_the_end_releases_everything_before_it_is_shown() -> None:
    machine = at_worker()
    usage = Usage(2, 1)
    done = Done(FinishReason.STOP, usage, machine.timings)
    assert machine.deliver(pd_finished(1, 2, 1)) == [
        do.EndAttempt(cancel=False),
        do.Leave(),
        do.Emit(done),
    ]
    assert machine.phase is Phase.ENDED


@pytest.mark.parametrize(
    ("reason", "error"), [("abort", None), ("error", Unavailable("no room")), ("abort", InvalidRequest("no"))]
)
def test_an_end_without_an_answer_goes_on_at_another_worker(reason: str, error: RequestError | None) -> None:
    machine = at_worker()
    away = do.EndAttempt(cancel=True, back_off=True)
    assert machine.deliver(given_up(reason, error)) == [away, do.Submit(2, resumes=True)]


@pytest.mark.parametrize("error", [InvalidRequest("no"), InternalError("the engine failed"), None])
def test_an_end_with_an_error_of_the_request_is_the_requests_end(error: RequestError | None) -> None:
    machine = at_worker()
    found = failure(machine.deliver(given_up("error", error)))
    assert type(found) is (InternalError if error is None else type(error))
    assert machine.ended


def test_the_end_tells_usage_and_seconds_of_each_stage() -> None:
    machine = at_worker()
    end = pd_finished(1, 5, 3, 2, prefill=0.5, decode=0.25)
    end.finished.queue_seconds, end.finished.load_seconds, end.finished.pooled = 1.0, 2.0, b"v"
    *_, last = machine.deliver(end)
    assert last == do.Emit(Done(FinishReason.STOP, Usage(5, 3, 2), machine.timings, pooled=b"v"))
    timings = machine.timings
    assert (timings.queue, timings.load, timings.prefill, timings.decode) == (1.0, 2.0, 0.5, 0.25)


@pytest.mark.parametrize(("modality", "frames"), [("audio", (0, 250, 900)), ("image", ())])
def test_the_prompt_of_audio_alone_comes_with_the_frames_of_its_window(modality, frames) -> None:
    machine = begun("a")
    plan = replace(bare_plan("a"), modality=modality, grid_thw=(0, 250, 900))
    machine.deliver(events.LookedUp({"a": plan}))
    *_, shown = machine.deliver(pd_admitted(1, IDS, PLACES))
    assert isinstance(shown, do.Emit) and isinstance(shown.output, Admitted)
    assert tuple(shown.output.frames) == frames


def test_the_first_attempt_of_a_request_that_gave_its_room_back_resumes_nothing() -> None:
    machine = begun("a")
    looked_up(machine)
    machine.deliver(planned("a"))
    machine.deliver(events.Accepted(1))
    machine.deliver(events.EncodersGone())
    assert machine.deliver(events.EncodersBack()) == [do.Submit(3)]
    assert machine.resume is None


def test_a_client_that_leaves_cancels_at_the_worker_only_once() -> None:
    machine = at_worker()
    assert machine.deliver(events.ClientLeft()) == [do.EndAttempt(cancel=True), do.Leave()]
    assert not machine.deliver(events.ClientLeft())


def test_a_client_that_leaves_early_has_nothing_to_cancel_at_a_worker() -> None:
    machine = begun("a")
    assert machine.deliver(events.ClientLeft()) == [do.Leave()]


URL = "messages[0].content[1].image_url.url"


@pytest.mark.parametrize(
    ("field", "error", "message", "param"),
    [
        (URL, InvalidRequest("truncated"), f"{URL}: truncated", URL),
        ("file", InvalidRequest("audio: no WAV file", param="audio"), "file: no WAV file", "file"),
        (URL, InvalidRequest("no such", param="mm_processor_kwargs.x"), None, "mm_processor_kwargs.x"),
    ],
    ids=["the field that holds it", "not twice", "the processor's options"],
)
def test_an_items_error_names_its_field(field, error, message, param) -> None:
    machine = begun(a=field)
    looked_up(machine)
    failed = failure(machine.deliver(job_failed("a", error)))
    assert (failed.param, failed.status) == (param, 400)
    assert message is None or failed.message == message


def test_the_deadline_is_504_and_503_when_something_was_not_there() -> None:
    assert failure(at_worker().deliver(events.DeadlinePassed())).status == 504
    machine = at_worker("a")
    machine.deliver(pd_missing(1, "a", ""))
    late = failure(machine.deliver(events.DeadlinePassed(encoders=False)))
    assert (late.status, late.retry_after) == (503, 2.0)


def test_nothing_happens_after_the_end() -> None:
    machine = at_worker("a")
    machine.deliver(events.ClientLeft())
    assert machine.tokens(1, 0, [1], "a") is None
    assert not machine.deliver(pd_missing(1, "a", ""))
    assert not machine.deliver(ready("a"))
    assert not machine.deliver(events.DeadlinePassed())
    assert not machine.deliver(lost(1))


def waiting_for_encoders(*keys: str) -> Lifecycle:
    """Admitted with items that nobody has encoded when the encoders go."""
    machine = begun(*keys)
    looked_up(machine)
    for key in keys:
        machine.deliver(planned(key))
    machine.deliver(events.Accepted(1))
    machine.deliver(pd_admitted(1, IDS, PLACES))
    assert machine.deliver(events.EncodersGone()) == [do.EndAttempt(cancel=True, now=True)]
    assert machine.phase is Phase.WAIT
    return machine


def test_without_encoders_a_request_gives_its_room_back_and_goes_on_when_they_are_back() -> None:
    machine = waiting_for_encoders("a")
    assert not machine.deliver(events.EncodersGone())
    (again,) = machine.deliver(events.EncodersBack())
    assert again.attempt == 3
    assert again.resumes
    assert not machine.deliver(events.EncodersBack())


def test_without_encoders_a_request_goes_on_when_its_last_item_is_stored_by_others() -> None:
    machine = waiting_for_encoders("a", "b")
    assert not machine.deliver(ready("a"))
    (again,) = machine.deliver(ready("b"))
    assert again == do.Submit(3, resumes=True)
    assert states(machine) == {"a": ITEM_STATE_READY, "b": ITEM_STATE_READY}


def test_what_the_given_up_attempt_still_says_counts_no_more() -> None:
    machine = waiting_for_encoders("a")
    for attempt in (1, 2):
        assert not machine.deliver(lost(attempt))
    assert machine.tokens(1, 0, [5], "x") is None
    assert not machine.deliver(pd_admitted(1, IDS, PLACES))
    assert not machine.deliver(pd_missing(1, "a", ""))
    assert machine.phase is Phase.WAIT


def test_a_request_with_all_its_items_stays_where_it_is_without_encoders() -> None:
    assert not at_worker("a").deliver(events.EncodersGone())
    text = begun()
    assert not text.deliver(events.EncodersGone())


def test_a_request_that_waits_for_encoders_ends_like_any_other() -> None:
    assert waiting_for_encoders("a").deliver(events.ClientLeft()) == [do.Leave()]
    assert kinds(waiting_for_encoders("a").deliver(events.DeadlinePassed())) == [do.Leave, do.Fail]
    assert kinds(waiting_for_encoders("a").deliver(job_failed("a", InvalidRequest("no")))) == [
        do.Leave,
        do.Fail,
    ]


def expecting(*expected: str, stored: Sequence[str] = ()) -> Lifecycle:
    """A request whose items are stored, expected at its PD worker, or neither."""
    machine = begun(*"abc")
    looked_up(machine, *stored, expected="".join(expected))
    return machine


def test_items_expected_at_a_pd_worker_get_no_jobs_and_are_submitted_as_such() -> None:
    machine = begun("a", "b", "c")
    assert looked_up(machine, "b", expected="a") == [do.StartJobs(("c",))]
    assert machine.deliver(planned("c")) == [do.Submit(1)]
    assert states(machine) == {"a": ITEM_STATE_UNENCODED, "b": ITEM_STATE_READY, "c": ITEM_STATE_PENDING}


def test_a_request_that_needs_no_encoder_lacks_nothing() -> None:
    machine = expecting("a", "b", stored="c")
    machine.deliver(events.Accepted(1))
    assert not machine.lacks_items
    assert not machine.deliver(events.EncodersGone())
    machine.deliver(pd_missing(1, "a", ""))
    assert machine.lacks_items
    assert kinds(machine.deliver(events.EncodersGone())) == [do.EndAttempt]


def test_an_expected_item_that_is_there_is_counted_once() -> None:
    machine = expecting("a", "b", "c")
    assert machine.deliver(pd_loaded(1, "a")) == [loaded(1, "a", held=True)]
    assert machine.deliver(pd_loaded(1, "a")) == [loaded(1, "a")]
    machine.deliver(lost(1))
    assert machine.deliver(pd_loaded(2, "a")) == [loaded(2, "a")]


def test_an_expected_item_that_is_missing_is_encoded_for_the_first_time_and_once() -> None:
    machine = expecting("a", "b", "c")
    machine.deliver(events.Accepted(1))
    assert machine.deliver(pd_missing(1, "a", "")) == [do.StartJobs(("a",), expected=True)]
    assert not machine.deliver(pd_missing(1, "a", ""))
    assert machine.deliver(ready("a")) == [do.NotifyItems(("a",))]
    for _ in range(MAX_ITEM_LOSSES - 1):  # its losses count from here on
        assert kinds(machine.deliver(pd_missing(1, "a", "d"))) == [do.TellJobs, do.StartJobs]
        machine.deliver(ready("a"))
    assert kinds(machine.deliver(pd_missing(1, "a", "d")))[-1] is do.Fail


def test_the_next_attempt_expects_what_nobody_has_missed() -> None:
    machine = expecting("a", "b", stored="c")
    machine.deliver(events.Accepted(1))
    machine.deliver(pd_missing(1, "a", ""))
    again = machine.deliver(lost(1))
    assert again[-1] == do.Submit(2)
    assert states(machine) == {"a": ITEM_STATE_PENDING, "b": ITEM_STATE_UNENCODED, "c": ITEM_STATE_READY}
    assert machine.deliver(pd_missing(2, "b", "")) == [do.StartJobs(("b",), expected=True)]


@pytest.mark.parametrize("missing", [False, True])
def test_a_deadline_names_the_encoders_only_where_one_is_needed(missing: bool) -> None:
    machine = expecting("a", "b", "c")
    machine.deliver(events.Accepted(1))
    if missing:
        machine.deliver(pd_missing(1, "b", ""))
    late = failure(machine.deliver(events.DeadlinePassed(encoders=False)))
    assert ("encoder worker" in late.message) is missing


def test_a_failed_try_of_an_items_job_changes_nothing_for_its_request() -> None:
    machine = begun("a")
    looked_up(machine)
    assert not machine.deliver(job_failed("a", InvalidRequest("elsewhere"), retryable=True))
    assert machine.phase is Phase.PLAN
    assert machine.deliver(ready("a")) == [do.Submit(1)]


def test_the_longest_tower_and_save_of_the_items_are_the_requests() -> None:
    machine = begun("a", "b")
    looked_up(machine)
    machine.deliver(job_ready("a", bare_plan("a"), encode=0.5, save=0.25))
    machine.deliver(job_ready("b", bare_plan("b"), encode=0.25, save=0.75))
    assert (machine.timings.encode, machine.timings.save) == (0.5, 0.75)
