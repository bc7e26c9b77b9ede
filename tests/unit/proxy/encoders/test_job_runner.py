"""What a request is told of its encoder job: the worker's own events, and the word of a failed try."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from support.data.items import bare_plan
from support.data.job_events import of_job
from support.waiting import until
from triptych.base.errors import InternalError, InvalidRequest, Overloaded, TriptychError
from triptych.base.metrics import ProxyMetrics
from triptych.base.types import ItemPlan
from triptych.protos import encoder_pb2, job_events
from triptych.protos.convert import plan_to_proto
from triptych.protos.encoder_pb2 import EncodeEvent, ItemReady
from triptych.proxy.encoders import job as backoff
from triptych.proxy.encoders.job import ItemSource
from triptych.proxy.encoders.job_runner import MAX_INTERNAL_ERRORS, JobRunner
from triptych.proxy.events import JobEvent

KEY = "a" * 64
PLAN = bare_plan(KEY, 4)
PLANNED = job_events.planned(PLAN)


def ready(plan: ItemPlan = PLAN, *, already_stored: bool = False) -> EncodeEvent:
    end = ItemReady(plan=plan_to_proto(plan), already_stored=already_stored, encode_seconds=0.5)
    return EncodeEvent(ready=end)


class Stream:
    """A try's stream; the test ends it."""

    media_sent = True

    def __init__(self, try_id: str, planned: Callable[[str, EncodeEvent], None]) -> None:
        self._try_id, self._planned = try_id, planned
        self.runs = 0
        self.end: asyncio.Future[EncodeEvent] = asyncio.get_running_loop().create_future()

    def plan(self, event: EncodeEvent | None = None) -> None:
        self._planned(self._try_id, event or job_events.planned(PLAN))

    def run(self) -> None:
        self.runs += 1

    async def result(self) -> EncodeEvent:
        return await self.end

    async def close(self) -> None: ...


class Proxy:
    """A runner with one encoder, and what its requests are told."""

    def __init__(self) -> None:
        info = SimpleNamespace(address="e:1", namespaces=("n",), capacity={}, cost_kind="k")
        pool: Any = SimpleNamespace(
            unbound=Counter(),
            encoded_by=lambda _, model: model,
            proxies=1,
            reads_direct=False,
            reaching=lambda _: [SimpleNamespace(info=info)],
        )
        self.told: defaultdict[str, list[JobEvent]] = defaultdict(list)
        self.streams: list[Stream] = []
        self.stored: list[JobEvent] = []
        self.media: Any = SimpleNamespace(nbytes=1, retain=lambda: None, release=lambda: None)
        events: Any = SimpleNamespace(deliver=lambda name, event: self.told[name].append(event))
        self.now = 1.0
        self.runner = JobRunner(
            pool,
            ProxyMetrics(),
            self,  # type: ignore[arg-type]
            events,
            lambda: self.now,
            epoch=lambda: ("epoch", 3),
            on_ready=self.stored.append,
        )

    def open_job(
        self, address: str, job: encoder_pb2.EncodeJob, media: object, planned: Any, trace: Any
    ) -> Any:
        self.streams.append(Stream(job.job_id, planned))
        return self.streams[-1]

    def want(self, request: str = "r", looked_up: float = 2.0) -> float | None:
        source = ItemSource(KEY, "n", "image", self.media, "", "", request, "", 9.0, looked_up)
        return self.runner.start(source)

    async def end(self, event: EncodeEvent | TriptychError, count: int = 1) -> None:
        """Ends the last try; `count` events of the first request follow in all."""
        stream = self.streams[-1].end
        stream.set_exception(event) if isinstance(event, TriptychError) else stream.set_result(event)
        await until(lambda: len(self.told["r"]) >= count, "the end of a try")


@pytest.fixture
async def p():
    proxy = Proxy()
    yield proxy
    await proxy.runner.close()


async def test_every_request_gets_its_workers_own_events_and_the_tower_runs_once_admitted(p: Proxy) -> None:
    assert p.want() is not None
    assert p.want("s") is None, "it joins the job"
    (stream,) = p.streams
    stream.plan()
    assert p.told["r"] == p.told["s"] == [of_job(KEY, PLANNED, "e:1")]
    assert stream.runs == 0
    p.runner.admit("r")
    assert stream.runs == 1
    await p.end(ready(), 2)
    end = of_job(KEY, ready(), "e:1")
    end.store_epoch, end.clock_jumps = "epoch", 3
    assert p.told["r"][1:] == p.told["s"][1:] == p.stored == [end]


async def test_what_a_worker_says_of_itself_and_of_another_item_is_not_read(p: Proxy) -> None:
    p.want()
    p.streams[0].plan(of_job("other", job_events.planned(PLAN), "elsewhere"))
    lie = of_job("other", ready(), "elsewhere")
    lie.store_epoch, lie.clock_jumps = "theirs", 9
    p.runner.admit("r")
    await p.end(lie, 2)
    told = [(event.mm_hash, event.address) for event in p.told["r"]]
    assert told == [(KEY, "e:1")] * 2
    assert (p.told["r"][1].store_epoch, p.told["r"][1].clock_jumps) == ("epoch", 3)


async def test_a_request_that_comes_after_the_plan_or_the_end_is_told_at_once(p: Proxy) -> None:
    p.want()
    p.streams[0].plan()
    p.want("late")
    await until(lambda: p.told["late"], "the plan")
    assert p.told["late"] == [of_job(KEY, PLANNED, "e:1")]
    await p.end(ready(), 2)
    p.want("later", looked_up=0.5)
    await until(lambda: p.told["later"], "the end")
    assert p.told["later"] == p.stored
    assert len(p.streams) == 1


async def test_the_autoscaler_is_told_of_each_new_item_once(p: Proxy) -> None:
    told = list[str]()
    p.runner.on_arrival = told.append
    p.want()
    p.want("s")
    assert len(told) == 1


async def test_a_job_that_its_last_request_leaves_ends_its_stream(p: Proxy) -> None:
    p.want()
    p.want("s")
    p.runner.leave("r")
    await asyncio.sleep(0)
    assert not p.streams[0].end.done()
    p.runner.leave("s")
    await until(p.streams[0].end.cancelled, "the end of the stream")


@pytest.mark.parametrize("stored", [False, True])
async def test_only_a_tower_that_ran_says_what_items_cost(p: Proxy, stored: bool) -> None:
    p.want()
    await p.end(ready(already_stored=stored))
    assert p.runner.model.kinds == ([] if stored else ["k"])


async def test_an_item_that_cannot_be_encoded_ends_with_the_workers_error(p: Proxy) -> None:
    p.want()
    await p.end(job_events.failed(InvalidRequest("image: broken", param="image"), retryable=False))
    (told,) = p.told["r"]
    assert (told.WhichOneof("body"), told.address, told.failed.retryable) == ("failed", "e:1", False)
    assert (told.failed.error.message, told.failed.error.param) == ("image: broken", "image")
    assert len(p.runner.table) == 0


@pytest.mark.parametrize("end", [job_events.failed(Overloaded("full"), retryable=True), Overloaded("full")])
async def test_a_failed_try_is_told_and_followed_by_another(p: Proxy, end: Any) -> None:
    p.want()
    await p.end(end)
    (told,) = p.told["r"]
    assert (told.WhichOneof("body"), told.address, told.failed.retryable) == ("failed", "e:1", True)
    assert told.failed.error.message == "full"
    p.now += backoff.LAST_BACKOFF
    await until(lambda: len(p.streams) == 2, "the next try")


async def test_an_item_at_which_workers_have_bugs_again_and_again_is_given_up(p: Proxy) -> None:
    p.want()
    for count in range(1, MAX_INTERNAL_ERRORS + 1):
        await until(lambda count=count: len(p.streams) == count, "a try")  # type: ignore[misc]
        await p.end(job_events.failed(InternalError("a bug"), retryable=True), count)
        p.now += backoff.LAST_BACKOFF
    retried = [told.failed.retryable for told in p.told["r"]]
    assert retried == [True] * (MAX_INTERNAL_ERRORS - 1) + [False]
    assert p.told["r"][-1].failed.error.message == "a bug"


async def test_a_worker_whose_plan_makes_no_sense_is_left(p: Proxy) -> None:
    p.want()
    bad = ready()
    bad.ready.plan.dtype = "float7"
    await p.end(bad)
    (told,) = p.told["r"]
    assert told.failed.retryable and "dtype" in told.failed.error.message
    assert p.stored == []
