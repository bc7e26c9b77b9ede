"""Answers of a PD worker: tokens, sampling, forms."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from support.data.oracle import assert_exact, generate, oracle
from support.engine.slow_steps import slow_steps
from support.fakes.pd_client import Answer
from support.waiting import until
from triptych.pd_worker.core.sampling import bad_word_ids
from triptych.pd_worker.native import NativeWorker
from triptych.protos import common_pb2, pd_pb2

TEXTS = ("Hello there", "Count to ten, please.", "größer naïve 你好")


async def test_text_requests_get_the_tokens_that_transformers_generates(client, model):
    expected = [oracle(model.path, [{"role": "user", "content": text}], max_new_tokens=40) for text in TEXTS]
    await asyncio.gather(
        *(
            client.submit(client.message(f"r{n}", text, max_tokens=40, ignore_eos=True, temperature=0.0))
            for n, text in enumerate(TEXTS)
        )
    )
    answers = [await client.until(f"r{n}") for n in range(len(TEXTS))]
    assert [list(a.admitted.prompt_token_ids) for a in answers] == [e.prompt_token_ids for e in expected]
    assert_exact(expected, [answer.token_ids for answer in answers])
    assert [answer.finished.reason for answer in answers] == ["length"] * len(TEXTS)
    assert [answer.finished.completion_tokens for answer in answers] == [40] * len(TEXTS)
    assert all(answer.finished.work_seconds > 0 for answer in answers), "no prompt took any time"


async def test_a_resumed_request_goes_on_as_the_unbroken_one(client):
    sampling = {"max_tokens": 30, "ignore_eos": True, "temperature": 1.0, "seed": 11}
    await client.submit(client.message("whole", "Tell me", **sampling))
    whole = await client.until("whole")
    for split in (0, 1, 17, 30):
        resume = pd_pb2.Resume(
            prompt_token_ids=whole.admitted.prompt_token_ids, output_token_ids=whole.token_ids[:split]
        )
        name = f"resumed-{split}"
        message = client.message(name, "", attempt=2, resume=resume, **sampling)
        assert (await client.submit(message)).status == pd_pb2.SubmitReply.STATUS_QUEUED
        resumed = await client.until(name)
        assert resumed.token_ids == whole.token_ids
        assert resumed.text == whole.text
        assert resumed.finished.completion_tokens == 30


@pytest.mark.parametrize("read", [True, False], ids=["what was sent is read", "what was sent is lost"])
async def test_a_proxy_that_comes_back_misses_nothing(worker, client, model, read):
    hurry = slow_steps(worker.engine)
    await client.submit(client.message("r1", "Tell me more", max_tokens=200, ignore_eos=True))
    answer = await client.until("r1", tokens=10)
    await client.detach()
    if not read:
        answer = client.answers["r1"] = Answer()
    position = len(answer.token_ids)
    await client.attach(pd_pb2.Reattach(request_id="r1", attempt=1, position=position))
    hurry()
    await client.until("r1")
    assert len(answer.token_ids) == 200
    assert answer.text == model.tokenizer.decode(answer.token_ids)
    assert answer.finished.reason == "length"


async def test_a_proxy_that_names_a_request_no_more_has_it_cancelled(worker, client):
    slow_steps(worker.engine)
    await client.submit(client.message("r1", "Tell me more", max_tokens=400, ignore_eos=True))
    await client.until("r1", tokens=3)
    await client.detach()
    client.answers["unknown"] = Answer()
    await client.attach(pd_pb2.Reattach(request_id="unknown", attempt=1, position=0))
    assert (await client.until("unknown")).lost
    await no_requests(worker)
    assert worker._upkeep._load().generated_tokens < 400, "it went on to its end"


async def test_a_draining_worker_finishes_what_it_holds_and_refuses_the_rest(worker, client):
    hurry = slow_steps(worker.engine)
    await client.submit(client.message("r1", "Tell me more", max_tokens=60, ignore_eos=True))
    await client.until("r1", tokens=3)
    draining = asyncio.create_task(worker.drain(40.0))
    await asyncio.sleep(0)
    reply = await client.submit(client.message("r2", "more", attempt=2))
    assert (reply.status, reply.error.code) == (pd_pb2.SubmitReply.STATUS_REFUSED, "unavailable")
    hurry()
    await draining
    assert len((await client.until("r1")).token_ids) == 60


async def test_what_a_drain_cannot_finish_is_lost_and_goes_on_elsewhere(worker, client):
    slow_steps(worker.engine)
    await client.submit(client.message("r1", "Tell me more", max_tokens=450, ignore_eos=True))
    await client.until("r1", tokens=3)
    await worker.drain(0.0)
    worker.streams.shut_down()
    assert (await client.until("r1")).lost


LONG_RESUME = pd_pb2.Resume(prompt_token_ids=[1] * 500, output_token_ids=[40] * 20, text_sent_chars=0)


TOO_LONG = (
    {"text": "far too long " * 400},
    {"text": "x " * 600},
    {"max_tokens": 510},
    {"resume": LONG_RESUME, "attempt": 2, "ignore_eos": True},
    {"resume": LONG_RESUME, "attempt": 2, "max_tokens": 20, "ignore_eos": True},
)


async def test_what_a_worker_with_more_tokens_would_take_has_a_code_of_its_own(client):
    for number, change in enumerate(TOO_LONG):
        reply = await client.submit(client.message(f"r{number}", **{"text": "hello", **change}))
        assert reply.error.code == "context_length_exceeded", reply
        assert "512" in reply.error.message or "max_tokens" in reply.error.message


async def no_requests(worker: NativeWorker) -> None:
    """In the end the engine holds nothing."""
    scheduler = worker.engine.scheduler
    await until(lambda: not scheduler.num_running and not scheduler.num_waiting, "an engine at rest")
    assert worker.streams.unfinished == 0


TEXT = "Tell me of the sea, please."
GREEDY = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.0}


async def ask(client, name: str, text: str = TEXT, **fields):
    reply = await client.submit(client.message(name, text, **fields))
    assert reply.status == pd_pb2.SubmitReply.STATUS_QUEUED, reply.error
    return await client.until(name)


async def test_repetition_penalty_gives_what_generate_gives(client, model):
    messages = [{"role": "user", "content": TEXT}]
    plain, _ = generate(model.path, messages, max_new_tokens=40)
    expected, _ = generate(model.path, messages, max_new_tokens=40, repetition_penalty=1.8)
    assert expected != plain
    answer = await ask(client, "penalised", repetition_penalty=1.8, **GREEDY)
    assert answer.token_ids == expected


async def test_logprobs_are_the_log_softmax_of_the_models_own_logits(client, model):
    messages = [{"role": "user", "content": TEXT}]
    expected, logits = generate(model.path, messages, max_new_tokens=40, repetition_penalty=1.8)
    reference = logits.log_softmax(-1)
    answer = await ask(client, "probed", repetition_penalty=1.8, logprobs=20, **GREEDY)
    none = await ask(client, "chosen-only", logprobs=0, **GREEDY)
    plain = await ask(client, "without", **GREEDY)
    assert answer.token_ids == expected
    assert [position.chosen.token_id for position in answer.logprobs] == expected
    for row, position in zip(reference, answer.logprobs, strict=True):
        assert position.chosen.logprob == pytest.approx(float(row[position.chosen.token_id]), abs=1e-4)
        values = [token.logprob for token in position.top]
        assert values == pytest.approx(row.topk(20).values.tolist(), abs=1e-4)
        assert values == [pytest.approx(float(row[token.token_id]), abs=1e-4) for token in position.top]
    assert [len(position.top) for position in none.logprobs] == [0] * 40
    assert not plain.logprobs


async def test_a_bad_word_stays_away_also_where_a_resume_parts_its_tokens(client, model):
    messages = [{"role": "user", "content": TEXT}]
    plain, _ = generate(model.path, messages, max_new_tokens=40)
    word = next(
        text
        for at in range(5, 30)
        if (text := model.tokenizer.decode(plain[at : at + 2])).isprintable()
        and model.tokenizer.encode(text, add_special_tokens=False).ids == plain[at : at + 2]
        and text == text.lstrip()
    )
    banned = bad_word_ids([word], lambda text: model.tokenizer.encode(text, add_special_tokens=False).ids)
    expected, _ = generate(model.path, messages, max_new_tokens=40, bad_words_ids=list(map(list, banned)))
    whole = await ask(client, "whole", bad_words=[word], **GREEDY)
    for split in range(1, 40, 3):
        resume = pd_pb2.Resume(
            prompt_token_ids=whole.admitted.prompt_token_ids, output_token_ids=whole.token_ids[:split]
        )
        given = {"attempt": 2, "resume": resume, "bad_words": [word], **GREEDY}
        resumed = await ask(client, f"resumed-{split}", "", **given)
        assert resumed.token_ids == whole.token_ids
    assert whole.token_ids != plain
    assert word not in model.tokenizer.decode(whole.token_ids)
    assert whole.token_ids == expected


async def test_stop_strings_hold_back_text_and_not_logprobs(client):
    free = await ask(client, "free", max_tokens=30, ignore_eos=True, temperature=1.0, seed=4)
    stop = free.text[8:11]
    answer = await ask(
        client, "cut", max_tokens=30, ignore_eos=True, temperature=1.0, seed=4, stop=[stop], logprobs=0
    )
    assert answer.finished.reason == "stop"
    assert free.text.startswith(answer.text)
    assert stop not in answer.text
    assert [position.chosen.token_id for position in answer.logprobs] == answer.token_ids


async def test_a_top_k_above_all_tokens_does_no_harm(client):
    assert (await ask(client, "all", max_tokens=2, top_k=2**32 - 1)).finished.completion_tokens


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "town": {"enum": ["Zürich", "東京", "🙂"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "more": {
            "type": "object",
            "properties": {"open": {"type": "boolean"}},
            "required": ["open"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "town", "sizes", "more"],
    "additionalProperties": False,
}
FORM = common_pb2.OutputFormat(json_schema=json.dumps(SCHEMA))
#: Long numbers apart, nothing of the form takes more; a random model writes long blanks and numbers.
SAMPLED = {"max_tokens": 400, "temperature": 1.0}


async def ask_form(client, name: str, form: common_pb2.OutputFormat = FORM, **sampling):
    message = client.message(name, "Make one up.", output_format=form, **{**SAMPLED, **sampling})
    reply = await client.submit(message)
    assert reply.status == pd_pb2.SubmitReply.STATUS_QUEUED, reply.error
    return await client.until(name)


def check(text: str) -> None:
    value = json.loads(text)
    assert list(value) == list(SCHEMA["properties"])
    assert len(value["name"]) <= 10
    assert value["town"] in SCHEMA["properties"]["town"]["enum"]
    assert all(isinstance(size, int) for size in value["sizes"])
    assert 1 <= len(value["sizes"]) <= 3
    assert isinstance(value["more"]["open"], bool)


async def test_every_output_of_a_batch_fits_its_own_form(client):
    free = client.message("free", "hi", max_tokens=60, ignore_eos=True, temperature=1.0)
    await client.submit(free)
    digits = common_pb2.OutputFormat(regex=r"[0-9]{3}(-[a-z]{2})?")
    texts = ["yes", "no", 'say "maybe"', "größe 你好"]
    choices = common_pb2.OutputFormat(choices=common_pb2.TextChoices(texts=texts))
    documents, numbers, picks = await asyncio.gather(
        asyncio.gather(*(ask_form(client, f"s{seed}", seed=seed) for seed in range(16))),
        asyncio.gather(*(ask_form(client, f"r{seed}", digits, seed=seed) for seed in range(8))),
        asyncio.gather(*(ask_form(client, f"c{seed}", choices, seed=seed) for seed in range(12))),
    )
    await client.until("free")
    ended = [answer for answer in documents if answer.finished.reason == "stop"]
    assert len(ended) >= 11
    for answer in ended:
        check(answer.text)
    assert len({answer.text for answer in ended}) > 8
    for answer in numbers:
        assert re.fullmatch(r"[0-9]{3}(-[a-z]{2})?", answer.text)
    assert {answer.text for answer in picks} <= set(texts)
    assert len({answer.text for answer in picks}) > 1
    assert {answer.finished.reason for answer in (*numbers, *picks)} == {"stop"}


async def test_a_resumed_output_goes_on_in_its_form(client):
    whole = await ask_form(client, "whole", seed=3)
    size = len(whole.token_ids)
    assert whole.finished.reason == "stop"
    for split in (1, size // 2, size - 1, size):
        resume = pd_pb2.Resume(
            prompt_token_ids=whole.admitted.prompt_token_ids, output_token_ids=whole.token_ids[:split]
        )
        message = client.message(
            f"resumed-{split}", "", attempt=2, resume=resume, output_format=FORM, seed=3, **SAMPLED
        )
        assert (await client.submit(message)).status == pd_pb2.SubmitReply.STATUS_QUEUED
        resumed = await client.until(f"resumed-{split}")
        assert resumed.token_ids == whole.token_ids
        assert resumed.text == whole.text
        assert resumed.finished.reason == "stop"


#: Nothing says that there is no more: a random model would add names for ever.
OPEN_ENDED = {
    "type": "object",
    "properties": {
        "count": {"type": "integer"},
        "part": {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]},
    },
    "required": ["count", "part"],
}


async def test_an_answer_under_an_open_ended_schema_ends_with_its_brace(client):
    form = common_pb2.OutputFormat(json_schema=json.dumps(OPEN_ENDED))
    answers = await asyncio.gather(*(ask_form(client, f"o{seed}", form, seed=seed) for seed in range(8)))
    for answer in answers:
        assert answer.finished.reason == "stop"
        assert answer.text.endswith("}")
        value = json.loads(answer.text)
        assert (list(value), list(value["part"])) == (["count", "part"], ["kind"])
    cut = await ask_form(client, "cut", form, seed=0, max_tokens=3)
    assert cut.finished.reason == "length"


async def test_an_output_of_a_worker_that_leaves_schemas_open_goes_on_as_it_has_begun(client, model):
    whole = await ask_form(client, "whole", seed=3)
    begun = model.tokenizer.encode('{"count":1,"part":{"kind":"a"},"more":', add_special_tokens=False).ids
    form = common_pb2.OutputFormat(json_schema=json.dumps(OPEN_ENDED))
    resume = pd_pb2.Resume(prompt_token_ids=whole.admitted.prompt_token_ids, output_token_ids=begun)
    message = client.message("resumed", "", attempt=2, resume=resume, output_format=form, **SAMPLED)
    assert (await client.submit(message)).status == pd_pb2.SubmitReply.STATUS_QUEUED
    assert (await client.until("resumed", tokens=len(begun) + 5)).text.startswith(
        '{"count":1,"part":{"kind":"a"},"more":'
    )


async def test_a_form_that_becomes_too_much_ends_its_request_alone(client):
    heavy = common_pb2.OutputFormat(regex="a{1000000}")
    await client.submit(client.message("free", "hi", max_tokens=30, ignore_eos=True))
    message = client.message("heavy", "x", output_format=heavy, max_tokens=200)
    reply = await client.submit(message)
    if reply.status == pd_pb2.SubmitReply.STATUS_QUEUED:
        answer = await client.until("heavy")
        assert answer.finished.reason == "error"
        assert answer.finished.error.param == "response_format"
    else:
        assert reply.error.param == "response_format"
    assert len((await client.until("free")).token_ids) == 30
