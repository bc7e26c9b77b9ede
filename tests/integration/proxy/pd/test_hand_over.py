"""Requests go from prefill to decode workers: whole answers, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from support.fakes.fake_pd import FakePD, fake_logprobs
from support.fakes.fake_workers import MODEL, picture, token_text, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.protos import common_pb2, proxy_pb2, proxy_pb2_grpc
from triptych.protos.common_pb2 import Error
from triptych.protos.convert import logprobs_from_proto
from triptych.protos.pd_pb2 import KVHandOff, PDLoad, SubmitRequest, Tokens
from triptych.proxy.pd import successors
from triptych.store.embedding_store import EmbeddingStore

TEXT = user("count")
TOKENS = 40
#: Seconds between two tokens.
PACE = 0.01
#: A prefill worker waits at this token: it never ends an answer before the decode worker takes it over.
WAITS_AT = TOKENS // 2


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(successors, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(successors, "PAUSE_SECONDS", 0.05)


@pytest.fixture
async def roles(store: EmbeddingStore) -> AsyncIterator[FakeCluster]:
    """One prefill and one decode worker, and all that is left of them: nothing."""
    cluster = FakeCluster(store, pd_workers=2)
    cluster.pd_workers[0].role, cluster.pd_workers[1].role = "prefill", "decode"
    for worker in cluster.pd_workers:
        worker.pace = PACE
    cluster.pd_workers[0].pause_at = WAITS_AT
    async with cluster:
        yield cluster
        await cluster.at_rest()
        await until(lambda: not any(worker.requests for worker in cluster.pd_workers), "workers at rest")


def both(cluster: FakeCluster) -> tuple[FakePD, FakePD]:
    prefill, decode = cluster.pd_workers
    return prefill, decode


def go_on(worker: FakePD, until_token: int | None = None) -> None:
    """It does not wait any more, or at a later token."""
    worker.pause_at = until_token
    worker.gate.set()


def hand_overs(cluster: FakeCluster) -> dict[str, float]:
    [family] = cluster.metrics.hand_overs.collect()
    return {s.labels["result"]: s.value for s in family.samples if s.name.endswith("_total")}


def resumes(cluster: FakeCluster) -> float:
    [family] = cluster.metrics.resumes.collect()
    return sum(sample.value for sample in family.samples if sample.name.endswith("_total"))


def ask(cluster: FakeCluster, **extra: object) -> asyncio.Task[str]:
    return asyncio.create_task(cluster.stream(TEXT, max_tokens=TOKENS, **extra))


async def test_a_request_begins_at_the_prefill_worker_and_ends_at_the_decode_worker(roles: FakeCluster):
    prefill, decode = both(roles)
    assert await ask(roles) == whole_text(TOKENS)
    [first], taken = prefill.submits, decode.submits[-1]
    assert not first.HasField("resume")
    assert (taken.resume.planned, taken.attempt > 1) == (True, True)
    await until(lambda: prefill.cancels == [first.request_id], "that the prefill worker frees it")
    assert hand_overs(roles)["taken"] == 1
    assert resumes(roles) == 0


async def _stream_usage(cluster: FakeCluster) -> int:
    options = {"include_usage": True}
    chunks = await cluster.client.chat.completions.create(
        model=MODEL, messages=TEXT, max_tokens=TOKENS, stream=True, stream_options=options
    )
    *_, last = [chunk async for chunk in chunks]
    return last.usage.prompt_tokens_details.cached_tokens


async def _chat(cluster: FakeCluster) -> int:
    return (await cluster.ask(TEXT, max_tokens=TOKENS)).usage.prompt_tokens_details.cached_tokens


async def _completion(cluster: FakeCluster) -> int:
    reply = await cluster.client.completions.create(model=MODEL, prompt="count", max_tokens=TOKENS)
    return reply.usage.prompt_tokens_details.cached_tokens


async def _response(cluster: FakeCluster) -> int:
    reply = await cluster.client.responses.create(model=MODEL, input="count", max_output_tokens=TOKENS)
    return reply.usage.input_tokens_details.cached_tokens


async def _response_stream(cluster: FakeCluster) -> int:
    events = await cluster.client.responses.create(
        model=MODEL, input="count", max_output_tokens=TOKENS, stream=True
    )
    *_, last = [event async for event in events]
    return last.response.usage.input_tokens_details.cached_tokens


async def _message(cluster: FakeCluster) -> int:
    body = {"model": MODEL, "messages": TEXT, "max_tokens": TOKENS}
    reply = await cluster.client._client.post(f"http://127.0.0.1:{cluster.port}/v1/messages", json=body)
    return reply.json()["usage"]["cache_read_input_tokens"]


async def _grpc(cluster: FakeCluster) -> int:
    request = proxy_pb2.ChatRequest(
        model=MODEL,
        messages=[{"role": "user", "parts": [{"text": "count"}]}],
        sampling=common_pb2.SamplingParams(max_tokens=TOKENS),
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        stub: Any = proxy_pb2_grpc.ProxyServiceStub(channel)
        *_, last = [event async for event in stub.Chat(request, timeout=20.0)]
    return last.finish.cached_tokens


@pytest.mark.parametrize("older", ["", "prefill", "decode"])
@pytest.mark.parametrize(
    "read", [_chat, _stream_usage, _completion, _response, _response_stream, _message, _grpc]
)
async def test_as_cached_counts_what_the_prefill_worker_found(
    roles: FakeCluster, read: Callable[[FakeCluster], Awaitable[int]], older: str
):
    """The decode worker's own count is of what it got from that one: 3 of 3."""
    for worker, cached in zip(both(roles), (1, 3), strict=True):
        worker.cached, worker.tells_cached = cached, worker.role != older
    assert await read(roles) == (3 if older == "prefill" else 1)
    assert hand_overs(roles)["taken"] == 1


async def test_choices_and_log_probabilities_come_once_and_in_order(roles: FakeCluster):
    chunks = await roles.client.chat.completions.create(
        model="demo", messages=TEXT, max_tokens=TOKENS, n=3, logprobs=True, top_logprobs=2, stream=True
    )
    tokens: dict[int, list[str]] = {0: [], 1: [], 2: []}
    async for chunk in chunks:
        for choice in chunk.choices:
            tokens[choice.index] += [
                each.token for each in (choice.logprobs and choice.logprobs.content) or ()
            ]
    assert {index: len(found) for index, found in tokens.items()} == dict.fromkeys(range(3), TOKENS)
    assert "".join(tokens[0]) == whole_text(TOKENS)
    assert hand_overs(roles)["taken"] == 3


async def test_of_a_frame_that_is_half_known_the_new_log_probabilities_are_passed_on(roles: FakeCluster):
    prefill, decode = both(roles)
    prefill.pause_at = 1
    decode.admission.clear()
    asked = asyncio.create_task(roles.ask(TEXT, max_tokens=TOKENS, logprobs=True, top_logprobs=1))
    await until(lambda: bool(decode.submits), "the hand-over")
    taken = decode.submits[-1]
    go_on(prefill, 4)
    await until(lambda: roles.received == 4, "tokens beyond it")
    start = len(taken.resume.output_token_ids)
    assert start == 1
    positions = range(start, 6)
    roles.dispatcher.tokens(
        taken.request_id,
        taken.attempt,
        start,
        [1000 + position for position in positions],
        "".join(map(token_text, positions)),
        [logprobs_from_proto(fake_logprobs(at, token_text(at), 1)) for at in positions],
    )
    decode.admission.set()
    [choice] = (await asked).choices
    assert choice.message.content == whole_text(TOKENS)
    assert [each.token for each in choice.logprobs.content] == [token_text(at) for at in range(TOKENS)]


async def test_the_prefill_worker_goes_on_until_the_decode_worker_has_tokens(roles: FakeCluster):
    prefill, decode = both(roles)
    prefill.pause_at = 4
    decode.admission.clear()
    asked = ask(roles)
    await until(lambda: bool(decode.submits), "the hand-over")
    before = roles.received
    go_on(prefill, WAITS_AT)
    await until(lambda: roles.received > before + 10, "tokens meanwhile")
    assert not prefill.cancels
    decode.admission.set()
    assert await asked == whole_text(TOKENS)
    assert hand_overs(roles)["behind"] >= 1


async def test_a_prefill_worker_that_dies_before_the_offer_is_a_loss_as_ever(roles: FakeCluster):
    prefill, decode = both(roles)
    prefill.pause_at = 0
    asked = ask(roles)
    await until(lambda: bool(prefill.submits), "the request at the prefill worker")
    await prefill.kill()
    assert await asked == whole_text(TOKENS)
    assert not decode.submits[-1].resume.planned


async def test_a_prefill_worker_that_dies_during_the_hand_over_loses_nothing(roles: FakeCluster):
    prefill, decode = both(roles)
    decode.admission.clear()
    asked = ask(roles)
    await until(lambda: bool(decode.submits), "the hand-over")
    await until(lambda: roles.received > 5, "tokens meanwhile")
    await prefill.kill()
    await until(lambda: hand_overs(roles).get("after_loss") == 1, "the loss")
    decode.admission.set()
    assert await asked == whole_text(TOKENS)
    assert resumes(roles) == 0


async def test_a_prefill_worker_that_dies_after_the_hand_over_disturbs_nobody(roles: FakeCluster):
    prefill, decode = both(roles)
    asked = ask(roles)
    await until(lambda: bool(prefill.cancels), "the hand-over")
    await prefill.kill()
    assert await asked == whole_text(TOKENS)
    assert len({submit.attempt for submit in decode.submits}) == len(decode.submits)
    assert resumes(roles) == 0


async def test_a_decode_worker_that_dies_before_it_begins_takes_nothing_with_it(roles: FakeCluster):
    prefill, decode = both(roles)
    decode.admission.clear()
    asked = ask(roles)
    await until(lambda: bool(decode.submits), "the hand-over")
    await decode.kill()
    go_on(prefill)
    assert await asked == whole_text(TOKENS)
    assert not prefill.cancels
    assert resumes(roles) == 0


async def test_a_decode_worker_that_dies_in_the_stream_is_followed_by_the_prefill_worker(roles: FakeCluster):
    prefill, decode = both(roles)
    prefill.pause_at, decode.pause_at = TOKENS // 4, TOKENS // 2
    asked = ask(roles)
    await until(lambda: roles.received == TOKENS // 2, "half of the answer")
    go_on(prefill)
    await decode.kill()
    assert await asked == whole_text(TOKENS)
    assert len(prefill.submits) == 2
    assert resumes(roles) == 1


async def test_a_decode_worker_without_room_is_asked_again_meanwhile_nothing_stops(
    roles: FakeCluster,
):
    prefill, decode = both(roles)
    decode.refusals = [Error(code="rate_limit_exceeded", message="full", retry_after=1.0)] * 2
    assert await ask(roles) == whole_text(TOKENS)
    assert len(decode.submits) >= 3
    assert hand_overs(roles)["taken"] == 1
    assert len(prefill.submits) == 1


async def test_what_a_decode_worker_refuses_for_good_stays_where_it_is(roles: FakeCluster):
    prefill, decode = both(roles)
    decode.refusals = [Error(code="invalid_request_error", message="no", param="resume")]
    prefill.pause_at = None
    assert await ask(roles) == whole_text(TOKENS)
    assert (len(prefill.submits), len(decode.submits)) == (1, 1)
    assert hand_overs(roles) == {"kept": 1}


async def test_a_submit_that_breaks_is_sent_again_and_taken_over_once(roles: FakeCluster):
    _, decode = both(roles)
    decode.breaks = 1
    decode.pace = 0.05
    assert await ask(roles) == whole_text(TOKENS)
    assert hand_overs(roles)["taken"] == 1


async def test_a_client_that_leaves_frees_both_workers(roles: FakeCluster):
    prefill, decode = both(roles)
    decode.admission.clear()
    asked = ask(roles)
    await until(lambda: bool(decode.requests), "the hand-over")
    asked.cancel()
    await until(lambda: bool(prefill.cancels and decode.cancels), "the cancels")
    decode.admission.set()


async def test_without_a_decode_worker_the_prefill_worker_serves_whole_answers(store: EmbeddingStore):
    cluster = FakeCluster(store)
    cluster.pd_workers[0].role = "prefill"
    async with cluster:
        assert await cluster.stream(TEXT, max_tokens=TOKENS) == whole_text(TOKENS)
        await cluster.at_rest()
        assert not cluster.pd_workers[0].cancels


async def test_an_older_worker_without_a_role_takes_requests_over_too(store: EmbeddingStore):
    cluster = FakeCluster(store, pd_workers=2)
    prefill, older = cluster.pd_workers
    prefill.role, prefill.pace, older.pace = "prefill", PACE, PACE
    prefill.pause_at = WAITS_AT
    async with cluster:
        asked = [cluster.stream(user(f"count {number}"), max_tokens=TOKENS) for number in range(8)]
        assert await asyncio.gather(*asked) == [whole_text(TOKENS)] * 8
        assert prefill.submits
        assert {submit.resume.planned for submit in older.submits} == {True, False}
        await cluster.at_rest()


async def test_an_offer_of_a_worker_without_a_role_changes_nothing(cluster: FakeCluster):
    [worker] = cluster.pd_workers
    worker.pause_at = 4
    asked = ask(cluster)
    await until(lambda: cluster.received == 4, "the first tokens")
    [held] = worker.requests.values()
    worker.emit(held, tokens=Tokens(position=4, token_ids=[1004], text=token_text(4), offered=True))
    worker.gate.set()
    assert await asked == whole_text(TOKENS)


async def test_short_prompts_are_computed_whole_at_the_decode_worker(store: EmbeddingStore):
    cluster = FakeCluster(store, pd_workers=2, prefill_threshold=100)
    prefill, decode = cluster.pd_workers
    prefill.role, decode.role = "prefill", "decode"
    async with cluster:
        await cluster.ask(user("short"))
        assert (len(prefill.submits), len(decode.submits)) == (0, 1)
        await cluster.ask(user("long " * 100))
        assert len(prefill.submits) == 1
        await cluster.at_rest()


async def test_pictures_are_handed_over_and_encoded_once(roles: FakeCluster):
    answer = await roles.ask(user("what", picture("a")), max_tokens=TOKENS)
    assert answer.choices[0].message.content == whole_text(TOKENS)
    assert len(roles.jobs) == 1
    assert hand_overs(roles)["taken"] == 1


def kept(cluster: FakeCluster, seconds: float = 20.0) -> tuple[FakePD, FakePD]:
    """Both workers, of which the first one's engine keeps the KV of prompts."""
    prefill, decode = both(cluster)
    prefill.kv = KVHandOff(params=b"where", seconds=seconds)
    return prefill, decode


def with_kv(submits: list[SubmitRequest]) -> list[bool]:
    return [submit.resume.HasField("kv") for submit in submits]


async def test_what_an_engine_keeps_of_a_prompt_goes_to_the_decode_worker_once(roles: FakeCluster):
    prefill, decode = kept(roles)
    decode.admission.clear()
    asked = ask(roles)
    await until(lambda: roles.received > 10, "tokens meanwhile: the decode worker is behind them")
    decode.admission.set()
    assert await asked == whole_text(TOKENS)
    first, *others = decode.submits
    assert prefill.submits[0].may_hand_over and not first.may_hand_over
    assert first.resume.kv.params == b"where" and 0 < first.resume.kv.seconds <= 20
    assert others and not any(with_kv(others))


async def test_a_decode_worker_that_refuses_has_read_nothing(roles: FakeCluster):
    _, decode = kept(roles)
    decode.refusals = [Error(code="rate_limit_exceeded", message="full", retry_after=1.0)]
    assert await ask(roles) == whole_text(TOKENS)
    assert with_kv(decode.submits)[:2] == [True, True]


async def test_what_a_decode_worker_that_died_may_have_read_is_computed_by_the_next(store: EmbeddingStore):
    cluster = FakeCluster(store, pd_workers=3)
    prefill, *decoders = cluster.pd_workers
    prefill.role, prefill.kv = "prefill", KVHandOff(params=b"where", seconds=20.0)
    prefill.pause_at = WAITS_AT
    for worker in cluster.pd_workers:
        worker.pace = PACE
    for worker in decoders:
        worker.role = "decode"
        worker.admission.clear()
    async with cluster:
        asked = ask(cluster)
        await until(lambda: any(worker.submits for worker in decoders), "the hand-over")
        died, other = sorted(decoders, key=lambda worker: not worker.submits)
        await died.kill()
        other.admission.set()
        assert await asked == whole_text(TOKENS)
        assert all(with_kv(died.submits)) and other.submits and not any(with_kv(other.submits))
        await cluster.at_rest()


async def test_what_is_not_kept_any_more_is_computed(roles: FakeCluster):
    _, decode = kept(roles, seconds=0.0)
    assert await ask(roles) == whole_text(TOKENS)
    assert not any(with_kv(decode.submits))


async def test_nothing_is_to_be_kept_for_the_last_few_tokens(roles: FakeCluster):
    prefill, _ = kept(roles)
    assert await roles.stream(TEXT, max_tokens=4) == whole_text(4)
    assert not prefill.submits[0].may_hand_over


async def test_nothing_is_to_be_kept_while_no_other_worker_has_room(roles: FakeCluster):
    prefill, decode = kept(roles)
    link = roles.dispatcher._router._links[decode.address]
    decode.beat(1, load=PDLoad(kv_usage=1.0))
    await until(lambda: link.load(time.monotonic()) is not None, "the load")
    prefill.pause_at = None
    assert await ask(roles) == whole_text(TOKENS)
    assert not prefill.submits[0].may_hand_over


async def test_nothing_is_to_be_kept_where_nobody_could_take_it_over(store: EmbeddingStore):
    cluster = FakeCluster(store, pd_workers=2)
    for worker in cluster.pd_workers:
        worker.role = "prefill"
    async with cluster:
        assert await cluster.stream(TEXT, max_tokens=TOKENS) == whole_text(TOKENS)
        assert not any(submit.may_hand_over for worker in cluster.pd_workers for submit in worker.submits)
        await cluster.at_rest()
