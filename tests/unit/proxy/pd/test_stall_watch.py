"""A PD worker that shows neither event nor progress stands still; a slow or an old one does not."""

from __future__ import annotations

import asyncio
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from triptych.base.engine_beat import SLOW_FACTOR
from triptych.base.errors import InvalidRequest
from triptych.protos import pd_pb2
from triptych.proxy.events import Refused
from triptych.proxy.pd import router as module
from triptych.proxy.pd.router import PDRouter
from triptych.proxy.pd.stall_watch import StallWatch
from triptych.proxy.requests.instructions import EndAttempt, Submit

LIMIT = 5.0
EVENT = pd_pb2.StepEvents(events=[pd_pb2.RequestEvent(request_id="r")])


def beat(count: int, patience: float = 1.0) -> pd_pb2.StepEvents:
    return pd_pb2.StepEvents(beat=pd_pb2.Beat(count=count, patience=patience))


COMPILES = int(LIMIT * SLOW_FACTOR)


@pytest.mark.parametrize(
    ("limit", "beats", "stalled"),
    [
        (LIMIT, [beat(7)] * 5, False),
        (LIMIT, [beat(7)] * 6, True),
        (LIMIT, [beat(7)] + [None] * 5, True),
        (LIMIT, [beat(7)] * 6 + [beat(8)], False),
        (LIMIT, [beat(700)] * 6 + [beat(1)], False),
        (LIMIT, [None] * 1000, False),
        (0.0, [beat(7)] * 1000, False),
        (LIMIT, [beat(7, SLOW_FACTOR)] * COMPILES, False),
        (LIMIT, [beat(7, SLOW_FACTOR)] * (COMPILES + 1), True),
    ],
    ids=[
        "stands still",
        "for the limit",
        "beats stay away",
        "moves again",
        "restarted",
        "sends no beats",
        "no limit",
        "compiles",
        "compiles too long",
    ],
)
def test_a_worker_whose_count_stands_still_for_the_limit_is_stalled(limit, beats, stalled):
    watch = StallWatch(limit)
    for second, message in enumerate(beats):
        if message is not None:
            watch.observe(message)
        last = watch.stalled(float(second))
    assert last is stalled


def test_a_count_that_changes_an_event_and_tokens_in_lists_are_progress():
    watch = StallWatch(LIMIT)
    listed = pd_pb2.StepEvents(tokens=pd_pb2.StepTokens(request_ids=["r"]))
    for second in range(60):
        watch.observe(beat(min(second, 19)))
        if second >= 20:
            watch.observe(EVENT if second < 40 else listed)
        assert not watch.stalled(float(second))


@pytest.mark.parametrize("patience", [1e30, math.inf, math.nan, -1.0, 0.0])
def test_a_worker_cannot_register_an_endless_or_negative_patience(patience):
    watch = StallWatch(LIMIT)
    said = []
    for second in range(6):
        watch.observe(beat(7, patience))
        said.append(watch.stalled(float(second)))
    assert said == [False] * 5 + [True]


def test_a_proxy_that_was_suspended_itself_suspects_no_worker():
    watch = StallWatch(LIMIT)
    watch.observe(beat(7))
    assert not watch.stalled(0.0)
    assert not watch.stalled(1000.0)


class NotingLink:
    """A link to a worker that takes every request."""

    attached, set_aside, in_flight = True, False, 0

    def __init__(self) -> None:
        self.address = "pd"
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
        return pd_pb2.SubmitReply(status=pd_pb2.SubmitReply.STATUS_QUEUED)


def make_request(attempt: int) -> Any:
    return SimpleNamespace(
        request_id="r",
        name="r",
        order=1,
        resumed=attempt > 1,
        call=SimpleNamespace(tenant="", prompt=(1,), encoder=None, sampling=SimpleNamespace(max_tokens=1)),
        bound=SimpleNamespace(model_key="m"),
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
        log_extra={},
        sending=nullcontext(),
    )


async def test_an_attempt_that_is_over_in_the_moment_of_its_hand_over_reaches_no_worker(monkeypatch):
    link = NotingLink()
    info = SimpleNamespace(address="pd", capacity={"max_num_seqs": 4, "keeps_items": 1}, model_key="m")
    worker = SimpleNamespace(info=info, role="both")
    pool: Any = SimpleNamespace(
        workers={("pd", "pd"): worker},
        well=lambda kind: [worker],
        silent=lambda kind: [],
        max_model_lens=lambda key: [],
    )
    accepted: list[int] = []
    events: Any = SimpleNamespace(deliver=lambda request_id, event: accepted.append(event.attempt))
    transport: Any = SimpleNamespace(open_link=lambda *_: link)
    monkeypatch.setattr(module, "submit_message", lambda request, *_, **__: request.lifecycle)
    monkeypatch.setattr(module, "min_tokens", lambda call, *_: 1)
    router = PDRouter(pool, "proxy", transport, events, lambda: 0.0)
    router.sync()
    request = make_request(1)

    router.submit(request, Submit(1))
    request.lifecycle.attempt = 2  # before its hand-over has run
    router.release(request, EndAttempt(cancel=True, now=True))
    router.submit(request, Submit(2))
    while not accepted:
        await asyncio.sleep(0)
    await router.close()
    assert link.submitted == accepted == [2]


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
