"""Outputs that have to have a form, from a model that would write anything."""

from __future__ import annotations

import asyncio
import json
import re

from triptych.protos import common_pb2, pd_pb2

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


async def ask(client, name: str, form: common_pb2.OutputFormat = FORM, **sampling):
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
        asyncio.gather(*(ask(client, f"s{seed}", seed=seed) for seed in range(16))),
        asyncio.gather(*(ask(client, f"r{seed}", digits, seed=seed) for seed in range(8))),
        asyncio.gather(*(ask(client, f"c{seed}", choices, seed=seed) for seed in range(12))),
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
    whole = await ask(client, "whole", seed=3)
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
