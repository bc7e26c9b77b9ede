"""JSON that looks like a request: a call, or an error of ours that names a field."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

from support.hostile.fuzzing import Fuzzer, messages, mutate, random_json, randoms, refused_well
from triptych.base.errors import RequestError
from triptych.pd_worker.frontend.prompt import parse_messages
from triptych.protos import pd_pb2, proxy_pb2
from triptych.protos.convert import sampling_from_proto, sampling_to_proto
from triptych.proxy.call.chat import ChatCall
from triptych.proxy.grpc.request import call_of as grpc_call
from triptych.proxy.openai.chat.endpoint import ApiLimits
from triptych.proxy.openai.chat.request import parse_body
from triptych.proxy.openai.completions.request import parse_completion
from triptych.proxy.openai.messages import request as messages_request
from triptych.proxy.openai.responses.request import parse_responses
from triptych.proxy.openai.tokenize import DetokenizeEndpoint, TokenizeEndpoint
from triptych.proxy.pd.wire import prompt_to_proto, template_to_proto
from triptych.proxy.splitter import pd_messages

PNG = "data:image/png;base64,iVBORw0KGgo="
URLS = [
    PNG,
    "data:image/png;base64,",
    "data:,",
    "file:///etc/passwd",
    "data:image/png;base64,é=",
    "gopher://x",
]
URLS += [
    "http://127.0.0.1/",
    "http://x\r\nHost: y/",
    "https://user:pass@x/",
    "http://[::1",
    "//x",
    "http:\\\\x",
]
ROLES = ["user", "system", "assistant", "tool", "developer", "robot"]
CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
#: Good values of fields; every one is replaced by any JSON at times.
FIELDS: dict[str, list[Any]] = {
    "model": ["demo"],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}],
    "stop": ["x", ["a", "b"]],
    "response_format": [{"type": "text"}, {"type": "json_object"}, SCHEMA],
    "tools": [[TOOL], [TOOL, TOOL]],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
    "logit_bias": [{"1": 1.0}, {"-1": 0}, {"x": 1}, {"1": 1e9}],
    "logprobs": [True],
    "top_logprobs": [0, 5, 21],
    "n": [1, 2, 10**9],
    "temperature": [0, 1.5],
    "max_tokens": [1, 10**9],
    "mm_processor_kwargs": [{"max_pixels": 1000}, {"a": {"b": [1]}}],
    "chat_template_kwargs": [{"enable_thinking": False}, {"messages": []}],
    "cache_salt": ["s", "x" * 300],
}
NAMES = [*FIELDS, "top_p", "top_k", "min_p", "max_completion_tokens", "min_tokens", "seed", "user"]
NAMES += ["presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids", "ignore_eos"]
NAMES += ["return_token_ids", "metadata", "triptych_timings", "add_generation_prompt", "functions"]
NAMES += ["continue_final_message", "parallel_tool_calls", "guided_json", "guided_regex", "guided_choice"]
NAMES += ["best_of", "echo", "documents", "prompt_logprobs"]


def body_of(rng: random.Random) -> dict[str, Any]:
    """A body that is mostly good."""
    body: dict[str, Any] = {"messages": [message_of(rng) for _ in range(rng.randrange(1, 4))]}
    for _ in range(rng.randrange(4)):
        name = rng.choice(NAMES)
        body[name] = rng.choice(FIELDS[name]) if name in FIELDS and rng.random() < 0.6 else random_json(rng)
    if rng.random() < 0.1:
        body["messages"] = random_json(rng)
    return body


def message_of(rng: random.Random) -> Any:
    message: dict[str, Any] = {"role": rng.choice(ROLES), "content": content_of(rng)}
    if rng.random() < 0.2:
        message["tool_calls"] = [rng.choice((CALL, random_json(rng)))]
    if rng.random() < 0.2:
        message[rng.choice(("name", "tool_call_id", "refusal", "x"))] = random_json(rng)
    return message if rng.random() < 0.95 else random_json(rng)


def content_of(rng: random.Random) -> Any:
    if rng.random() < 0.5:
        return rng.choice(("hello", "", random_json(rng)))
    return [part_of(rng) for _ in range(rng.randrange(4))]


def part_of(rng: random.Random) -> Any:
    url = rng.choice(URLS) if rng.random() < 0.7 else random_json(rng)
    match rng.randrange(6):
        case 0:
            return {"type": "text", "text": rng.choice(("x", random_json(rng)))}
        case 1 | 2:
            return {"type": "image_url", "image_url": {"url": url, "detail": rng.choice(("auto", 1))}}
        case 3:
            return {"type": "image_url", "image_url": url, "uuid": random_json(rng)}
        case 4:
            return {"type": rng.choice(("image", "input_image", "input_audio", "video_url")), "image": url}
        case _:
            return random_json(rng)


def raw_of(rng: random.Random) -> bytes:
    raw = json.dumps(body_of(rng)).encode()
    if rng.random() < 0.7:
        return raw
    return mutate(raw, rng, [b'{"messages":[', b"\xff\xfe", b"1e999", b"\\ud800", b"[[[[[[", b'"\x00', raw])


#: Fields of the other endpoints.
OTHERS: dict[str, dict[str, list[Any]]] = {
    "completions": {
        "prompt": ["hello", ["a", "b"], [1, 2], [[1], [2, 3]], "", [], [-1], [1 << 32]],
        "suffix": [None, "x"],
        "echo": [True],
        "logprobs": [0, 5, 6],
        "best_of": [1, 2],
    },
    "messages": {
        "messages": [
            [{"role": "user", "content": "hi"}],
            [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": PNG}}]}],
            [{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}],
            [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]}],
        ],
        "max_tokens": [1, 9],
        "system": ["be brief", [{"type": "text", "text": "x"}], []],
        "tools": [[{"name": "f", "input_schema": {"type": "object"}}], [{"name": "f"}]],
        "tool_choice": [{"type": "any"}, {"type": "tool"}, {"type": "tool", "name": "f"}],
        "thinking": [{"type": "enabled", "budget_tokens": 5}, {"type": "disabled"}],
        "output_config": [{"effort": "low"}, {"format": {"type": "json_schema", "schema": {}}}],
    },
    "responses": {
        "input": [
            "hello",
            [{"role": "user", "content": "hi"}],
            [{"role": "user", "content": [{"type": "input_image", "image_url": PNG}]}],
            [{"type": "function_call_output", "call_id": "x", "output": "y"}],
            [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"}],
        ],
        "instructions": ["be brief"],
        "text": [
            {"format": {"type": "json_schema", "name": "s", "schema": {}}},
            {"format": {"type": "text"}},
        ],
        "max_output_tokens": [1, 0],
        "store": [False, True],
        "previous_response_id": [None, "x"],
        "reasoning": [{"effort": "low"}],
        "include": [[], ["x"]],
    },
    "tokenize": {
        "prompt": ["hello", [1]],
        "messages": [[{"role": "user", "content": "x"}]],
        "add_special_tokens": [True],
        "return_token_strs": [True],
    },
    "detokenize": {"tokens": [[1, 2], [1 << 32], [-1], []]},
}


def other_body(rng: random.Random) -> tuple[str, bytes]:
    """An endpoint and a body for it."""
    name = rng.choice(sorted(OTHERS))
    fields = OTHERS[name] | {field: FIELDS[field] for field in rng.sample(sorted(FIELDS), 2)}
    body = {
        field: rng.choice(values) if rng.random() < 0.7 else random_json(rng)
        for field, values in fields.items()
        if rng.random() < 0.6
    }
    raw = json.dumps(body).encode()
    return name, raw if rng.random() < 0.8 else mutate(raw, rng, [b"\xff", b"[[[[", raw])


def as_sent(call: ChatCall) -> None:
    """What a PD worker would get of the call: it can be written, and read there."""
    message = pd_pb2.SubmitRequest(
        messages=pd_messages(call.messages),
        sampling=sampling_to_proto(call.sampling),
        template=template_to_proto(call.template),
        salt=call.salt,
        timeout=call.timeout,
    )
    if call.prompt is not None:
        message.prompt.CopyFrom(prompt_to_proto(call.prompt))
    else:
        parse_messages(message.messages)
    sampling_from_proto(pd_pb2.SubmitRequest.FromString(message.SerializeToString()).sampling)


def chat(raw: bytes) -> None:
    try:
        call, _ = parse_body(raw, "r", max_images=4, timeout=1.0)
    except RequestError as error:
        refused_well(error)
    else:
        as_sent(call)


def test_a_chat_body_is_a_call_or_an_error_of_ours(fuzzer: Fuzzer) -> None:
    fuzzer.run("chat bodies", randoms().map(raw_of), chat, 300)


def test_a_body_of_another_endpoint_is_taken_or_an_error_of_ours(fuzzer: Fuzzer) -> None:
    nobody: Any = None
    dispatcher: Any = SimpleNamespace(parsers=None)
    tokenize = TokenizeEndpoint(dispatcher, nobody, ApiLimits(max_images=4))
    detokenize = DetokenizeEndpoint(dispatcher, nobody, ApiLimits())

    def check(case: tuple[str, bytes]) -> None:
        name, raw = case
        try:
            match name:
                case "completions":
                    request = parse_completion(raw, "r", timeout=1.0, max_choices=4)
                    for call in request.calls:
                        as_sent(call)
                case "responses":
                    as_sent(parse_responses(raw, "r", max_images=4, timeout=1.0).call)
                case "messages":
                    as_sent(messages_request.parse_messages(raw, "r", max_images=4, timeout=1.0).call)
                case "tokenize":
                    tokenize.parse("r")(raw).message.SerializeToString()
                case _:
                    detokenize.parse("r")(raw)
        except RequestError as error:
            refused_well(error)

    fuzzer.run("completions, responses, tokenize bodies", randoms().map(other_body), check, 150)


def test_a_grpc_request_is_a_call_or_an_error_of_ours(fuzzer: Fuzzer) -> None:
    known = {
        "role": ["user", "system", "assistant", "robot"],
        "image": [b"x"],
        "mm_processor_kwargs": [
            "",
            "{}",
            '{"max_pixels": 7}',
            '{"a":' * 600 + "1" + "}" * 600,
            '{"a": 1e999}',
        ],
    }

    def check(message: proxy_pb2.ChatRequest) -> None:
        try:
            as_sent(grpc_call(message, max_images=2, timeout=1.0, max_choices=4)[0])
        except RequestError as error:
            refused_well(error)

    fuzzer.run("gRPC chat requests", messages(proxy_pb2.ChatRequest, known), check, 100)
