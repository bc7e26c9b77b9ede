"""A PD worker whose model may call tools: a call of a `strict` function fits its schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from triptych.protos import pd_pb2

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 99}},
    "required": ["city", "days"],
}
BEGUN = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {'


def tools(strict: bool, parameters: Any = PARAMETERS) -> bytes:
    function = {"name": "weather", "parameters": parameters, "strict": strict}
    return json.dumps([{"type": "function", "function": function}]).encode()


async def go_on(client, model, name: str, given: bytes, begun: str = BEGUN, **sampling: Any):
    """What follows an output that has begun a call."""
    first = client.message(f"{name}-first", "Go", max_tokens=1)
    first.template.tools = given
    await client.submit(first)
    prompt = (await client.until(f"{name}-first")).admitted.prompt_token_ids
    ids = model.tokenizer.encode(begun, add_special_tokens=False).ids
    resume = pd_pb2.Resume(prompt_token_ids=prompt, output_token_ids=ids, text_sent_chars=len(begun))
    sampled = {"max_tokens": len(ids) + 60, "temperature": 1.5, **sampling}
    message = client.message(name, "Go", attempt=2, resume=resume, **sampled)
    message.template.tools = given
    reply = await client.submit(message)
    assert reply.status == pd_pb2.SubmitReply.STATUS_QUEUED, reply.error
    return await client.until(name)


@pytest.mark.parametrize("seed", range(4))
async def test_arguments_of_a_strict_function_fit_once_the_call_has_begun(client, model, seed: int) -> None:
    answer = await go_on(client, model, f"r{seed}", tools(True), seed=seed)
    arguments, closed, _ = answer.text.partition("}}\n</tool_call>")
    assert closed, answer.text
    value = json.loads("{" + arguments + "}")
    assert list(value) == ["city", "days"] and value["city"] in ("Rome", "Oslo") and value["days"] <= 99


async def test_nothing_is_held_without_strict_nor_where_loads_are_measured(client, model) -> None:
    for name, given, sampling in (
        ("free", tools(False), {}),
        ("load", tools(True), {"ignore_eos": True}),
    ):
        answer = await go_on(client, model, name, given, seed=1, **sampling)
        assert not answer.text.lstrip().startswith(('"city": "', '"city":"')), name


async def test_an_output_that_another_worker_left_free_goes_on_free(client, model) -> None:
    answer = await go_on(client, model, "old", tools(True), BEGUN.replace("{", '{"town": ', 2), seed=1)
    assert answer.finished.reason in ("length", "stop")


UNREADABLE = {"type": "object", "not": {}}
OPEN_GROUP = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}


@pytest.mark.parametrize(
    ("schema", "reason"), [(UNREADABLE, "not is not supported"), (OPEN_GROUP, "the regular expression")]
)
async def test_a_schema_that_cannot_be_held_is_refused_by_the_field_and_function(client, schema, reason):
    message = client.message("refused", "Go", max_tokens=3)
    function = {"name": "news", "parameters": schema, "strict": True}
    two = [*json.loads(tools(True)), {"type": "function", "function": function}]
    message.template.tools = json.dumps(two).encode()
    reply = await client.submit(message)
    assert reply.error.param == "tools"
    assert reply.error.message.startswith(f"tools: the parameters of news: {reason}")
    assert reply.error.message.endswith("; or leave strict out")
