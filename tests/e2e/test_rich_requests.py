"""What the openai package asks for beside text, of real workers: choices, seeds, forms, tools."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from PIL import Image

from support.hostile.malformed import tool
from support.matrix import matrix

pytestmark = pytest.mark.timeout(300)

QWEN = ("qwen3_vl", "qwen2_5_vl")


@pytest.fixture(scope="module")
def client(families: Any) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{families.cluster.url}/v1", api_key="-", max_retries=0, timeout=120.0) as client:
        yield client


def question(text: str = "What is it?", colour: str = "teal") -> list[dict[str, Any]]:
    buffer = io.BytesIO()
    Image.new("RGB", (56, 56), colour).save(buffer, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look:"},
                {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
                {"type": "text", "text": text},
            ],
        }
    ]


def ask(client: OpenAI, model: str, **extra: Any) -> Any:
    options = {"messages": question(), "max_tokens": 12, **extra}
    return client.chat.completions.create(model=model, **options)


@pytest.mark.parametrize("model", matrix(QWEN))
def test_a_tools_answer_may_hold_a_picture(client: OpenAI, model: str) -> None:
    picture = question()[0]["content"][1]
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [picture, {"type": "text", "text": "Another one?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Here:"}, picture]},
    ]
    reply = ask(client, model, messages=messages, tools=[tool("look")])
    one = ask(client, model, messages=messages[:2], tools=[tool("look")])
    assert reply.usage.prompt_tokens > one.usage.prompt_tokens


@pytest.mark.parametrize("model", matrix(QWEN))
def test_a_call_in_the_familys_own_form_is_found(client: OpenAI, model: str) -> None:
    pattern = (
        r'I (look|see)\.\n<tool_call>\n\{"name": "look", "arguments": \{"at": "(sky|sea)"\}\}\n</tool_call>'
    )
    reply = ask(
        client, model, tools=[tool("look", at=str)], max_tokens=300, extra_body={"guided_regex": pattern}
    )
    (choice,) = reply.choices
    assert choice.message.content in ("I look.", "I see.")
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments)["at"] in ("sky", "sea")
    history = [*question(), choice.message.model_dump(exclude_none=True)]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "It is blue."})
    assert ask(client, model, messages=history, tools=[tool("look", at=str)]).choices[0].finish_reason
