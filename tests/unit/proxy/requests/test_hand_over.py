from __future__ import annotations

import pytest

from support.data.lifecycles import IDS, at_worker
from support.data.pd_events import pd_admitted, pd_finished, pd_loaded, pd_missing
from triptych.base.delta import Delta
from triptych.base.errors import InvalidRequest
from triptych.protos.pd_pb2 import Tokens
from triptych.proxy import events
from triptych.proxy.call.chat import Done
from triptych.proxy.events import SuccessorBegun, SuccessorSent, WorkerEvent, lost
from triptych.proxy.requests import instructions as do
from triptych.proxy.requests.lifecycle import Lifecycle, Phase
from triptych.proxy.requests.successor import FIRST_REPEATED, MOST_REPEATED, MOST_TRIES

OFFER = WorkerEvent(attempt=1, tokens=Tokens(offered=True))


def answering(count: int = 1, *keys: str) -> Lifecycle:
    """A request with so many tokens of one character each, which its prefill worker has offered."""
    machine = at_worker(*keys)
    put_out(machine, 1, count)
    assert machine.deliver(OFFER) == [do.HandOver(2)]
    return machine


def put_out(machine: Lifecycle, attempt: int, count: int) -> None:
    """So many further tokens: token n is n, and its text a letter."""
    for _ in range(count):
        position = len(machine.output_token_ids)
        assert machine.tokens(attempt, position, [position], letter(position)) is not None


def letter(position: int) -> str:
    return chr(ord("a") + position % 26)


def sent(machine: Lifecycle) -> Lifecycle:
    """Its successor has gone to a decode worker, which has taken it."""
    assert machine.successor is not None
    assert not machine.deliver(SuccessorSent(machine.successor))
    assert not machine.deliver(events.Accepted(machine.successor))
    assert not machine.deliver(pd_admitted(machine.successor, IDS))
    return machine


def begun(machine: Lifecycle, position: int) -> list[do.Instruction]:
    assert machine.successor is not None
    frame = machine.tokens(machine.successor, position, [position], letter(position))
    assert frame == SuccessorBegun(machine.successor, position)
    return list(machine.deliver(frame))


def text_of(deltas: list[object]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, Delta))


def test_the_present_attempt_goes_on_until_the_successor_has_tokens() -> None:
    machine = sent(answering())
    put_out(machine, 1, 3)
    assert begun(machine, 1) == [do.TakeOver(2)]
    assert (machine.attempt, machine.successor, machine.phase) == (2, None, Phase.RUN)
    assert machine.tokens(1, 4, [4], "e") is None
    assert not machine.deliver(lost(1))


@pytest.mark.parametrize("ends", [1, 2], ids=["where it began", "at the decode worker"])
def test_as_cached_counts_what_the_offer_says(ends: int) -> None:
    machine = at_worker()
    put_out(machine, 1, 1)
    assert machine.resume is not None and not machine.resume.HasField("cached_tokens")
    machine.deliver(WorkerEvent(attempt=1, tokens=Tokens(offered=True, cached_tokens=3)))
    assert machine.resume is not None and machine.resume.cached_tokens == 3
    if ends == 2:
        begun(sent(machine), 1)
    assert cached_at_the_end(machine, ends) == 3


def test_where_an_offer_says_nothing_the_worker_that_ends_the_answer_is_believed() -> None:
    machine = sent(answering())
    begun(machine, 1)
    assert cached_at_the_end(machine, 2) == 2


def cached_at_the_end(machine: Lifecycle, attempt: int) -> int:
    """The client's count, where the worker's own is 2."""
    end = pd_finished(attempt, 2, 1, 2)
    *_, done = machine.deliver(end)
    assert isinstance(done, do.Emit) and isinstance(done.output, Done)
    assert done.output.usage.cached_tokens == end.finished.cached_tokens, "traces and the page read the event"
    return done.output.usage.cached_tokens


def test_what_the_successor_repeats_reaches_nobody_twice_and_a_frame_may_be_half_new() -> None:
    machine = sent(answering())
    put_out(machine, 1, 3)
    begun(machine, 1)
    frames = [machine.tokens(2, 1, [1], "b"), machine.tokens(2, 2, [2, 3, 4, 5], "cdef")]
    assert frames == [None, Delta("ef", [4, 5])]
    assert machine.tokens(2, 6, [6], "g") == Delta("g", [6])
    assert machine.output_token_ids == list(range(7))


def test_text_that_the_first_attempt_held_back_comes_once() -> None:
    """The end of what is known may be the beginning of a stop string: its text follows later."""
    machine = sent(answering())
    machine.tokens(1, 1, [1], "")
    machine.tokens(1, 2, [2], "")
    begun(machine, 1)
    frames = [
        machine.tokens(2, 1, [1], ""),
        machine.tokens(2, 2, [2, 3], "bcd"),
        machine.tokens(2, 4, [4], "e"),
    ]
    assert text_of(frames) == "bcde"


def test_a_successor_that_puts_out_other_tokens_is_lost_and_goes_on_from_what_the_client_has() -> None:
    machine = sent(answering())
    put_out(machine, 1, 2)
    begun(machine, 1)
    assert machine.tokens(2, 1, [77], "x") == lost(2)
    assert machine.deliver(lost(2)) == [do.EndAttempt(cancel=True), do.Submit(3, resumes=True)]
    assert machine.resume is not None
    assert list(machine.resume.output_token_ids) == [0, 1, 2]


def test_a_successor_that_ends_before_what_is_known_is_lost() -> None:
    machine = sent(answering())
    put_out(machine, 1, 3)
    begun(machine, 1)
    assert machine.deliver(pd_finished(2, 2, 2))[-1] == do.Submit(3, resumes=True)


def test_a_successor_far_behind_begins_again_from_all_that_is_known() -> None:
    machine = sent(answering())
    put_out(machine, 1, FIRST_REPEATED + 1)
    assert begun(machine, 1) == [do.HandOver(3, behind=True)]
    assert machine.attempt == 1
    assert machine.tokens(2, 2, [2], "c") is None
    sent(machine)
    put_out(machine, 1, 1)
    assert begun(machine, 6) == [do.TakeOver(3)]


def test_one_that_is_always_behind_leaves_the_request_where_it_is() -> None:
    machine = answering()
    for _ in range(MOST_TRIES - 1):
        sent(machine)
        put_out(machine, 1, MOST_REPEATED + 1)
        assert (
            begun(machine, len(machine.output_token_ids) - MOST_REPEATED - 1)[0].attempt == machine.successor
        )
    sent(machine)
    put_out(machine, 1, MOST_REPEATED + 1)
    assert begun(machine, len(machine.output_token_ids) - MOST_REPEATED - 1) == [do.KeepAttempt()]
    put_out(machine, 1, 1)
    assert machine.attempt == 1


def test_a_successor_that_is_lost_is_no_loss_of_the_request_and_is_tried_again() -> None:
    machine = sent(answering())
    assert machine.deliver(lost(2)) == [do.HandOver(3)]
    assert machine.attempt == 1
    put_out(machine, 1, 1)
    assert not machine.deliver(lost(2))


def test_tries_have_an_end() -> None:
    machine = answering()
    for number in range(2, MOST_TRIES + 1):
        assert machine.deliver(lost(number)) == [do.HandOver(number + 1)]
    assert machine.deliver(lost(MOST_TRIES + 1)) == [do.KeepAttempt()]
    assert machine.successor is None


@pytest.mark.parametrize("event", [events.Refused(2, InvalidRequest("no")), pd_missing(2, "a")])
def test_what_a_decode_worker_cannot_have_stays_where_it_is(event: events.AttemptEvent) -> None:
    machine = sent(answering(1, "a"))
    assert machine.deliver(event) == [do.KeepAttempt()]
    put_out(machine, 1, 1)
    assert machine.phase is Phase.RUN


def test_items_that_the_decode_worker_loads_are_not_counted_twice() -> None:
    assert not sent(answering(1, "a")).deliver(pd_loaded(2, "a"))


def test_a_request_whose_prefill_worker_is_lost_goes_on_with_its_successor() -> None:
    machine = sent(answering())
    put_out(machine, 1, 2)
    assert machine.deliver(lost(1)) == [do.TakeOver(2, lost=True)]
    assert machine.tokens(2, 1, [1, 2, 3], "bcd") == Delta("d", [3])


def test_a_successor_that_nobody_has_is_no_help_against_a_loss() -> None:
    assert answering().deliver(lost(1)) == [do.EndAttempt(cancel=True), do.Submit(3, resumes=True)]


def test_one_that_took_over_before_its_submit_was_answered_is_announced_later() -> None:
    machine = answering()
    machine.deliver(SuccessorSent(2))
    assert begun(machine, 1) == [do.TakeOver(2)]
    assert machine.phase is Phase.SUBMIT
    machine.deliver(events.Accepted(2))
    assert machine.phase is Phase.RUN


def test_a_request_that_ends_ends_its_successor_too() -> None:
    machine = sent(answering())
    end, leave, done = machine.deliver(pd_finished(1, 2, 1))
    assert (end, leave) == (do.EndAttempt(cancel=False), do.Leave())
    assert isinstance(done, do.Emit) and isinstance(done.output, Done)
    assert machine.tokens(2, 1, [1], "b") is None


def test_an_offer_comes_once_and_only_of_what_is_at_work() -> None:
    machine = answering()
    assert not machine.deliver(OFFER)
    waiting = Lifecycle()
    waiting.deliver(events.Fetched({}, 0.0))
    assert not waiting.deliver(OFFER)
    assert not at_worker().deliver(WorkerEvent(attempt=1, tokens=Tokens())), "tokens alone offer nothing"


def test_each_further_try_may_be_twice_as_far_behind() -> None:
    machine = answering()
    for behind in (4, 8, 16, 32, 64, 64):
        sent(machine)
        put_out(machine, 1, 100)
        assert begun(machine, len(machine.output_token_ids) - behind - 1) == [
            do.HandOver(machine.successor or 0, behind=True)
        ]
    sent(machine)
    put_out(machine, 1, 100)
    assert begun(machine, len(machine.output_token_ids) - 64) == [do.TakeOver(8)]
