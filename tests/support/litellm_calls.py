"""A program that asks a server with litellm, and prints what it got as one JSON object.

`python litellm_calls.py URL MODEL < calls.json`, where the input has `options`, `look` (messages with a
picture), `hello`, `tool` and `schema`. A process of its own: litellm leaves an event loop and sockets open.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm


def main(url: str, model: str) -> None:
    asked = json.load(sys.stdin)

    def complete(messages: Any, **options: Any) -> Any:
        options = asked["options"] | options
        return litellm.completion(
            model=f"openai/{model}", messages=messages, api_base=f"{url}/v1", api_key="none", **options
        )

    hello = asked["hello"]
    tools = {"tools": [asked["tool"]], "tool_choice": "required", "parallel_tool_calls": False}
    called = complete(hello, max_tokens=150, **tools).choices[0].message.tool_calls
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": asked["schema"]}}
    try:
        complete(hello, temperature=9)
        refusal = ""
    except litellm.exceptions.BadRequestError as error:
        refusal = str(error)
    got = {
        "whole": complete(asked["look"]).choices[0].message.content,
        "streamed": [c.choices[0].delta.content or "" for c in complete(asked["look"], stream=True)],
        "called": [call.function.name for call in called],
        "object": complete(hello, response_format=schema, max_tokens=40).choices[0].message.content,
        "refusal": refusal,
    }
    print(json.dumps(got))


if __name__ == "__main__":
    main(*sys.argv[1:])
