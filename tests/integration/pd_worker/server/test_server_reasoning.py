"""A worker whose model reasons: it names the markers, and holds the reasoning to its budget."""

from __future__ import annotations

import json

import pytest

from support.data.reasoning import reasoning_checkpoint
from triptych.base.config import PDConfig
from triptych.pd_worker.frontend.tokenization import MarkerDecoder
from triptych.pd_worker.native import LoadedModel, load_model
from triptych.protos import common_pb2, pd_pb2

SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "teal"]}}, "required": ["colour"]}
FORM = common_pb2.OutputFormat(json_schema=json.dumps({**SCHEMA, "additionalProperties": False}))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "special"])
def model(request, tmp_path_factory) -> LoadedModel:
    folder = reasoning_checkpoint(tmp_path_factory.mktemp("reasons"), special=request.param)
    return load_model(PDConfig(model=str(folder), kv_memory=32 << 20, max_model_len=512, threads=1))


async def ask(client, name: str, *, variables: str = "{}", resume=None, **sampling):
    message = client.message(name, "What is it?", **{"max_tokens": 60, **sampling})
    message.template.variables = variables.encode()
    if resume is not None:
        message.resume.CopyFrom(resume)
        message.attempt = 2
    reply = await client.submit(message)
    assert reply.status == pd_pb2.SubmitReply.STATUS_QUEUED, reply.error
    return await client.until(name)


async def test_the_answer_has_its_form_after_so_many_tokens_of_reasoning(client, model):
    answer = await ask(client, "r", output_format=FORM, thinking_token_budget=6)
    markers = answer.admitted.reasoning
    assert (markers.start, markers.end, markers.begun) == ("<think>", "</think>", True)
    reasoning, answered = answer.text.split("</think>")
    assert reasoning
    assert json.loads(answered)["colour"] in ("red", "teal")
    assert answer.finished.reason == "stop"
    end = answer.token_ids.index(model.prompts.reasoning.end)
    assert end == 6
    for received in (3, end, end + 1, end + 3):
        # Another attempt goes on in mid-thought, at its end, and in the answer.
        tokens = answer.token_ids[:received]
        sent = MarkerDecoder(model.tokenizer, model.prompts.kept).decode(tokens)
        resume = pd_pb2.Resume(
            prompt_token_ids=answer.admitted.prompt_token_ids,
            output_token_ids=tokens,
            text_sent_chars=len(sent),
        )
        again = await ask(client, f"r{received}", resume=resume, output_format=FORM, thinking_token_budget=6)
        assert sent + again.text == answer.text
        assert again.admitted.reasoning == markers


@pytest.mark.parametrize(
    ("variables", "told"), [('{"enable_thinking": false}', False), ('{"hybrid": true}', True)]
)
async def test_the_template_decides_whether_the_output_may_reason(client, variables, told):
    answer = await ask(client, "t", variables=variables, output_format=FORM, thinking_token_budget=6)
    assert answer.admitted.HasField("reasoning") is told
    assert not answer.admitted.reasoning.begun
    assert json.loads(answer.text.rpartition("</think>")[2])


async def test_a_prompt_without_a_template_has_no_reasoning(client):
    message = client.message("p", "", max_tokens=3)
    message.messages = b""
    message.prompt.text = "<think>\n"
    await client.submit(message)
    assert not (await client.until("p")).admitted.HasField("reasoning")


async def test_a_budget_is_refused_where_nothing_reasons(client):
    message = client.message("p", "", max_tokens=3, thinking_token_budget=2)
    message.messages = b""
    message.prompt.text = "a"
    reply = await client.submit(message)
    assert reply.status == pd_pb2.SubmitReply.STATUS_REFUSED
    assert reply.error.param == "thinking_token_budget"
