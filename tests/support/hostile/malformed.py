"""Requests that no front door may take: a name, the body, and the field that the error must name."""

from __future__ import annotations

import base64
from typing import Any

PNG = "data:image/png;base64," + base64.b64encode(b"picture").decode()
HELLO = [{"role": "user", "content": "hello"}]


def with_part(part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}


def with_url(url: Any) -> dict[str, Any]:
    return with_part({"type": "image_url", "image_url": {"url": url}})


def with_value(**values: Any) -> dict[str, Any]:
    return {"messages": HELLO, **values}


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    """A function whose arguments are strings."""
    properties = {key: {"type": "string"} for key in parameters}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def chosen(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


URL = "messages[0].content[1].image_url.url"
MALFORMED: list[tuple[str, Any, str]] = [
    ("not JSON", b"{", "body"),
    ("no object", b"[]", "body"),
    ("not UTF-8", b'{"messages": [], "model": "\xff"}', "body"),
    ("NaN", b'{"messages": [], "temperature": NaN}', "body"),
    ("no messages", {}, "messages"),
    ("messages of a wrong type", {"messages": "x"}, "messages"),
    ("empty messages", {"messages": []}, "messages"),
    ("a message of a wrong type", {"messages": ["x"]}, "messages[0]"),
    ("a message without a role", {"messages": [{"content": "x"}]}, "messages[0].role"),
    ("an unknown role", {"messages": [*HELLO, {"role": "robot", "content": "x"}]}, "messages[1].role"),
    ("no content", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("empty content", {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ("content of a wrong type", {"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ("a part of a wrong type", with_part("x"), "messages[0].content[1]"),
    ("an unknown part", with_part({"type": "smell"}), "messages[0].content[1].type"),
    ("a text part without text", with_part({"type": "text"}), "messages[0].content[1].text"),
    ("an image part without image_url", with_part({"type": "image_url"}), "messages[0].content[1].image_url"),
    ("image_url without url", with_part({"type": "image_url", "image_url": {}}), URL),
    ("a url of a wrong type", with_url(1), URL),
    ("an http url with a user", with_url("http://ok@127.0.0.1/a.png"), URL),
    ("an https url that parsers differ about", with_url("https://example.com\\@127.0.0.1/"), URL),
    ("an http url with a number for a host", with_url("http://2130706433/"), URL),
    ("a file url without a path", with_url("file:passwd"), URL),
    ("an ftp url", with_url("ftp://example.com/a.png"), URL),
    ("no url", with_url("a.png"), URL),
    ("an empty url", with_url(""), URL),
    ("a data url without base64", with_url("data:image/png,abc"), URL),
    ("a data url without a comma", with_url("data:image/png;base64"), URL),
    ("a data url of text", with_url("data:text/html;base64,aGk="), URL),
    ("a data url of svg", with_url("data:image/svg+xml;base64,aGk="), URL),
    (
        "a plain image that is no data url",
        with_part({"type": "image", "image": "x"}),
        "messages[0].content[1].image",
    ),
    (
        "too many images",
        {"messages": [{"role": "user", "content": [{"type": "image", "image": PNG}] * 3}]},
        "messages",
    ),
    ("model of a wrong type", with_value(model=1), "model"),
    ("stream of a wrong type", with_value(stream="yes"), "stream"),
    (
        "stream_options of a wrong type",
        with_value(stream_options={"include_usage": 3}),
        "stream_options.include_usage",
    ),
    ("temperature too high", with_value(temperature=2.1), "temperature"),
    ("temperature below 0", with_value(temperature=-0.1), "temperature"),
    ("temperature of a wrong type", with_value(temperature="hot"), "temperature"),
    ("top_p 0", with_value(top_p=0), "top_p"),
    ("top_p above 1", with_value(top_p=1.5), "top_p"),
    ("top_k below -1", with_value(top_k=-2), "top_k"),
    ("top_k no integer", with_value(top_k=1.5), "top_k"),
    ("max_tokens 0", with_value(max_tokens=0), "max_tokens"),
    ("max_tokens below 0", with_value(max_tokens=-5), "max_tokens"),
    ("max_tokens a bool", with_value(max_tokens=True), "max_tokens"),
    ("max_completion_tokens 0", with_value(max_completion_tokens=0), "max_completion_tokens"),
    ("min_tokens above max_tokens", with_value(min_tokens=5, max_tokens=4), "min_tokens"),
    ("min_tokens below 0", with_value(min_tokens=-1), "min_tokens"),
    ("seed above 64 bits", with_value(seed=1 << 63), "seed"),
    ("seed of a wrong type", with_value(seed="x"), "seed"),
    ("too many stop strings", with_value(stop=["x"] * 17), "stop"),
    ("a stop string that is too long", with_value(stop="x" * 1025), "stop"),
    ("a long stop string among others", with_value(stop=["a", "x" * 1025]), "stop[1]"),
    ("too many stop_token_ids", with_value(stop_token_ids=[1] * 129), "stop_token_ids"),
    ("an empty stop string", with_value(stop=["a", ""]), "stop[1]"),
    ("stop of a wrong type", with_value(stop=5), "stop"),
    ("stop_token_ids below 0", with_value(stop_token_ids=[-1]), "stop_token_ids"),
    ("n 0", with_value(n=0), "n"),
    ("too many choices", with_value(n=17), "n"),
    ("logprobs of a wrong type", with_value(logprobs=1), "logprobs"),
    ("top_logprobs without logprobs", with_value(top_logprobs=2), "top_logprobs"),
    ("too many top_logprobs", with_value(logprobs=True, top_logprobs=21), "top_logprobs"),
    ("min_p above 1", with_value(min_p=1.5), "min_p"),
    ("presence_penalty too high", with_value(presence_penalty=2.5), "presence_penalty"),
    ("frequency_penalty too low", with_value(frequency_penalty=-3), "frequency_penalty"),
    ("repetition_penalty 0", with_value(repetition_penalty=0), "repetition_penalty"),
    ("logit_bias of a wrong type", with_value(logit_bias=[1]), "logit_bias"),
    ("logit_bias of a word", with_value(logit_bias={"dog": 1}), "logit_bias"),
    ("logit_bias above 32 bits", with_value(logit_bias={"9999999999": 1}), "logit_bias"),
    ("logit_bias too high", with_value(logit_bias={"5": 101}), "logit_bias"),
    ("too many biases", with_value(logit_bias={str(token): 1 for token in range(1025)}), "logit_bias"),
    ("response_format of a wrong type", with_value(response_format="json"), "response_format"),
    ("an unknown response_format", with_value(response_format={"type": "xml"}), "response_format.type"),
    (
        "a json_schema without an object",
        with_value(response_format={"type": "json_schema"}),
        "response_format.json_schema",
    ),
    (
        "a schema that is none",
        with_value(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}),
        "response_format.json_schema.schema",
    ),
    ("guided_json that is no JSON", with_value(guided_json="{"), "guided_json"),
    ("an empty guided_regex", with_value(guided_regex=""), "guided_regex"),
    ("a guided_regex that is too long", with_value(guided_regex="x" * 70_000), "guided_regex"),
    ("an empty guided_choice", with_value(guided_choice=[]), "guided_choice"),
    ("two forms", with_value(guided_choice=["x"], response_format={"type": "json_object"}), "guided_choice"),
    ("a grammar", with_value(structured_outputs={"grammar": "x"}), "structured_outputs.grammar"),
    (
        "two forms in one",
        with_value(structured_outputs={"json": {}, "regex": "x", "choice": ["y"]}),
        "structured_outputs.regex",
    ),
    ("no choices", with_value(structured_outputs={"choice": []}), "structured_outputs.choice"),
    ("a text for choices", with_value(structured_outputs={"choice": "ab"}), "structured_outputs.choice"),
    ("an empty regex", with_value(structured_outputs={"regex": ""}), "structured_outputs.regex"),
    ("a schema of false", with_value(structured_outputs={"json": False}), "structured_outputs.json"),
    (
        "a response_format without its schema",
        with_value(response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
        "response_format.json_schema.schema",
    ),
    ("a schema of a long text", with_value(guided_json="[" + " " * 300_000 + "]"), "guided_json"),
    ("a schema that is too large", with_value(guided_json={"a": ["x"] * 20_000}), "guided_json"),
    ("tools that are too long", with_value(tools=[tool("f", **{"x" * 400_000: 1})]), "tools"),
    ("tools of a wrong type", with_value(tools={}), "tools"),
    ("a tool of a wrong type", with_value(tools=["x"]), "tools[0]"),
    ("a tool without a function", with_value(tools=[{"type": "function"}]), "tools[0].function"),
    (
        "a tool without a name",
        with_value(tools=[{"type": "function", "function": {}}]),
        "tools[0].function.name",
    ),
    (
        "a tool with a list of parameters",
        with_value(tools=[{"type": "function", "function": {"name": "f", "parameters": []}}]),
        "tools[0].function.parameters",
    ),
    ("a tool twice", with_value(tools=[tool("f"), tool("f")]), "tools"),
    ("an unknown tool_choice", with_value(tools=[tool("f")], tool_choice="maybe"), "tool_choice"),
    ("a tool_choice that is no tool", with_value(tools=[tool("f")], tool_choice=chosen("g")), "tool_choice"),
    ("a required call without tools", with_value(tool_choice="required"), "tool_choice"),
    ("parallel_tool_calls of a wrong type", with_value(parallel_tool_calls=3), "parallel_tool_calls"),
    ("legacy functions", with_value(functions=[{"name": "f"}]), "functions"),
    ("beam search", with_value(use_beam_search=True), "use_beam_search"),
    ("special tokens", with_value(skip_special_tokens=False), "skip_special_tokens"),
    ("spoken answers", with_value(modalities=["text", "audio"]), "modalities"),
    ("a template", with_value(chat_template="{{ x }}"), "chat_template"),
    ("chat_template_kwargs of a wrong type", with_value(chat_template_kwargs=[]), "chat_template_kwargs"),
    (
        "an answer continued behind a question",
        with_value(continue_final_message=True),
        "continue_final_message",
    ),
    (
        "an answer continued and begun",
        {
            "messages": [*HELLO, {"role": "assistant", "content": "x"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        "continue_final_message",
    ),
    (
        "tool_calls of a user",
        {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
        "messages[0].tool_calls",
    ),
    (
        "a tool call without a function",
        {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages[1].tool_calls[0].function",
    ),
    (
        "a tool call whose arguments are no object",
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]},
            ]
        },
        "messages[1].tool_calls[0].function.arguments",
    ),
    (
        "a legacy function call",
        {"messages": [*HELLO, {"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
        "messages[1].function_call",
    ),
    ("an unknown effort", with_value(reasoning_effort="hard"), "reasoning_effort"),
    ("a budget below 0", with_value(thinking_token_budget=-1), "thinking_token_budget"),
    ("a salt that is too long", with_value(cache_salt="x" * 257), "cache_salt"),
    ("a salt with control characters", with_value(cache_salt="a\n"), "cache_salt"),
    ("a salt of a wrong type", with_value(cache_salt=5), "cache_salt"),
    ("mm_processor_kwargs of a wrong type", with_value(mm_processor_kwargs=[1]), "mm_processor_kwargs"),
    (
        "mm_processor_kwargs too large",
        with_value(mm_processor_kwargs={"a": "x" * 20000}),
        "mm_processor_kwargs",
    ),
    (
        "mm_processor_kwargs above 64 bits",
        with_value(mm_processor_kwargs={"a": 1 << 70}),
        "mm_processor_kwargs",
    ),
]
