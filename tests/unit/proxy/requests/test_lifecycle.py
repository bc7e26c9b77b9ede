from __future__ import annotations

from collections.abc import Sequence

from triptych.base.errors import InvalidRequest
from triptych.base.types import FinishReason, ItemPlan, Usage
from triptych.proxy.call.chat import Delta, Done, Started
from triptych.proxy.requests import instructions as do
from triptych.proxy.requests.lifecycle import MAX_ITEM_LOSSES, Lifecycle, Phase


def plan(key: str) -> ItemPlan:
    return ItemPlan(key, "n", "image", 1, 1, "float32", 1)


def at_worker(*keys: str) -> Lifecycle:
    """A request whose items are all stored and that a worker has admitted."""
    machine = Lifecycle({key: f"field {key}" for key in keys})
    machine.begin()
    machine.looked_up({key: plan(key) for key in keys})
    machine.accepted(1)
    machine.admitted(1, Started((7, 8)), [(0, 1)])
    return machine


def kinds(instructions: Sequence[do.Instruction]) -> list[type]:
    return [type(instruction) for instruction in instructions]


def test_text_is_submitted_at_once() -> None:
    assert Lifecycle({}).begin() == [do.Submit(1, None, frozenset())]


def test_items_are_looked_up_together_and_only_the_missing_ones_get_jobs() -> None:
    machine = Lifecycle({"a": "", "b": ""})
    assert machine.begin() == [do.LookUpItems(("a", "b"))]
    assert machine.looked_up({"a": plan("a")}) == [do.StartJobs(("b",))]


def test_the_request_is_submitted_once_every_item_is_planned() -> None:
    machine = Lifecycle({"a": "", "b": ""})
    machine.begin()
    machine.looked_up({})
    assert machine.planned("a", plan("a")) == []
    assert machine.planned("b", plan("b")) == [do.Submit(1, None, frozenset())]


def test_an_item_that_becomes_ready_during_submit_is_notified_after_it() -> None:
    machine = Lifecycle({"a": ""})
    machine.begin()
    machine.looked_up({})
    machine.planned("a", plan("a"))
    assert machine.item_ready("a", plan("a")) == []
    assert machine.accepted(1) == [do.NotifyItems(("a",))]


def test_an_item_found_stored_by_its_job_counts_as_planned() -> None:
    machine = Lifecycle({"a": ""})
    machine.begin()
    machine.looked_up({})
    assert machine.item_ready("a", plan("a")) == [do.Submit(1, None, frozenset({"a"}))]


def test_admission_allows_the_jobs_to_run_and_shows_the_prompt() -> None:
    machine = Lifecycle({})
    machine.begin()
    assert machine.admitted(1, Started((7, 8)), []) == [do.AdmitJobs(), do.Emit(Started((7, 8)))]


def test_a_loaded_item_returns_its_share() -> None:
    assert at_worker("a").item_loaded(1, "a") == [do.ReturnShare("a")]


def test_a_missing_item_is_encoded_again_at_once_then_ever_later_and_its_last_loss_ends_the_request() -> None:
    machine = at_worker("a")
    for pause in (0, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0):
        again = [do.ReturnShare("a"), do.StartJobs(("a",), True, "d", pause=pause)]
        assert machine.item_missing(1, "a", "d") == again
        machine.item_ready("a", plan("a"))
    last = machine.item_missing(1, "a", "d")[-1]
    assert isinstance(last, do.Fail)
    assert last.error.status == 503


def test_a_loss_that_is_reported_again_before_the_item_is_back_is_one_loss() -> None:
    machine = at_worker("a")
    assert machine.item_missing(1, "a", "") == [do.ReturnShare("a"), do.StartJobs(("a",), True)]
    for _ in range(5):
        assert machine.item_missing(1, "a", "") == []
    assert machine.item_ready("a", plan("a")) == [do.NotifyItems(("a",))]


def test_an_item_that_others_had_and_lost_is_no_loss_of_a_request_that_still_waits_for_it() -> None:
    machine = Lifecycle({"a": ""})
    machine.begin()
    machine.looked_up({})
    machine.planned("a", plan("a"))
    machine.accepted(1)
    for _ in range(5):
        assert machine.item_missing(1, "a", "") == []
    assert machine.item_ready("a", plan("a")) == [do.NotifyItems(("a",))]


def test_tokens_come_once_and_frames_of_other_attempts_are_dropped() -> None:
    machine = at_worker()
    assert machine.tokens(1, 0, [5, 6], "ab") == Delta("ab", [5, 6])
    assert machine.tokens(1, 0, [5, 6], "ab") == ()
    assert machine.tokens(2, 2, [7], "c") == ()
    assert machine.tokens(1, 2, [7], "c") == Delta("c", [7])


def test_a_lost_worker_makes_the_next_attempt_go_on_from_what_was_received() -> None:
    machine = at_worker("a")
    machine.tokens(1, 0, [5, 6], "añ")
    end, submit = machine.worker_lost(1)
    assert end == do.EndAttempt(cancel=True)
    resume = do.ResumeState((7, 8), ((0, 1),), (5, 6), 2)
    assert submit == do.Submit(2, resume, frozenset({"a"}))
    assert machine.worker_lost(1) == []


def test_a_gap_in_the_stream_ends_the_attempt() -> None:
    machine = at_worker()
    machine.tokens(1, 0, [5], "a")
    instructions = machine.tokens(1, 3, [9], "x")
    assert not isinstance(instructions, Delta)
    assert kinds(instructions) == [do.EndAttempt, do.Submit]


def test_the_prompt_is_shown_once_over_all_attempts() -> None:
    machine = at_worker()
    machine.worker_lost(1)
    assert machine.admitted(2, Started((7, 8)), []) == [do.AdmitJobs()]


def test_the_end_releases_everything_before_it_is_shown() -> None:
    machine = at_worker()
    usage = Usage(2, 1)
    done = Done(FinishReason.STOP, usage, machine.timings)
    assert machine.finished(1, "stop", usage) == [
        do.EndAttempt(cancel=False),
        do.Leave(),
        do.Emit(done),
    ]
    assert machine.phase is Phase.ENDED


def test_a_client_that_leaves_cancels_at_the_worker_only_once() -> None:
    machine = at_worker()
    assert machine.client_gone() == [do.EndAttempt(cancel=True), do.Leave()]
    assert machine.client_gone() == []


def test_a_client_that_leaves_early_has_nothing_to_cancel_at_a_worker() -> None:
    machine = Lifecycle({"a": ""})
    machine.begin()
    assert machine.client_gone() == [do.Leave()]


def test_an_items_error_names_the_field_that_holds_it() -> None:
    machine = Lifecycle({"a": "messages[0].content[1].image_url.url"})
    machine.begin()
    machine.looked_up({})
    fail = machine.job_failed("a", InvalidRequest("truncated"))[-1]
    assert isinstance(fail, do.Fail)
    assert fail.error.param == "messages[0].content[1].image_url.url"
    assert fail.error.status == 400


def test_an_items_error_does_not_name_the_item_twice() -> None:
    machine = Lifecycle({"a": "file"})
    machine.begin()
    fail = machine.job_failed("a", InvalidRequest("audio: no WAV file", param="audio"))[-1]
    assert isinstance(fail, do.Fail)
    assert (fail.error.message, fail.error.param) == ("file: no WAV file", "file")


def test_an_error_about_the_processors_options_keeps_its_own_field() -> None:
    machine = Lifecycle({"a": "messages[0].content[1].image_url.url"})
    machine.begin()
    fail = machine.job_failed("a", InvalidRequest("no such option", param="mm_processor_kwargs.x"))[-1]
    assert isinstance(fail, do.Fail)
    assert fail.error.param == "mm_processor_kwargs.x"


def test_the_deadline_is_504_and_503_when_something_was_not_there() -> None:
    fail = at_worker().deadline()[-1]
    assert isinstance(fail, do.Fail)
    assert fail.error.status == 504
    machine = at_worker("a")
    machine.item_missing(1, "a", "")
    fail = machine.deadline(encoders=False)[-1]
    assert isinstance(fail, do.Fail)
    assert (fail.error.status, fail.error.retry_after) == (503, 2.0)


def test_nothing_happens_after_the_end() -> None:
    machine = at_worker("a")
    machine.client_gone()
    assert machine.tokens(1, 0, [1], "a") == ()
    assert machine.item_missing(1, "a", "") == []
    assert machine.item_ready("a", plan("a")) == []
    assert machine.deadline() == []
    assert machine.worker_lost(1) == []


def waiting_for_encoders(*keys: str) -> Lifecycle:
    """Admitted with items that nobody has encoded when the encoders go."""
    machine = Lifecycle({key: "" for key in keys})
    machine.begin()
    machine.looked_up({})
    for key in keys:
        machine.planned(key, plan(key))
    machine.accepted(1)
    machine.admitted(1, Started((7, 8)), [(0, 1)])
    assert machine.encoders_gone() == [do.EndAttempt(cancel=True, now=True)]
    assert machine.phase is Phase.WAIT
    return machine


def test_without_encoders_a_request_gives_its_room_back_and_goes_on_when_they_are_back() -> None:
    machine = waiting_for_encoders("a")
    assert machine.encoders_gone() == []
    (again,) = machine.encoders_back()
    assert isinstance(again, do.Submit)
    assert again.attempt == 3
    assert again.resume is not None
    assert machine.encoders_back() == []


def test_without_encoders_a_request_goes_on_when_its_last_item_is_stored_by_others() -> None:
    machine = waiting_for_encoders("a", "b")
    assert machine.item_ready("a", plan("a")) == []
    (again,) = machine.item_ready("b", plan("b"))
    assert isinstance(again, do.Submit)
    assert again.ready == {"a", "b"}


def test_what_the_given_up_attempt_still_says_counts_no_more() -> None:
    machine = waiting_for_encoders("a")
    for attempt in (1, 2):
        assert machine.worker_lost(attempt) == []
    assert machine.tokens(1, 0, [5], "x") == ()
    assert machine.admitted(1, Started((7, 8)), [(0, 1)]) == []
    assert machine.item_missing(1, "a", "") == []
    assert machine.phase is Phase.WAIT


def test_a_request_with_all_its_items_stays_where_it_is_without_encoders() -> None:
    assert at_worker("a").encoders_gone() == []
    text = Lifecycle({})
    text.begin()
    assert text.encoders_gone() == []


def test_a_request_that_waits_for_encoders_ends_like_any_other() -> None:
    assert waiting_for_encoders("a").client_gone() == [do.Leave()]
    assert kinds(waiting_for_encoders("a").deadline()) == [do.Leave, do.Fail]
    assert kinds(waiting_for_encoders("a").job_failed("a", InvalidRequest("no"))) == [do.Leave, do.Fail]


def expecting(*expected: str, stored: Sequence[str] = ()) -> Lifecycle:
    """A request whose items are stored, expected at its PD worker, or neither."""
    machine = Lifecycle({key: f"field {key}" for key in "abc"})
    machine.begin()
    machine.looked_up({key: plan(key) for key in stored}, {key: plan(key) for key in expected})
    return machine


def test_items_expected_at_a_pd_worker_get_no_jobs_and_are_submitted_as_such() -> None:
    machine = Lifecycle({"a": "", "b": "", "c": ""})
    machine.begin()
    assert machine.looked_up({"b": plan("b")}, {"a": plan("a")}) == [do.StartJobs(("c",))]
    assert machine.planned("c", plan("c")) == [do.Submit(1, None, frozenset("b"), frozenset("a"))]


def test_a_request_that_needs_no_encoder_lacks_nothing() -> None:
    machine = expecting("a", "b", stored="c")
    machine.accepted(1)
    assert not machine.lacks_items
    assert machine.encoders_gone() == []
    machine.item_missing(1, "a", "")
    assert machine.lacks_items
    assert kinds(machine.encoders_gone()) == [do.EndAttempt]


def test_an_expected_item_that_is_there_is_counted_once() -> None:
    machine = expecting("a", "b", "c")
    assert machine.item_loaded(1, "a") == [do.SkipJob("a")]
    assert machine.item_loaded(1, "a") == [do.ReturnShare("a")]
    machine.worker_lost(1)
    assert machine.item_loaded(2, "a") == [do.ReturnShare("a")]


def test_an_expected_item_that_is_missing_is_encoded_for_the_first_time_and_once() -> None:
    machine = expecting("a", "b", "c")
    machine.accepted(1)
    assert machine.item_missing(1, "a", "") == [do.StartJobs(("a",), expected=True)]
    assert machine.item_missing(1, "a", "") == []
    assert machine.item_ready("a", plan("a")) == [do.NotifyItems(("a",))]
    for _ in range(MAX_ITEM_LOSSES - 1):  # its losses count from here on
        assert kinds(machine.item_missing(1, "a", "d")) == [do.ReturnShare, do.StartJobs]
        machine.item_ready("a", plan("a"))
    assert kinds(machine.item_missing(1, "a", "d"))[-1] is do.Fail


def test_the_next_attempt_expects_what_nobody_has_missed() -> None:
    machine = expecting("a", "b", stored="c")
    machine.accepted(1)
    machine.item_missing(1, "a", "")
    again = machine.worker_lost(1)
    assert again[-1] == do.Submit(2, None, frozenset("c"), frozenset("b"))
    assert machine.item_missing(2, "b", "") == [do.StartJobs(("b",), expected=True)]


def test_a_deadline_names_the_encoders_only_where_one_is_needed() -> None:
    machine = expecting("a", "b", "c")
    machine.accepted(1)
    late = machine.deadline(encoders=False)[-1]
    assert isinstance(late, do.Fail)
    assert "encoder" not in late.error.message
    machine = expecting("a", "b", "c")
    machine.accepted(1)
    machine.item_missing(1, "b", "")
    late = machine.deadline(encoders=False)[-1]
    assert isinstance(late, do.Fail)
    assert "encoder worker" in late.error.message
