"""Splits a request: messages with item slots for the PD worker, one item with bytes per picture."""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import msgspec

from triptych.errors import InvalidRequest
from triptych.hashing import framed_digest, mm_hash
from triptych.proxy.chat import ChatCall, ChatMessage, ImagePart, TextPart

#: Multiple of 4; between two slices other threads get the interpreter.
_SLICE = 1 << 20
MODALITY = "image"


@dataclass(frozen=True, slots=True)
class SplitItem:
    """One slot's item: its key, its media bytes, and the request field that holds it."""

    mm_hash: str
    media: bytes
    param: str


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """`messages`: Submit's JSON; `items`: in slot order; `chain`: one hash per message prefix."""

    messages: bytes
    items: tuple[SplitItem, ...]
    chain: tuple[str, ...]


async def split(call: ChatCall, namespace: str, executor: Executor) -> SplitRequest:
    """Decodes and hashes off the event loop; pictures of one request run beside each other."""
    loop = asyncio.get_running_loop()
    images = call.images()
    items = await asyncio.gather(
        *(loop.run_in_executor(executor, make_item, call, namespace, image) for image in images)
    )
    return SplitRequest(pd_messages(call.messages), tuple(items), prefix_chain(call, items))


def make_item(call: ChatCall, namespace: str, image: ImagePart) -> SplitItem:
    media = image.source if isinstance(image.source, bytes) else _decode(image.source, image.param)
    if not media:
        raise InvalidRequest(f"{image.param}: the picture is empty", param=image.param)
    key = mm_hash(
        media,
        namespace=namespace,
        modality=MODALITY,
        processor_options=call.processor_options,
        salt=call.salt,
    )
    return SplitItem(key, media, image.param)


def _decode(text: str, param: str) -> bytes:
    try:
        if "=" in text[:-2]:
            raise InvalidRequest(f"{param}: the base64 content has padding inside", param=param)
        if len(text) <= _SLICE:
            return binascii.a2b_base64(text, strict_mode=True)
        return b"".join(
            binascii.a2b_base64(text[at : at + _SLICE], strict_mode=True)
            for at in range(0, len(text), _SLICE)
        )
    except ValueError as error:
        raise InvalidRequest(f"{param}: bad base64 content: {error}", param=param) from None


def pd_messages(messages: Sequence[ChatMessage]) -> bytes:
    """The messages as Submit's JSON: text as it is, an empty slot for every picture."""
    return msgspec.json.encode([_pd_message(message) for message in messages])


def _pd_message(message: ChatMessage) -> dict[str, object]:
    if isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    parts = [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
        for part in message.content
    ]
    return {"role": message.role, "content": parts}


def prefix_chain(call: ChatCall, items: Sequence[SplitItem]) -> tuple[str, ...]:
    """One digest per message, each over all messages and items up to it: equal prefixes share KV blocks."""
    chain: list[str] = []
    last = framed_digest((("salt", call.salt.encode()),))
    keys = iter(items)
    for message in call.messages:
        fields = [("last", last.encode()), ("message", msgspec.json.encode(_pd_message(message)))]
        fields += [("item", next(keys).mm_hash.encode()) for _ in message.images()]
        last = framed_digest(fields)
        chain.append(last)
    return tuple(chain)
