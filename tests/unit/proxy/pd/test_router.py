"""The router of requests to PD workers: hand-overs that end, are refused, or come too late."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from triptych.base.errors import InvalidRequest
from triptych.protos import pd_pb2
from triptych.protos.convert import error_to_proto
from triptych.proxy.events import Refused
from triptych.proxy.pd import router as module
from triptych.proxy.pd.router import PDRouter
from triptych.proxy.requests.instructions import EndAttempt, Submit
from triptych.proxy.routing import CLEARING_TOKENS
from triptych.proxy.workers import Binding

QUEUED = pd_pb2.SubmitReply(status=pd_pb2.SubmitReply.STATUS_QUEUED)


class NotingLink:
    """A link to a worker that takes every request."""

    attached, set_aside, in_flight = True, False, 0

    def __init__(self, reply: pd_pb2.SubmitReply = QUEUED) -> None:
        self.address = "pd"
        self.reply = reply
        self.submitted: list[int] = []

    def open_to(self, tenant: str) -> bool:
        return True

    def track(self, request_id: str, attempt: int, received: object, tenant: str) -> None: ...
    def forget(self, request_id: str) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def check(self, now: float) -> bool:
        return False

    async def close(self) -> None: ...
    async def submit(self, order: Submit) -> pd_pb2.SubmitReply:
        self.submitted.append(order.attempt)
        return self.reply


def make_request(attempt: int) -> Any:
    return SimpleNamespace(
        request_id="r",
        name="r",
        order=1,
        resumed=attempt > 1,
        call=SimpleNamespace(
            tenant="", priority=0, prompt=(1,), encoder=None, sampling=SimpleNamespace(max_tokens=1)
        ),
        bound=Binding("m", ""),
        content=SimpleNamespace(items=(), chain=()),
        lifecycle=SimpleNamespace(
            attempt=attempt, ended=False, items={}, prompt_token_ids=None, output_token_ids=[]
        ),
        link=None,
        output=SimpleNamespace(paused=False),
        stale_link=None,
        successor_link=None,
        refused_by=set(),
        min_tokens=0,
        deadline=10.0,
        seconds_left=lambda now: 30.0,
        log_extra={},
        sending=nullcontext(),
    )


class Routed:
    """A router over one link, and what its requests are told."""

    def __init__(self, link: NotingLink, monkeypatch: pytest.MonkeyPatch) -> None:
        info = SimpleNamespace(address="pd", capacity={"max_num_seqs": 4, "keeps_items": 1}, model_key="m")
        worker = SimpleNamespace(info=info, role="both")
        pool: Any = SimpleNamespace(
            workers={("pd", "pd"): worker},
            well=lambda kind: [worker],
            silent=lambda kind: [],
            max_model_lens=lambda key: [],
        )
        self.told: list[Any] = []
        events: Any = SimpleNamespace(deliver=lambda request_id, event: self.told.append(event))
        transport: Any = SimpleNamespace(open_link=lambda *_: link)
        monkeypatch.setattr(module, "submit_message", lambda request, *_, **__: request.lifecycle)
        monkeypatch.setattr(module, "min_tokens", lambda call, *_: 1)
        self.router = PDRouter(pool, "proxy", transport, events, lambda: 0.0)
        self.router.sync()

    async def is_told(self) -> None:
        while not self.told:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # what follows the end of the hand-over


async def test_an_attempt_that_is_over_in_the_moment_of_its_hand_over_reaches_no_worker(monkeypatch):
    link = NotingLink()
    routed, request = Routed(link, monkeypatch), make_request(1)
    routed.router.submit(request, Submit(1))
    request.lifecycle.attempt = 2  # before its hand-over has run
    routed.router.release(request, EndAttempt(cancel=True, now=True))
    routed.router.submit(request, Submit(2))
    await routed.is_told()
    await routed.router.close()
    assert link.submitted == [event.attempt for event in routed.told] == [2]


async def test_a_worker_that_knows_the_requests_id_already_is_passed_over_for_a_while(monkeypatch):
    refusal = error_to_proto(InvalidRequest("request_id: drawn before", param="request_id"))
    link = NotingLink(pd_pb2.SubmitReply(status=pd_pb2.SubmitReply.STATUS_REFUSED, error=refusal))
    routed, request = Routed(link, monkeypatch), make_request(1)
    routed.router.submit(request, Submit(1))
    await routed.is_told()
    await routed.router.close()
    assert [event.WhichOneof("body") for event in routed.told] == ["lost"]
    assert request.refused_by == {"pd"}
    assert routed.router._handing == {}, "what is answered is waited for no more"


async def test_a_suspect_that_has_made_tokens_alone_is_none_any_more(monkeypatch):
    link = NotingLink()
    monkeypatch.setattr(link, "set_apart", lambda *_: asyncio.sleep(0, True), raising=False)
    routed, request = Routed(link, monkeypatch), make_request(1)
    suspects = routed.router.suspects
    for incarnation in ("one", "two"):
        suspects.lost("pd", incarnation, ["r"], final=True)
    routed.router.submit(request, Submit(1))
    await routed.is_told()
    routed.router.stepped()
    assert (link.submitted, suspects.suspect("r")) == ([1], True)
    request.lifecycle.output_token_ids += [7] * CLEARING_TOKENS
    routed.router.stepped()
    await routed.router.close()
    assert not suspects.suspect("r")


async def test_the_link_to_a_worker_that_has_fallen_silent_is_given_up(monkeypatch):
    link, given_up = NotingLink(), []
    monkeypatch.setattr(link, "give_up", lambda *, silent: given_up.append(silent), raising=False)
    routed = Routed(link, monkeypatch)
    assert given_up == []
    monkeypatch.setattr(routed.router._pool, "silent", lambda kind: ["pd", "without a link"])
    routed.router.sync()
    await routed.router.close()
    assert given_up == [True]


async def test_an_attempt_that_is_over_frees_its_successor_too(monkeypatch):
    routed, request, other, freed = Routed(NotingLink(), monkeypatch), make_request(1), NotingLink(), []
    monkeypatch.setattr(other, "cancel", freed.append)
    request.successor_link = other
    routed.router.release(request, EndAttempt(cancel=True, now=True))
    await routed.router.close()
    assert (freed, request.successor_link) == (["r"], None)


async def test_the_worker_that_had_a_request_before_is_told_to_stop_by_its_next_hand_over(monkeypatch):
    routed, request, before, freed = Routed(NotingLink(), monkeypatch), make_request(2), NotingLink(), []
    monkeypatch.setattr(before, "cancel", freed.append)
    request.stale_link = before
    routed.router.submit(request, Submit(2))
    await routed.is_told()
    await routed.router.close()
    assert (freed, request.stale_link) == (["r"], None)


@pytest.mark.parametrize(("resumes", "told"), [(False, [Refused]), (True, [])])
async def test_a_request_too_long_for_every_worker_is_refused_unless_it_was_under_way(
    monkeypatch: pytest.MonkeyPatch, resumes: bool, told: list[type]
) -> None:
    pool: Any = SimpleNamespace(
        workers={}, well=lambda kind: [], silent=lambda kind: [], max_model_lens=lambda key: [8]
    )
    delivered: list[type] = []
    events: Any = SimpleNamespace(deliver=lambda request_id, event: delivered.append(type(event)))
    monkeypatch.setattr(module, "min_tokens", lambda call, *_: 9)
    monkeypatch.setattr(module, "too_long", lambda *_: InvalidRequest("too long"))
    router = PDRouter(pool, "proxy", SimpleNamespace(), events, lambda: 0.0)  # type: ignore[arg-type]
    router.submit(make_request(1), Submit(1, resumes=resumes))
    await router.close()
    assert delivered == told
