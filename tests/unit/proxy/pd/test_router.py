"""The router's hand-over of requests, with links that only note what they are given."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from triptych.protos import pd_pb2
from triptych.proxy.pd import router as module
from triptych.proxy.pd.router import PDRouter
from triptych.proxy.requests.instructions import EndAttempt, Submit


class NotingLink:
    """A link to a worker that takes every request."""

    attached, set_aside, in_flight = True, False, 0

    def __init__(self) -> None:
        self.address = "pd"
        self.submitted: list[int] = []

    def track(self, request_id: str, attempt: int, received: object) -> None: ...
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
        call=SimpleNamespace(prompt=(1,), encoder=None, sampling=SimpleNamespace(max_tokens=1)),
        bound=SimpleNamespace(model_key="m"),
        content=SimpleNamespace(items=(), chain=()),
        lifecycle=SimpleNamespace(attempt=attempt, ended=False, items={}, output_token_ids=[]),
        link=None,
        output=SimpleNamespace(paused=False),
        stale_link=None,
        refused_by=set(),
        least_tokens=0,
        deadline=10.0,
        log_extra={},
    )


async def test_an_attempt_that_is_over_in_the_moment_of_its_hand_over_reaches_no_worker(monkeypatch):
    link = NotingLink()
    info = SimpleNamespace(address="pd", capacity={"max_num_seqs": 4, "keeps_items": 1}, model_key="m")
    worker = SimpleNamespace(info=info)
    pool: Any = SimpleNamespace(
        workers={("pd", "pd"): worker},
        well=lambda kind: [worker],
        silent=lambda kind: [],
        max_model_lens=lambda key: [],
    )
    accepted: list[int] = []
    events: Any = SimpleNamespace(deliver=lambda request_id, event: accepted.append(event.attempt))
    transport: Any = SimpleNamespace(open_link=lambda *_: link)
    monkeypatch.setattr(module, "submit_message", lambda request, order, proxy_id, timeout: order)
    monkeypatch.setattr(module, "least_tokens", lambda call, items, resume: 1)
    router = PDRouter(pool, "proxy", transport, events, lambda: 0.0)
    router.sync()
    request = make_request(1)

    router.submit(request, Submit(1, None, frozenset(), frozenset()))
    request.lifecycle.attempt = 2  # before its hand-over has run
    router.release(request, EndAttempt(cancel=True, now=True))
    router.submit(request, Submit(2, None, frozenset(), frozenset()))
    while not accepted:
        await asyncio.sleep(0)
    await router.close()
    assert link.submitted == accepted == [2]
