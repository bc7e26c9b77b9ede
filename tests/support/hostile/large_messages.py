"""The largest messages of every kind, valid and invalid, that a client may send to each endpoint and call."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from triptych.protos import common_pb2, proxy_pb2
from triptych.proxy.http.json_body import MAX_VALUES

Make = Callable[[int], bytes]
CHAT = {"role": "user", "content": "x"}
#: Characters of text, token ids and parts that are served.
_TEXT, _IDS, _PARTS = 8 << 20, 1 << 18, 4094
FORM = "multipart/form-data; boundary=edge"


def _json(body: Mapping[str, Any], filled: bytes) -> bytes:
    """The body with `filled` in the place of the one value FILL."""
    return json.dumps(body).encode().replace(b'"FILL"', filled)


def lists(size: int) -> bytes:
    """As many lists as fit, below the number that is refused by counting."""
    return b"[" + b"[]," * (min(size // 3, MAX_VALUES // 2) - 64) + b"[]]"


def more_lists(size: int) -> bytes:
    return b"[" + b"[]," * (size // 3) + b"[]]"


def objects(size: int) -> bytes:
    return b"[" + b'{"type":"x"},' * (min(size // 13, MAX_VALUES // 2) - 64) + b"{}]"


def deep(size: int) -> bytes:
    return b"[" * (size // 2) + b"]" * (size // 2)


def text(size: int) -> bytes:
    return b'"' + b"a, b" * (min(size, _TEXT - 8) // 4) + b'"'


def escaped_text(size: int) -> bytes:
    """Brackets that nobody sees who counts bytes, as the JSON that some fields hold as a text."""
    return b'"\\u005b' + b"\\u005b\\u005d," * (size // 13) + b'\\u005b\\u005d\\u005d"'


def picture(size: int) -> bytes:
    return b'"data:image/png;base64,' + b"iVBO" * (size // 4) + b'"'


def sound(size: int) -> bytes:
    return b'"' + b"UklG" * (size // 4) + b'"'


def token_ids(size: int) -> bytes:
    return b"[" + b"7," * (min(size // 2, _IDS) - 1) + b"7]"


def texts(count: int, size: int) -> bytes:
    return b"[" + b",".join([b'"' + b"x" * (min(size, _TEXT // 2) // count) + b'"'] * count) + b"]"


def parts(size: int) -> bytes:
    part = b'{"type":"text","text":"' + b"x" * (min(size, _TEXT // 2) // _PARTS) + b'"}'
    return b"[" + b",".join([part] * _PARTS) + b"]"


def turn(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def _row(body: Mapping[str, Any], fill: Make) -> Make:
    return lambda size: _json(body, fill(size))


def _image(url: Any = "FILL") -> list[Any]:
    return [{"type": "image_url", "image_url": {"url": url}}]


def _chat(extra: Mapping[str, Any]) -> dict[str, Make]:
    """What a conversation in the chat API's shape may hold; `extra` are the fields that it needs."""
    arguments = {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "FILL"}}]}]
    }
    return {
        "a text": _row({**extra, **turn("FILL")}, text),
        "a picture": _row({**extra, **turn(_image())}, picture),
        "parts": _row({**extra, **turn("FILL")}, parts),
        "messages that are lists": _row({**extra, "messages": "FILL"}, lists),
        "parts of no type": _row({**extra, **turn("FILL")}, objects),
        "too many values": _row({**extra, "messages": "FILL"}, more_lists),
        "deep tools": _row({**extra, "messages": [CHAT], "tools": "FILL"}, deep),
        "tools that are lists": _row({**extra, "messages": [CHAT], "tools": "FILL"}, lists),
        "variables": _row({**extra, "messages": [CHAT], "chat_template_kwargs": {"a": "FILL"}}, lists),
        "arguments": _row({**extra, **arguments}, escaped_text),
    }


def _inputs(name: str, extra: Mapping[str, Any]) -> dict[str, Make]:
    return {
        "a text": _row({**extra, name: "FILL"}, text),
        "token ids": _row({**extra, name: "FILL"}, token_ids),
        "inputs that are lists": _row({**extra, name: "FILL"}, lists),
        "too many values": _row({**extra, name: "FILL"}, more_lists),
        "a deep input": _row({**extra, name: "FILL"}, deep),
    }


def _contents(name: str, extra: Mapping[str, Any]) -> dict[str, Make]:
    return {
        "texts": _row({**extra, name: "FILL"}, partial(texts, 2048)),
        "a picture": _row({**extra, name: [{"image": "FILL"}]}, picture),
        "documents that are lists": _row({**extra, name: "FILL"}, lists),
        "documents without content": _row({**extra, name: "FILL"}, objects),
        "too many values": _row({**extra, name: "FILL"}, more_lists),
    }


def _form(size: int, name: str = "file", extra: bytes = b'; filename="a"') -> bytes:
    fill = b"\r\n--edg"
    head = f'--edge\r\nContent-Disposition: form-data; name="{name}"'.encode() + extra + b"\r\n\r\n"
    return head + fill * (size // len(fill)) + b"\r\n--edge--\r\n"


_FORMS: dict[str, Make] = {
    "a file": _form,
    "a long field": partial(_form, name="prompt", extra=b""),
    "parts": lambda size: _form(64)[:-10] + b"--edge\r\n\r\n" * (size // 10),
}
_SOURCE = {"type": "base64", "media_type": "image/png", "data": "FILL"}
_SPECIAL = {"model": "demo", "max_tokens": 2}
_COMPLETION = {"model": "demo"}
#: By path, and by what the message is.
BODIES: dict[str, dict[str, Make]] = {
    "/v1/chat/completions": {
        **_chat(_SPECIAL),
        "a schema as a text": _row({**_SPECIAL, "messages": [CHAT], "guided_json": "FILL"}, escaped_text),
        "a bias": _row({**_SPECIAL, "messages": [CHAT], "logit_bias": "FILL"}, objects),
        "stop strings": _row({**_SPECIAL, "messages": [CHAT], "stop": "FILL"}, partial(texts, 4096)),
    },
    "/v1/completions": {
        **_inputs("prompt", _COMPLETION),
        "media": _row({"multi_modal_data": {"image": "FILL"}}, picture),
    },
    "/v1/responses": {
        "a text": _row({"input": "FILL"}, text),
        "a picture": _row(
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "FILL"}]}]}, picture
        ),
        "calls": lambda size: (
            b'{"input":['
            + b",".join(
                [b'{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}'] * (size // 66)
            )
            + b"]}"
        ),
        "items that are lists": _row({"input": "FILL"}, lists),
        "items of no type": _row({"input": "FILL"}, objects),
        "too many values": _row({"input": "FILL"}, more_lists),
    },
    "/v1/messages": {
        "a text": _row({**_SPECIAL, **turn("FILL")}, text),
        "blocks": _row({**_SPECIAL, **turn("FILL")}, parts),
        "a picture": _row(
            {
                **_SPECIAL,
                **turn(
                    [
                        {
                            "type": "image",
                            "source": _SOURCE,
                        }
                    ]
                ),
            },
            sound,
        ),
        "blocks of no type": _row({**_SPECIAL, **turn("FILL")}, objects),
        "messages that are lists": _row({**_SPECIAL, "messages": "FILL"}, lists),
        "too many values": _row({**_SPECIAL, "messages": "FILL"}, more_lists),
    },
    "/v1/messages/count_tokens": {
        "a text": _row({"model": "demo", **turn("FILL")}, text),
        "blocks of no type": _row({"model": "demo", **turn("FILL")}, objects),
    },
    "/v1/audio/transcriptions": _FORMS,
    "/v1/audio/translations": _FORMS,
    "/v1/embeddings": _inputs("input", {"model": "demo"}),
    "/pooling": _inputs("input", {"model": "demo"}),
    **dict.fromkeys(("/v1/rerank", "/rerank"), _contents("documents", {"query": "x"})),
    **dict.fromkeys(("/v1/score", "/score"), _contents("text_2", {"text_1": "x"})),
    "/tokenize": {
        "a text": _row({"prompt": "FILL"}, text),
        "parts": _row(turn("FILL"), parts),
        "messages that are lists": _row({"messages": "FILL"}, lists),
    },
    "/detokenize": {
        "token ids": _row({"tokens": "FILL"}, token_ids),
        "tokens that are lists": _row({"tokens": "FILL"}, lists),
        "too many values": _row({"tokens": "FILL"}, more_lists),
    },
}


def _object(value: bytes) -> str:
    return f'{{"a":{value.decode()}}}'


def _message(**fields: Any) -> bytes:
    return proxy_pb2.ChatRequest(**fields).SerializeToString()


def _hi(**fields: Any) -> bytes:
    parts = [proxy_pb2.ChatPart(text="hi")]
    return _message(messages=[proxy_pb2.ChatMessage(role="user", parts=parts)], **fields)


def _said(*parts: Any) -> bytes:
    return _message(messages=[proxy_pb2.ChatMessage(role="user", parts=parts)])


def _called(arguments: str) -> bytes:
    calls = [proxy_pb2.ToolCall(name="f", arguments=arguments)]
    return _message(messages=[proxy_pb2.ChatMessage(role="assistant", tool_calls=calls)])


def _embed(**fields: Any) -> bytes:
    return proxy_pb2.EmbedRequest(**fields).SerializeToString()


def _rank(documents: list[Any]) -> bytes:
    query = proxy_pb2.RankedContent(parts=[proxy_pb2.ChatPart(text="x")])
    return proxy_pb2.RerankRequest(query=query, documents=documents).SerializeToString()


#: By method, and by what the message is.
MESSAGES: dict[str, dict[str, Make]] = {
    "Chat": {
        "a text": lambda size: _said(proxy_pb2.ChatPart(text="a, b" * (min(size, _TEXT) // 4))),
        "a picture": lambda size: _said(proxy_pb2.ChatPart(image=bytes(size))),
        "parts": lambda size: _said(
            *[proxy_pb2.ChatPart(text="x" * (min(size, _TEXT // 2) // _PARTS))] * _PARTS
        ),
        "tools that are lists": lambda size: _hi(tools=proxy_pb2.ChatTools(tools=more_lists(size).decode())),
        "deep tools": lambda size: _hi(tools=proxy_pb2.ChatTools(tools=deep(size).decode())),
        "variables": lambda size: _hi(chat_template_kwargs=_object(lists(size))),
        "options": lambda size: _hi(mm_processor_kwargs=_object(lists(size))),
        "arguments": lambda size: _called(_object(lists(min(size, _TEXT)))),
        "a schema": lambda size: _hi(
            sampling=common_pb2.SamplingParams(
                output_format=common_pb2.OutputFormat(json_schema=_object(lists(size)))
            )
        ),
        "empty messages": lambda size: b"\x12\x00" * (size // 2),
        "unknown fields": lambda size: b"\xf8\x06\x01" * (size // 3),
        "groups": lambda size: b"\x9b\x06\x9c\x06" * (size // 4),
    },
    "Generate": {
        "a text": lambda size: proxy_pb2.GenerateRequest(
            encoder_text="a, b" * (min(size, _TEXT) // 4)
        ).SerializeToString(),
        "a sound": lambda size: proxy_pb2.GenerateRequest(audio=bytes(size)).SerializeToString(),
        "token ids": lambda size: proxy_pb2.GenerateRequest(
            encoder_token_ids=common_pb2.TokenIds(ids=[7] * min(size // 2, _IDS))
        ).SerializeToString(),
        "too many ids": lambda size: proxy_pb2.GenerateRequest(
            encoder_token_ids=common_pb2.TokenIds(ids=[7] * (size // 2))
        ).SerializeToString(),
    },
    "Embed": {
        "texts": lambda size: _embed(
            inputs=[proxy_pb2.EmbedInput(text="x" * (min(size, _TEXT // 2) // 2048))] * 2048
        ),
        "too many inputs": lambda size: _embed(inputs=[proxy_pb2.EmbedInput(text="x")] * (size // 5)),
    },
    "Rerank": {
        "texts": lambda size: _rank(
            [proxy_pb2.RankedContent(parts=[proxy_pb2.ChatPart(text="x" * (min(size, _TEXT // 2) // 2048))])]
            * 2048
        ),
        "empty documents": lambda size: _rank([proxy_pb2.RankedContent()] * (size // 2)),
    },
    "ListModels": {"unknown fields": lambda size: b"\xf8\x06\x01" * (size // 3)},
}
