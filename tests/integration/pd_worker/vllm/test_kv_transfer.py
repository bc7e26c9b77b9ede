"""What a prefill worker's vLLM keeps of a prompt for a decode worker's, and what that one reads."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from support.engine.engine_requests import make_request
from support.vllm.scripted_server import data, event, fails, greedy, hangs, whole
from support.vllm.serving import fronting
from triptych.base.types import KeptKV
from triptych.pd_worker.vllm import kv_transfer
from triptych.protos import common_pb2, pd_pb2

SAMPLING = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
KEPT = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "10.0.0.7"}


def kv(seconds: float = 20.0, params: bytes = b'{"remote_host":"10.0.0.7"}') -> pd_pb2.KVHandOff:
    return pd_pb2.KVHandOff(params=params, seconds=seconds)


fails_to_read = fails(500, "no such engine")


def counted(served) -> dict[str, float]:
    samples = next(iter(served.metrics.kv_transfers.collect())).samples
    return {one.labels["result"]: one.value for one in samples if one.name.endswith("_total")}


@pytest.fixture
async def prefill(server, store):
    async with fronting(server, store, role="prefill", kv_connector="nixl") as served:
        yield served


@pytest.fixture
async def decode(server, store):
    async with fronting(server, store, role="decode", kv_connector="nixl") as served:
        yield served


async def test_a_prefill_worker_offers_its_prompts_kv_with_the_first_token_and_goes_on(server, prefill):
    heard = asyncio.Event()

    async def goes_on(call):
        """The whole answer, once the first tokens of it, and the offer with them, have been sent."""
        response = await call.stream()
        for index, token in enumerate(tokens := greedy(call.body, call.max_tokens)):
            if index == 2:
                await heard.wait()
            reason = "length" if index == len(tokens) - 1 else None
            await response.write(event([token], finish_reason=reason))
        usage = {"prompt_tokens_details": {"cached_tokens": 3}}
        await response.write(data({"choices": [], "usage": usage}))
        return response

    known = {"prompt_tokens_details": {"cached_tokens": 1}}
    server.scripts = [whole(kv_transfer_params=KEPT, usage=known), goes_on]
    client = prefill.client
    await client.submit(client.message("r1", "hello", may_hand_over=True, **SAMPLING))
    await client.has("r1", "offer")
    heard.set()
    found = await client.until("r1")
    first, second = (call.body for call in server.calls)
    prompt = list(found.admitted.prompt_token_ids)
    assert (first["stream"], first["kv_transfer_params"]["do_remote_decode"]) == (False, True)
    assert first["sampling_params"]["max_tokens"] == 1
    assert second["token_ids"] == prompt + found.token_ids[:1] and "kv_transfer_params" not in second
    assert found.token_ids == greedy({"token_ids": prompt}, 12)
    assert b"10.0.0.7" in found.offered.kv.params
    assert 0 < found.offered.kv.seconds < kv_transfer.KEPT_SECONDS
    # What this worker has computed itself was not cached before.
    assert (found.finished.cached_tokens, found.offered.cached_tokens) == (1, 1)
    assert counted(prefill) == {"kept": 1}


@pytest.mark.parametrize(
    "message",
    [
        pytest.param({}, id="the proxy knows no worker that could take it over"),
        pytest.param(
            {"may_hand_over": True, "output_format": common_pb2.OutputFormat(regex="[a-z]+")},
            id="its grammar begins with its first token",
        ),
        pytest.param({"may_hand_over": True, "presence_penalty": 0.5}, id="a penalty of its own tokens"),
    ],
)
async def test_nothing_is_kept_where_nobody_could_go_on(server, prefill, message):
    client = prefill.client
    await client.submit(client.message("r1", "hello", **{**SAMPLING, **message}))
    found = await client.until("r1")
    (call,) = server.calls
    assert call.body["stream"] and "kv_transfer_params" not in call.body
    assert "offer" not in found.bodies and len(found.token_ids) == 12


async def test_an_output_that_ends_with_its_first_token_is_not_offered(server, prefill):
    async def ends(call):
        response = await whole(kv_transfer_params=KEPT)(call)
        response.text = response.text.replace("length", "stop")
        return response

    server.scripts = [ends]
    client = prefill.client
    await client.submit(client.message("r1", "hello", may_hand_over=True, **SAMPLING))
    found = await client.until("r1")
    assert (found.finished.reason, len(found.token_ids)) == ("stop", 1)
    assert len(server.calls) == 1 and "offer" not in found.bodies


async def test_a_vllm_that_keeps_nothing_serves_and_is_named_once(server, prefill, caplog):
    client = prefill.client
    for name in ("r1", "r2"):
        server.scripts = [whole()]
        await client.submit(client.message(name, "hello", may_hand_over=True, **SAMPLING))
        found = await client.until(name)
        assert len(found.token_ids) == 12 and "offer" not in found.bodies
    assert caplog.text.count("--kv-transfer-config") == 1
    assert counted(prefill) == {"not_kept": 2}


async def test_a_vllm_that_fails_to_keep_is_not_asked_to_again(server, prefill):
    server.scripts = [fails_to_read]
    client = prefill.client
    await client.submit(client.message("r1", "hello", may_hand_over=True, **SAMPLING))
    found = await client.until("r1")
    assert ["kv_transfer_params" in call.body for call in server.calls] == [True, False]
    assert len(found.token_ids) == 12 and found.finished.reason == "length"


async def test_more_blocks_than_a_submit_has_room_for_are_not_offered(server, prefill, monkeypatch):
    monkeypatch.setattr(kv_transfer, "MAX_KV_PARAMS", 16)
    server.scripts = [whole(kv_transfer_params=KEPT)]
    client = prefill.client
    await client.submit(client.message("r1", "hello", may_hand_over=True, **SAMPLING))
    found = await client.until("r1")
    assert "offer" not in found.bodies and len(found.token_ids) == 12
    assert counted(prefill) == {"not_kept": 1}


async def test_a_full_cache_keeps_nothing_more(server, prefill):
    prefill.health.kv_usage = 0.9
    client = prefill.client
    await client.submit(client.message("r1", "hello", may_hand_over=True, **SAMPLING))
    found = await client.until("r1")
    assert len(server.calls) == 1 and len(found.token_ids) == 12
    assert counted(prefill) == {"full": 1}


async def first_tokens(server, served, count: int) -> pd_pb2.Resume:
    """What an earlier attempt of "hello" had put out."""
    server.scripts = [hangs(count)]
    client = served.client
    await client.submit(client.message("before", "hello", **SAMPLING))
    found = await client.until("before", tokens=count)
    await client.stub.Cancel(pd_pb2.CancelRequest(proxy_id="proxy", request_ids=["before"]))
    await asyncio.wait_for(server.calls[0].gone.wait(), 45)
    del server.calls[:]
    return pd_pb2.Resume(
        prompt_token_ids=found.admitted.prompt_token_ids,
        output_token_ids=found.token_ids[:count],
        planned=True,
    )


async def test_a_decode_worker_has_the_kv_read_before_it_goes_on(server, decode):
    resume = await first_tokens(server, decode, 3)
    resume.kv.CopyFrom(kv())
    server.scripts = [whole()]
    client = decode.client
    await client.submit(client.message("r1", "", attempt=2, resume=resume, **SAMPLING))
    found = await client.until("r1")
    read, goes_on = (call.body for call in server.calls)
    prompt, received = list(resume.prompt_token_ids), list(resume.output_token_ids)
    assert (read["stream"], read["token_ids"]) == (False, prompt)
    assert read["kv_transfer_params"] == {"remote_host": "10.0.0.7"}
    assert goes_on["token_ids"] == prompt + received and "kv_transfer_params" not in goes_on
    assert found.token_ids == greedy({"token_ids": prompt}, 12)
    assert counted(decode) == {"read": 1}


PUSHED = {"remote_request_id": "generate-tokens-ab-cd01-2e3f4a5b", "transfer_mode": "push"}


@pytest.mark.parametrize(
    ("params", "call_id"),
    [
        pytest.param(PUSHED, "ab-cd01", id="pushed"),
        pytest.param(PUSHED | {"transfer_mode": "pull"}, None, id="pulled"),
        pytest.param(PUSHED | {"remote_request_id": "cmpl-7"}, None, id="of another endpoint"),
        pytest.param({"transfer_mode": "push"}, None, id="of no call"),
    ],
)
async def test_a_vllm_that_pushes_finds_the_reading_call_by_the_id_of_its_own(
    server, decode, params, call_id
):
    resume = await first_tokens(server, decode, 3)
    resume.kv.CopyFrom(kv(params=json.dumps(params).encode()))
    server.scripts = [whole()]
    await decode.client.submit(decode.client.message("r1", "", attempt=2, resume=resume, **SAMPLING))
    assert len((await decode.client.until("r1")).token_ids) == 12
    read, goes_on = (call.body for call in server.calls)
    assert (read.get("request_id"), goes_on.get("request_id")) == (call_id, None)
    assert read["kv_transfer_params"] == params


async def test_a_read_names_pictures_as_vllm_does_for_the_class() -> None:
    calls, results = [], []

    class Client:
        async def whole(self, call, seconds):
            calls.append(call)

    request = make_request("r1", 3)
    request.kv = KeptKV(b"{}", time.monotonic() + 60)
    moved = kv_transfer.KVTransfer(Client(), None, results.append, lambda: 0.0, image_kind="vision_chunk")
    await moved.read(request, None)
    assert ([call.image_kind for call in calls], results) == (["vision_chunk"], ["read"])


@pytest.mark.parametrize(("told", "reported"), [(1, 1), (None, 3)], ids=["told", "by an earlier worker"])
async def test_what_was_read_counts_as_cached_only_where_nobody_says_what_was(server, decode, told, reported):
    async def goes_on(call):
        response = await call.stream()
        usage = {"prompt_tokens_details": {"cached_tokens": 3}}
        await response.write(event(greedy(call.body, call.max_tokens), finish_reason="length"))
        await response.write(data({"choices": [], "usage": usage}))
        return response

    resume = await first_tokens(server, decode, 3)
    resume.kv.CopyFrom(kv())
    if told is not None:
        resume.cached_tokens = told
    server.scripts = [whole(), goes_on]
    await decode.client.submit(decode.client.message("r1", "", attempt=2, resume=resume, **SAMPLING))
    assert (await decode.client.until("r1")).finished.cached_tokens == reported


@pytest.mark.parametrize(
    ("given", "scripts", "result"),
    [
        pytest.param(kv(), [fails_to_read], "failed", id="a read that fails"),
        pytest.param(kv(params=b"["), [], "failed", id="words that make no sense"),
        pytest.param(kv(params=b" " * (300 << 10)), [], None, id="more words than an offer has"),
        pytest.param(kv(seconds=0.0), [], "late", id="blocks that are not kept any more"),
        pytest.param(kv(seconds=float("nan")), [], "late", id="a time that is no number"),
    ],
)
async def test_what_cannot_be_read_is_computed(server, decode, given, scripts, result):
    resume = await first_tokens(server, decode, 3)
    resume.kv.CopyFrom(given)
    server.scripts = list(scripts)
    client = decode.client
    await client.submit(client.message("r1", "", attempt=2, resume=resume, **SAMPLING))
    found = await client.until("r1")
    assert found.token_ids == greedy({"token_ids": list(resume.prompt_token_ids)}, 12)
    assert counted(decode) == ({result: 1} if result else {})
    assert len(server.calls) == len(scripts) + 1


async def test_a_read_that_hangs_is_given_up_and_the_prompt_computed(server, decode, monkeypatch):
    monkeypatch.setattr(kv_transfer, "READ_SECONDS", 0.3)
    resume = await first_tokens(server, decode, 3)
    resume.kv.CopyFrom(kv())
    server.scripts = [hangs(0)]
    client = decode.client
    await client.submit(client.message("r1", "", attempt=2, resume=resume, **SAMPLING))
    found = await client.until("r1")
    await asyncio.wait_for(server.calls[0].gone.wait(), 45)
    assert found.token_ids == greedy({"token_ids": list(resume.prompt_token_ids)}, 12)
    assert counted(decode) == {"failed": 1}


async def test_kv_is_read_once_though_the_call_behind_it_is_made_again(server, decode):
    resume = await first_tokens(server, decode, 3)
    resume.kv.CopyFrom(kv())
    server.scripts = [whole(), fails_to_read]
    client = decode.client
    await client.submit(client.message("r1", "", attempt=2, resume=resume, **SAMPLING))
    found = await client.until("r1")
    assert ["kv_transfer_params" in call.body for call in server.calls] == [True, False, False]
    assert len(found.token_ids) == 12
