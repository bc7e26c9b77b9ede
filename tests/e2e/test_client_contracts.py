"""Clients and what they may ask for."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

import triptych
from support.hostile.malformed import tool
from support.matrix import matrix
from triptych.base.errors import InvalidRequest, NotFound

pytestmark = pytest.mark.timeout(300)
MODEL = "qwen3_vl"
LITELLM_CALLS = Path(__file__).parents[1] / "support" / "litellm_calls.py"
HELLO = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "max_tokens": 8}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "lights",
        "description": "switches the lights",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}


def _png(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (48, 32), colour).save(buffer, format="PNG")
    return buffer.getvalue()


def _url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def _look(colour: str = "red") -> list[dict[str, Any]]:
    part = {"type": "image_url", "image_url": {"url": _url(_png(colour)), "detail": "low"}}
    return [{"role": "user", "content": [part, {"type": "text", "text": "what is it?"}]}]


@pytest.fixture
def url(families: Any) -> str:
    return str(families.cluster.url)


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def _chat(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(messages=messages, **{"model": MODEL, **GREEDY, **options})


def test_openai_streams_what_it_gets_whole(client: openai.OpenAI) -> None:
    whole = _chat(client, _look())
    assert whole.usage.completion_tokens == 8
    chunks = list(_chat(client, _look(), stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].usage.completion_tokens == 8
    assert _chat(client, _look("blue")).choices[0].message.content != text


def test_openai_gets_json_that_fits_its_schema(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    reply = _chat(client, HELLO, response_format=form, max_tokens=40)
    assert set(json.loads(reply.choices[0].message.content)) == {"ok"}


def test_openai_gets_the_call_that_it_demands(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "lights"}}
    reply = _chat(client, HELLO, tools=[TOOL], tool_choice=choice, max_tokens=150)
    (call,) = reply.choices[0].message.tool_calls
    assert (call.function.name, list(json.loads(call.function.arguments))) == ("lights", ["on"])
    answer = [
        *HELLO,
        reply.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    assert _chat(client, answer, tools=[TOOL]).choices[0].message.content


def test_openai_gets_responses_equal_to_its_chats(client: openai.OpenAI) -> None:
    content = [
        {"type": "input_image", "image_url": _url(_png("red")), "detail": "low"},
        {"type": "input_text", "text": "what is it?"},
    ]
    options: dict[str, Any] = {
        "model": MODEL,
        "input": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_output_tokens": 16,
    }
    expected = _chat(client, _look(), max_tokens=16).choices[0].message.content
    assert client.responses.create(**options).output_text == expected
    with client.responses.stream(**options) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == expected


def test_openai_gets_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as refused:
        _chat(client, HELLO, temperature=9)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as broken:
        _chat(
            client,
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": _url(b"\x89PNG")}}]}],
        )
    assert broken.value.param == "messages[0].content[0].image_url.url"


def test_triptychs_own_client_asks_with_files(url: str, client: openai.OpenAI, tmp_path: Any) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(_png("red"))
    expected = _chat(client, _look()).choices[0].message.content
    with triptych.Client(url) as asked:
        for file in (picture, str(picture), picture.read_bytes(), _url(picture.read_bytes())):
            assert asked.ask("what is it?", [file], model=MODEL, **GREEDY) == expected
        streamed = asked.stream("what is it?", files=[picture], model=MODEL, **GREEDY)
        assert "".join(chunk.text for chunk in streamed) == expected
        assert MODEL in asked.models()
        with pytest.raises(NotFound):
            asked.ask("x", model="gpt-9")
        with pytest.raises(InvalidRequest, match="model must name one of"):
            asked.ask("x")


@pytest.mark.slow
def test_litellm_chats_streams_and_calls(url: str, client: openai.OpenAI) -> None:
    calls = {"options": GREEDY, "look": _look(), "hello": HELLO, "tool": TOOL, "schema": SCHEMA}
    command = [sys.executable, str(LITELLM_CALLS), url, MODEL]
    run = subprocess.run(
        command,
        input=json.dumps(calls),
        env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        text=True,
        capture_output=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    got = json.loads(run.stdout.splitlines()[-1])
    expected = _chat(client, _look()).choices[0].message.content
    assert got["whole"] == "".join(got["streamed"]) == expected
    assert got["called"] == ["lights"]
    assert set(json.loads(got["object"])) == {"ok"}
    assert "temperature" in got["refusal"]


@pytest.mark.slow
def test_langchain_chats_streams_and_calls(url: str, client: openai.OpenAI) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=8)
    expected = _chat(client, _look()).choices[0].message.content
    asked = [HumanMessage(content=_look()[0]["content"])]
    assert model.invoke(asked).content == expected
    assert "".join(chunk.content for chunk in model.stream(asked)) == expected
    system = [SystemMessage("be short"), HumanMessage("hello")]
    assert model.invoke(system).usage_metadata["output_tokens"] == 8
    longer = model.model_copy(update={"max_tokens": 150})
    called = longer.bind_tools([TOOL], tool_choice="lights").invoke("hello")
    assert [call["name"] for call in called.tool_calls] == ["lights"]
    structured = longer.with_structured_output({"title": "answer", **SCHEMA}, method="json_schema")
    assert set(structured.invoke("hello")) == {"ok"}
    with pytest.raises(openai.BadRequestError, match="temperature"):
        model.model_copy(update={"temperature": 9}).invoke("hello")


@pytest.mark.slow
def test_langchain_speaks_responses(url: str, client: openai.OpenAI) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=16,
        use_responses_api=True,
    )
    expected = _chat(client, _look(), max_tokens=16).choices[0].message.content
    asked = [HumanMessage(content=_look()[0]["content"])]
    assert model.invoke(asked).text == expected
    assert "".join(chunk.text for chunk in model.stream(asked)) == expected


QWEN = matrix(["qwen3_vl", "qwen2_5_vl"])


@pytest.mark.parametrize("model", QWEN)
def test_a_tools_answer_may_hold_a_picture(client: openai.OpenAI, model: str) -> None:
    picture = _look()[0]["content"][0]
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [picture, {"type": "text", "text": "Another one?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Here:"}, picture]},
    ]
    reply = _chat(client, messages, model=model, tools=[tool("look")])
    one = _chat(client, messages[:2], model=model, tools=[tool("look")])
    assert reply.usage.prompt_tokens > one.usage.prompt_tokens


@pytest.mark.parametrize("model", QWEN)
def test_a_call_in_the_familys_own_form_is_found(client: openai.OpenAI, model: str) -> None:
    pattern = (
        r'I (look|see)\.\n<tool_call>\n\{"name": "look", "arguments": \{"at": "(sky|sea)"\}\}\n</tool_call>'
    )
    tools, form = [tool("look", at=str)], {"guided_regex": pattern}
    reply = _chat(client, _look(), model=model, tools=tools, max_tokens=300, extra_body=form)
    (choice,) = reply.choices
    assert choice.message.content in ("I look.", "I see.")
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments)["at"] in ("sky", "sea")
    history = [*_look(), choice.message.model_dump(exclude_none=True)]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "It is blue."})
    assert _chat(client, history, model=model, tools=tools).choices[0].finish_reason
