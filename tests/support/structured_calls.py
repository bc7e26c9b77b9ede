"""A program that asks a server for structured output with one library, as its own guide shows it.

`python structured_calls.py LIBRARY URL PICTURE`: prints an object per way of asking. Each library stands in
an environment of its own, so this file imports nothing of the project.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

QUESTION = "How many shapes are in the image?"
_LIMITS: dict[str, Any] = {"temperature": 0, "max_tokens": 200}


class Seen(BaseModel):
    """What is seen in the picture."""

    count: int
    color: str


def _messages(picture: Path) -> list[dict[str, Any]]:
    url = "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}]


def langchain(url: str, picture: Path) -> dict[str, Any]:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="demo", max_retries=0, **_LIMITS)
    said: dict[str, Any] = {}
    for method in ("json_schema", "function_calling"):
        structured: Any = model.with_structured_output(Seen, method=method)
        said[method] = structured.invoke(_messages(picture)).model_dump()
    return said


def pydantic_ai(url: str, picture: Path) -> dict[str, Any]:
    from pydantic_ai import Agent, BinaryContent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    asked = [BinaryContent(picture.read_bytes(), media_type="image/png"), QUESTION]
    said: dict[str, Any] = {}
    for form in (ToolOutput, NativeOutput):
        agent = Agent(model, output_type=form(Seen), model_settings=_LIMITS, retries=0)
        said[form.__name__] = agent.run_sync(asked).output.model_dump()
    return said


def instructor(url: str, picture: Path) -> dict[str, Any]:
    import instructor
    import openai

    said: dict[str, Any] = {}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            asking: Any = instructor.from_openai(client, mode=mode).chat.completions
            seen = asking.create(
                model="demo", messages=_messages(picture), response_model=Seen, max_retries=0, **_LIMITS
            )
            said[mode.name] = seen.model_dump()
    return said


def openai_agents(url: str, picture: Path) -> dict[str, Any]:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    image = {"type": "input_image", "image_url": _messages(picture)[0]["content"][0]["image_url"]["url"]}
    content = [image, {"type": "input_text", "text": QUESTION}]
    said: dict[str, Any] = {}

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            for model in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
                seeing = agents.Agent(
                    "seeing",
                    model=model("demo", client),
                    output_type=Seen,
                    model_settings=agents.ModelSettings(**_LIMITS),
                )
                result = await agents.Runner.run(seeing, [{"role": "user", "content": content}])
                said[model.__name__] = result.final_output.model_dump()

    asyncio.run(ask())
    return said


def anthropic(url: str, picture: Path) -> dict[str, Any]:
    import anthropic

    data = base64.b64encode(picture.read_bytes()).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    tool: Any = {
        "name": "count_shapes",
        "description": "counts shapes",
        "input_schema": Seen.model_json_schema(),
    }
    said: dict[str, Any] = {}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        for choice in ({"type": "any"}, {"type": "tool", "name": "count_shapes"}):
            message = client.messages.create(
                model="demo", max_tokens=200, tools=[tool], tool_choice=choice,
                messages=[{"role": "user", "content": content}], extra_body={"temperature": 0},
            )  # fmt: skip
            called = next(block for block in message.content if block.type == "tool_use")
            said[choice["type"]] = Seen.model_validate(called.input).model_dump()
    return said


_LIBRARIES: dict[str, Callable[[str, Path], dict[str, Any]]] = {
    "langchain-openai": langchain,
    "pydantic-ai": pydantic_ai,
    "instructor": instructor,
    "openai-agents": openai_agents,
    "anthropic": anthropic,
}

if __name__ == "__main__":
    print(json.dumps(_LIBRARIES[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))))
