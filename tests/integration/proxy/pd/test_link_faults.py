"""An unexpected error in a PD worker's link is logged, its requests go on, the stream comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from grpc import StatusCode, aio

from support.fakes.fake_workers import picture, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.proxy.pd.link import LAST_RETRY_SECONDS, RETRY_SECONDS, PDLink, retry_pause

TEXT = [{"role": "user", "content": "count"}]


class Fault(Exception):
    """What nobody expects."""


def link_of(cluster: FakeCluster, worker: int = 0) -> PDLink:
    return cluster.dispatcher._router._links[cluster.pd_workers[worker].address]


class Faulty:
    """A callback that fails as often as it is told to, and does its work otherwise."""

    def __init__(self, work: Any, failures: float) -> None:
        self._work = work
        self.failures = failures
        self.failed = 0
        self.called = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.called += 1
        if self.failed < self.failures:
            self.failed += 1
            raise Fault("injected")
        return self._work(*args, **options)


class Altered:
    """An object with another method in place of one of its own."""

    def __init__(self, real: Any, name: str, method: Any) -> None:
        self._real = real
        setattr(self, name, method)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


async def test_a_worker_whose_process_has_changed_behind_the_stream_is_not_set_apart(cluster):
    link = link_of(cluster)
    assert await link.set_apart("a", 8)
    cluster.pd_workers[0].incarnation += 1
    assert not await link.set_apart("a", 8), "the end of its predecessor would be the request's fault"


def inject(link: PDLink, part: str, where: str, failures: float = 1) -> Faulty:
    """That method of the link's part fails from now on."""
    real = getattr(link, part)
    faulty = Faulty(getattr(real, where), failures)
    setattr(link, part, Altered(real, where, faulty))
    return faulty


async def streaming(cluster: FakeCluster, pause_at: int = 4, tokens: int = 12) -> asyncio.Task[str]:
    """A stream whose first tokens have come and whose next ones wait at every worker's gate."""
    for worker in cluster.pd_workers:
        worker.pause_at = pause_at
    asked = asyncio.create_task(cluster.stream(TEXT, max_tokens=tokens))
    await until(lambda: cluster.received == pause_at, "the first tokens")
    for worker in cluster.pd_workers:
        worker.pause_at = None
    return asked


def break_and_go_on(cluster: FakeCluster) -> None:
    for worker in cluster.pd_workers:
        worker.break_streams()
        worker.gate.set()


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_fault_at_an_event_sends_the_links_requests_elsewhere(store, caplog, workers):
    async with FakeCluster(store, pd_workers=workers) as cluster:
        asked = await streaming(cluster)
        at = max(range(workers), key=lambda index: len(cluster.pd_workers[index].submits))
        cluster.pd_workers[at].break_streams()
        await until(lambda: len(cluster.pd_workers[at].attaches) == 2, "the next stream")
        inject(link_of(cluster, at), "_stall", "observe")
        cluster.pd_workers[at].break_streams()
        for worker in cluster.pd_workers:
            worker.gate.set()
        assert await asked == whole_text(12)
        await until(lambda: link_of(cluster, at).attached, "the link's stream")
        assert "the stream of PD worker" in caplog.text
        assert "Fault: injected" in caplog.text
        assert [await cluster.stream(TEXT) for _ in range(4)] == [whole_text(8)] * 4
        await cluster.at_rest()


@pytest.mark.parametrize("failures", [1, 2])
async def test_a_fault_when_the_stream_stands_leaves_requests_with_an_answer(cluster, caplog, failures):
    asked = await streaming(cluster)
    faulty = inject(link_of(cluster), "_owner", "attached", failures)
    ended = inject(link_of(cluster), "_owner", "ended", failures=0)
    break_and_go_on(cluster)
    assert await asked == whole_text(12)
    assert faulty.failed == failures
    assert ended.called == 0, "no request is suspect of an error of the proxy's"
    assert caplog.text.count("Fault: injected") == failures


async def test_a_fault_while_notices_are_sent_leaves_no_request_without_an_answer(cluster, caplog):
    link = link_of(cluster)
    faulty = link._stub.NotifyItems = Faulty(link._stub.NotifyItems, 1)
    assert await cluster.stream(user("?", picture("p"))) == whole_text(8)
    assert faulty.failed == 1
    assert "Fault: injected" in caplog.text


@pytest.mark.parametrize(("code", "calls"), [(StatusCode.UNIMPLEMENTED, 1), (StatusCode.UNAVAILABLE, 2)])
async def test_a_pause_is_sent_again_unless_the_worker_cannot_pause(monkeypatch, cluster, code, calls):
    monkeypatch.setattr("triptych.proxy.pd.link.REATTACH_SECONDS", 3600.0)
    link, pause = link_of(cluster), link_of(cluster)._stub.Pause
    asked = list[object]()

    async def refused_once(message: object, **options: Any) -> object:
        asked.append(message)
        if len(asked) == 1:
            raise aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), "refused")
        return await pause(message, **options)

    link._stub.Pause = refused_once
    link.pause("nobody", True)
    await until(lambda: not link._pending, "nothing more to send")
    assert (len(asked), link.attached) == (calls, True)


def test_pauses_grow_with_errors_in_a_row_up_to_a_limit() -> None:
    pauses = [retry_pause(failures) for failures in range(20)]
    assert pauses[0] == RETRY_SECONDS
    assert pauses == sorted(pauses)
    assert pauses[-1] == LAST_RETRY_SECONDS
