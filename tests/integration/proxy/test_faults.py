"""Faults end as the table says, and jobs are skipped for what a PD worker holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from openai import APIError, APIStatusError

from support.fakes.fake_pd import FakePD
from support.fakes.fake_workers import key_of, picture, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.faults import DAMAGE, FAULTS, Fault
from support.waiting import until
from triptych.protos import common_pb2, encoder_pb2, pd_pb2
from triptych.proxy.requests import lifecycle
from triptych.store import keys
from triptych.store.embedding_store import EmbeddingStore

PICTURE = picture("p")
TOKENS = 12
#: The stream is held when so many tokens have come.
HELD_AT = 5
#: No worker counts as lost in the time of a test.
NEVER = 600.0
OPTIONS: dict[str, dict[str, float]] = {
    "stalls": {"health_timeout": 2.0},
    "is silent": {"health_timeout": NEVER, "silence": 2.0},
    "says nothing more": {"phase_timeout": 2.0},
}


def _failed(code: str, **more: Any) -> encoder_pb2.JobFailed:
    return encoder_pb2.JobFailed(error=common_pb2.Error(code=code, message=code), retryable=True, **more)


def _another_owner(cluster: FakeCluster) -> None:
    first, second = cluster.encoders
    for encoder, other in ((first, second), (second, first)):
        encoder.failures.append(_failed("unavailable", owner_address=other.address, owner_token="t"))


def _lose(*digests: str) -> Callable[[FakeCluster], None]:
    return lambda cluster: cluster.pd_workers[0].missing.update({key_of(PICTURE): list(digests)})


def _fail(*failures: encoder_pb2.JobFailed) -> Callable[[FakeCluster], None]:
    return lambda cluster: cluster.encoders[0].failures.extend(failures)


def _refuse(code: str) -> Callable[[FakeCluster], None]:
    error = common_pb2.Error(code=code, message=code, retry_after=1.0)
    return lambda cluster: [worker.refusals.append(error) for worker in cluster.pd_workers]  # type: ignore[return-value]


#: What is set up before the request is asked.
SCRIPTS: dict[str, Callable[[FakeCluster], None]] = {
    "fails twice": _fail(*[_failed("overloaded")] * 2),
    "fails every try": _fail(*[_failed("internal_error")] * 9),
    "names another owner": _another_owner,
    "names an owner that is gone": _fail(
        _failed("unavailable", owner_address="127.0.0.1:1", owner_token="gone")
    ),
    "loses the item": _lose(""),
    "damages the item": _lose(DAMAGE),
    "loses the item every time": _lose(*[""] * lifecycle.MAX_ITEM_LOSSES),
    "refuses as unavailable": _refuse("unavailable"),
    "is full, and so is the other": _refuse("overloaded"),
    "repeats every frame": lambda cluster: setattr(cluster.pd_workers[0], "repeat_frames", True),
}


class Stage:
    """Holds the request at its stage, and finds the worker that has it there."""

    def __init__(self, fault: Fault, cluster: FakeCluster) -> None:
        self.stage, self.cluster = fault.stage, cluster
        for encoder in cluster.encoders:
            if self.stage in ("queued", "encoding"):
                (encoder.gate if self.stage == "queued" else encoder.tower).clear()
        for worker in cluster.pd_workers:
            worker.pause_at = HELD_AT if self.stage == "stream" else None

    def victim(self) -> Any:
        for encoder in self.cluster.encoders:
            if encoder.jobs if self.stage == "queued" else encoder.runs:
                return encoder if self.stage != "stream" else self._streaming()
        return None

    def _streaming(self) -> FakePD | None:
        held = (worker for worker in self.cluster.pd_workers if not worker.gate.is_set())
        return next(held, None) if self.cluster.received == HELD_AT else None

    def release(self, *workers: Any) -> None:
        for worker in workers:
            worker.gate.set()
            if isinstance(worker, FakePD):
                worker.pause_at = None
            else:
                worker.tower.set()


async def _act(fault: Fault, stage: Stage, victim: Any) -> None:
    """The fault; the others go on, and the victim where it is still to be heard of."""
    everybody = (*stage.cluster.encoders, *stage.cluster.pd_workers)
    stage.release(*(worker for worker in everybody if worker is not victim))
    if fault.act == "dies":
        await victim.kill()
        stage.release(victim)
        if fault.workers == 1:
            await victim.start()
    elif fault.act in ("stalls", "is silent"):
        victim.health.answers.clear()
        if fault.workers == 1:
            workers = stage.cluster.pool.workers.values()
            await until(lambda: any(known.silent for known in workers), "its silence")
            stage.release(victim)
    elif fault.pool == "pd":
        [held] = victim.requests.values()
        if fault.act == "breaks its stream":
            victim.break_streams()
            await until(lambda: len(victim.attaches) == 2, "the next stream")
            again = [(one.attempt, one.position) for one in victim.attaches[1].requests]
            assert again == [(1, HELD_AT)]
        else:
            error = common_pb2.Error(code="unavailable", message="the engine stopped")
            unavailable = fault.act == "ends the request as unavailable"
            ending = {"reason": "error", "error": error} if unavailable else {"reason": "no reason"}
            victim.emit(held, finished=pd_pb2.Finished(**ending))
            held.task.cancel()
        stage.release(victim)


async def _ended(asked: asyncio.Task[str]) -> tuple[int, str]:
    """Status and text; an error inside the stream counts as a 500."""
    try:
        return 200, await asked
    except APIStatusError as error:
        return error.status_code, ""
    except APIError:
        return 500, ""


def _jobs_are_one_items(cluster: FakeCluster, fault: Fault) -> None:
    assert {(job.mm_hash, job.media_bytes) for job in cluster.jobs} == {(key_of(PICTURE), len(PICTURE))}
    assert len({job.job_id for job in cluster.jobs}) == len(cluster.jobs)
    assert {media for encoder in cluster.encoders for media in encoder.media} <= {PICTURE}
    if fault.encodings is not None:
        assert sum(encoder.runs for encoder in cluster.encoders) == fault.encodings
    if fault.jobs is not None:
        found = [(job.re_encode, job.damaged_digest, job.failed_lease_token) for job in cluster.jobs]
        assert sorted(found) == sorted(fault.jobs)
    if fault.act == "names another owner":
        assert all(encoder.jobs for encoder in cluster.encoders)


def _attempts_go_on_where_the_last_one_ended(cluster: FakeCluster, fault: Fault) -> None:
    submits = [submit for worker in cluster.pd_workers for submit in worker.submits]
    assert max((submit.attempt for submit in submits), default=0) == fault.attempts
    for submit in submits:
        assert [slot.plan.mm_hash for slot in submit.items] == [key_of(PICTURE)]
        if submit.HasField("resume"):
            received = list(submit.resume.output_token_ids)
            assert received == [1000 + index for index in range(len(received))]
            assert submit.resume.text_sent_chars == len(whole_text(len(received)))
            assert list(submit.resume.prompt_token_ids) == [1, 2, 3]
            assert [slot.state for slot in submit.items] == [pd_pb2.ITEM_STATE_READY]
            assert [place.length for place in submit.resume.placements] == [4]
    if fault.stage == "stream" and fault.attempts > 1:
        assert any(len(submit.resume.output_token_ids) == HELD_AT for submit in submits)


HERE = [
    fault
    for fault in FAULTS
    if fault.act in SCRIPTS or (fault.stage in ("queued", "encoding", "stream") and fault.pool != "store")
]


@pytest.mark.parametrize("fault", HERE, ids=str)
async def test_a_fault_ends_as_the_table_says(fault, store, monkeypatch):
    monkeypatch.setattr(lifecycle, "_LONGEST_PAUSE", 0.01)
    pool = {"encoder": "encoders", "pd": "pd_workers"}.get(fault.pool)
    workers: dict[str, Any] = {pool: fault.workers} if pool else {}
    async with FakeCluster(store, **workers, **OPTIONS.get(fault.act, {})) as cluster:
        SCRIPTS.get(fault.act, lambda _: None)(cluster)
        stage = Stage(fault, cluster)
        asked = asyncio.create_task(cluster.stream(user("?", PICTURE), max_tokens=TOKENS))
        if fault.act not in SCRIPTS:
            await until(lambda: stage.victim() is not None, f"the stage {fault.stage!r}")
            victim = stage.victim()
            await _act(fault, stage, victim)
        status, text = await _ended(asked)
        assert status == fault.status
        assert text == (whole_text(TOKENS) if status == 200 else "")
        _jobs_are_one_items(cluster, fault)
        _attempts_go_on_where_the_last_one_ended(cluster, fault)
        if fault.act not in SCRIPTS:
            victim.health.answers.set()
            stage.release(victim)
        await cluster.at_rest()
        if fault.status == 429:
            assert await cluster.stream(user("?", PICTURE), max_tokens=TOKENS) == whole_text(TOKENS)


FIRST, SECOND = picture("first"), picture("second")
UNENCODED = pd_pb2.ITEM_STATE_UNENCODED


def keeping(cluster: FakeCluster) -> FakeCluster:
    """Its PD workers keep what items gave; it is not started yet."""
    for worker in cluster.pd_workers:
        worker.keeps_items = True
    return cluster


def next_turn(messages: list[dict[str, Any]], *pictures: bytes) -> list[dict[str, Any]]:
    """The conversation with its answer and one question more."""
    return [*messages, {"role": "assistant", "content": whole_text(8)}, *user("and now?", *pictures)]


async def first_turn(cluster: FakeCluster, *pictures: bytes) -> list[dict[str, Any]]:
    """A conversation whose embeddings are lost, and whose PD worker holds what they gave; its next turn."""
    messages = user("?", *pictures)
    assert await cluster.stream(messages) == whole_text(8)
    for media in pictures:
        assert await cluster.store.control.execute("DEL", keys.embedding(key_of(media))) == 1
    served, *_ = by_service(cluster)
    served.held = {key_of(media) for media in pictures}
    return next_turn(messages)


def by_service(cluster: FakeCluster) -> list[FakePD]:
    """After a first turn: its PD workers, the one that served it before the others."""
    return sorted(cluster.pd_workers, key=lambda worker: not worker.submits)


async def killed_in_the_turn(cluster: FakeCluster, served: FakePD, turn: list[dict[str, Any]]) -> None:
    """The worker that has the conversation is killed after four tokens of its turn, and costs none."""
    served.held, served.pause_at = {key_of(FIRST)}, 4
    asked = asyncio.create_task(cluster.stream(turn))
    await until(lambda: cluster.received == 4, "four tokens")
    assert len(cluster.jobs) == 1
    await served.kill()
    assert await asked == whole_text(8)
    assert len(cluster.jobs) == 2


def states(worker: FakePD) -> list[int]:
    """Of the items of the latest request."""
    return [slot.state for slot in worker.submits[-1].items]


def counted(cluster: FakeCluster, name: str, result: str) -> float:
    return cluster.metrics.registry.get_sample_value(name, {"result": result}) or 0.0


async def test_the_second_turn_makes_no_job_for_what_the_worker_holds(store: EmbeddingStore) -> None:
    async with keeping(FakeCluster(store)) as cluster:
        turn = await first_turn(cluster, FIRST, SECOND)
        reply = await cluster.ask(turn, extra_body={"triptych_timings": True})
        assert reply.choices[0].message.content == whole_text(8)
        assert len(cluster.jobs) == 2
        assert states(cluster.pd_workers[0]) == [UNENCODED, UNENCODED]
        assert [item["cache"] for item in reply.triptych_timings["items"]] == ["pd", "pd"]
        assert counted(cluster, "triptych_skipped_jobs_total", "held") == 2
        assert counted(cluster, "triptych_items_total", "pd") == 2
        await cluster.at_rest()


async def test_what_the_worker_misses_is_encoded_and_counted(store: EmbeddingStore) -> None:
    async with keeping(FakeCluster(store)) as cluster:
        turn = await first_turn(cluster, FIRST, SECOND)
        cluster.pd_workers[0].held = {key_of(FIRST)}
        reply = await cluster.ask(turn, extra_body={"triptych_timings": True})
        assert reply.choices[0].message.content == whole_text(8)
        assert [job.mm_hash for job in cluster.jobs[2:]] == [key_of(SECOND)]
        assert [item["cache"] for item in reply.triptych_timings["items"]] == ["pd", "encoded"]
        assert counted(cluster, "triptych_skipped_jobs_total", "missing") == 1
        assert cluster.metrics.registry.get_sample_value("triptych_re_encodes_total") == 0
        await cluster.at_rest()


async def test_an_older_worker_that_takes_the_turn_over_looks_in_the_store_itself(store):
    async with keeping(FakeCluster(store, pd_workers=2)) as cluster:
        turn = await first_turn(cluster, FIRST)
        served, other = by_service(cluster)
        other.keeps_items = None
        await cluster.registry.register(other.info, term=600.0)
        known = cluster.pool.workers
        await until(lambda: "keeps_items" not in known["pd", other.address].info.capacity)
        other.missing = {key_of(FIRST): [""]}
        await killed_in_the_turn(cluster, served, turn)
        assert states(other) == [pd_pb2.ITEM_STATE_READY]
        assert counted(cluster, "triptych_skipped_jobs_total", "missing") == 1
        await cluster.at_rest()
