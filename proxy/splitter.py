"""Splits a request: messages with item slots for the PD worker, items with bytes for encoder workers."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from triptych.base.errors import InvalidRequest
from triptych.base.hashing import framed_digest, mm_hash
from triptych.base.types import SEGMENT
from triptych.proxy.call.chat import ChatCall, ChatMessage, EncoderPrompt, RawPrompt, modality_of
from triptych.proxy.call.validation import check_text
from triptych.proxy.media.source import AudioPart, ImagePart, ItemMedia, ItemPart, MediaSource, VideoPart
from triptych.proxy.media.spool import MediaHold

MODALITY = "image"
#: Options that mean the videos of a request, not the pictures beside them.
VIDEO_OPTIONS = frozenset({"fps", "num_frames", "min_frames", "max_frames"})
T = TypeVar("T")
#: Bytes of a raw prompt that go into one digest, and how many digests there are at most.
_PIECE = 1024
_MAX_PIECES = 256


class VideoSegment(NamedTuple):
    """The first sampled frame, the end, the rows that the tower adds behind a video's frames, and its seconds
    of the video."""

    start: int
    end: int
    extra_rows: int
    begins: float = 0.0
    ends: float = 0.0


@dataclass(frozen=True, slots=True)
class SplitItem:
    """One slot's item: its key, its media, which the call holds, and the request field that names it.

    `prefix` is the index in the request's `chain` of the shortest prefix that holds the slot, `title` is for
    people, of a segment only.
    """

    mm_hash: str
    media: ItemMedia
    param: str
    options: Mapping[str, object]
    modality: str = MODALITY
    prefix: int = 0
    title: str = ""


class VideoSegments(Protocol):
    """Divides videos into items."""

    async def segments(
        self, video: SplitItem, namespace: str, salt: str, tenant: str = ""
    ) -> Sequence[VideoSegment]:
        """The segments of a video; empty where it is one item."""


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """`messages`: Submit's JSON; `items`: in slot order, a video's segments side by side; `chain`: one hash
    per message prefix."""

    messages: bytes
    items: tuple[SplitItem, ...]
    chain: tuple[str, ...]


async def split(
    call: ChatCall, namespace: str, loader: MediaSource, videos: VideoSegments | None = None
) -> SplitRequest:
    """Fetches, decodes and hashes media, off the event loop; pictures of one request beside each other.

    InvalidRequest for more text than any model takes, before anything is fetched.
    """
    if isinstance(call.prompt, str):
        check_text(len(call.prompt), call.prompt_param)
    if call.encoder is not None:
        return await split_encoder_prompt(call, call.encoder, namespace, loader)
    if call.prompt is not None:
        return SplitRequest(b"", (), prompt_chain(call, call.prompt))
    encoded = [_without_media(message) for message in call.messages]
    # Before they are joined: many bodies of too much text at once would otherwise be in memory twice.
    check_text(sum(map(len, encoded)) + len(encoded) + 1, "messages")
    messages = _array(encoded)
    parts = [(part, index) for index, message in enumerate(call.messages) for part in message.items()]
    slots = await gather_or_cancel(
        [slot_items(call, namespace, part, loader, index, videos) for part, index in parts]
    )
    items = tuple(item for slot in slots for item in slot)
    return SplitRequest(messages, items, _message_chain(call, encoded, slots))


async def split_encoder_prompt(
    call: ChatCall, encoder: EncoderPrompt, namespace: str, loader: MediaSource
) -> SplitRequest:
    """One item for the encoder. Requests about the same one go to the PD worker that has read it."""
    check_text(_length(encoder.source) + _length(call.prompt), encoder.param)
    item = await hashed_item(
        call,
        namespace,
        await load_encoder_prompt(encoder, call.media, loader),
        encoder.param,
        call.processor_options if encoder.modality == "image" else encoder.options,
        encoder.modality,
    )
    return SplitRequest(b"", (item,), prompt_chain(call, call.prompt or (), item.mm_hash))


def _length(prompt: object) -> int:
    """Characters of a prompt: a token id has the bytes of two at most, and a file is no text."""
    if isinstance(prompt, str):
        return len(prompt)
    return 2 * len(prompt) if isinstance(prompt, tuple) else 0


async def load_encoder_prompt(encoder: EncoderPrompt, hold: MediaHold, loader: MediaSource) -> ItemMedia:
    """The bytes that the encoder reads, which `hold` keeps: a file's, a text's or token ids'."""
    if isinstance(encoder.source, ImagePart | AudioPart):
        return await loader.load(encoder.source, hold)
    return await loader.keep_text(encoder.source, encoder.text_bytes, hold)


async def slot_items(
    call: ChatCall,
    namespace: str,
    part: ItemPart,
    loader: MediaSource,
    message: int,
    videos: VideoSegments | None,
) -> list[SplitItem]:
    """The item of a picture, video or sound, or the items of a video's segments."""
    if SEGMENT in call.processor_options:
        param = f"mm_processor_kwargs.{SEGMENT}"
        raise InvalidRequest(f"{param} is not for clients: leave it out", param=param)
    item = await make_item(call, namespace, part, loader, message)
    if videos is None or not isinstance(part, VideoPart):
        return [item]
    segments = await videos.segments(item, namespace, call.salt, call.tenant)
    if not segments:
        return [item]
    options = [{**item.options, SEGMENT: list(segment[:3])} for segment in segments]
    keys = await item.media.in_thread(
        lambda: [item_key(call, namespace, item.media, given, item.modality) for given in options]
    )
    before = takewhile(lambda other: other is not part, call.items())
    number = 1 + sum(isinstance(other, VideoPart) for other in before)
    titles = [
        f"video {number}, segment {at} ({round(segment.begins, 1):g}–{round(segment.ends, 1):g} s)"
        for at, segment in enumerate(segments, 1)
    ]
    return [
        replace(item, mm_hash=key, options=given, title=title)
        for key, given, title in zip(keys, options, titles, strict=True)
    ]


async def make_item(
    call: ChatCall, namespace: str, part: ItemPart, loader: MediaSource, message: int
) -> SplitItem:
    """The item of a picture, video or sound in the message with this index."""
    media = await loader.load(part, call.media)
    modality, options = modality_of(part), call.processor_options
    if isinstance(part, AudioPart):
        # It has none: they are refused where there is nothing else that they could mean.
        options = options if all(isinstance(other, AudioPart) for other in call.items()) else {}
    elif isinstance(part, ImagePart) and any(isinstance(other, VideoPart) for other in call.items()):
        options = {name: value for name, value in options.items() if name not in VIDEO_OPTIONS}
    return await hashed_item(call, namespace, media, part.param, options, modality, message)


async def hashed_item(
    call: ChatCall,
    namespace: str,
    media: ItemMedia,
    param: str,
    options: Mapping[str, object],
    modality: str,
    prefix: int = 0,
) -> SplitItem:
    key = await media.in_thread(lambda: item_key(call, namespace, media, options, modality))
    return SplitItem(key, media, param, options, modality, prefix)


def item_key(
    call: ChatCall, namespace: str, media: ItemMedia, options: Mapping[str, object], modality: str
) -> str:
    """The item's mm_hash. Reads all bytes: for a thread."""
    with media.view() as content:
        return mm_hash(
            content, namespace=namespace, modality=modality, processor_options=options, salt=call.salt
        )


def pd_messages(messages: Sequence[ChatMessage]) -> bytes:
    """The messages as Submit's JSON: text as it is, an empty slot for every item."""
    return _array([_without_media(message) for message in messages])


def _without_media(message: ChatMessage) -> bytes:
    return msgspec.json.encode(message.without_media())


def _array(encoded: Sequence[bytes]) -> bytes:
    return b"".join((b"[", b",".join(encoded), b"]"))


def _message_chain(
    call: ChatCall, encoded: Sequence[bytes], slots: Sequence[Sequence[SplitItem]]
) -> tuple[str, ...]:
    """One digest per message, each over all messages and items up to it: equal prefixes share KV blocks."""
    chain: list[str] = []
    last = _chain_root(call)
    slot = iter(slots)
    for message, content in zip(call.messages, encoded, strict=True):
        fields = [("last", last.encode()), ("message", content)]
        fields += [("item", item.mm_hash.encode()) for _ in message.items() for item in next(slot)]
        last = framed_digest(fields)
        chain.append(last)
    return tuple(chain)


def _chain_root(call: ChatCall) -> str:
    """Tenants share no KV blocks, nor do adapters."""
    return framed_digest((("salt", call.salt.encode()), ("adapter", call.adapter.encode())))


def prompt_chain(call: ChatCall, prompt: RawPrompt, item: str = "") -> tuple[str, ...]:
    """The same for a raw prompt: one digest per piece of 1 KiB, each over everything up to it.

    `item`, the key of what the encoder reads, goes before it.
    """
    # No more than has a digest: on the event loop nothing grows with what a client sends.
    most = _MAX_PIECES * _PIECE
    begin = prompt[:most]
    data = begin.encode() if isinstance(begin, str) else struct.pack(f"<{len(begin)}I", *begin)
    last = _chain_root(call)
    chain: list[str] = []
    if item:
        last = framed_digest((("last", last.encode()), ("item", item.encode())))
        chain.append(last)
    for at in range(0, min(len(data), most), _PIECE):
        last = framed_digest((("last", last.encode()), ("prompt", data[at : at + _PIECE])))
        chain.append(last)
    return tuple(chain)


async def gather_or_cancel(works: Sequence[Coroutine[object, None, T]]) -> list[T]:
    """Results in order; the first error cancels the rest."""
    if len(works) < 2:
        return [await work for work in works]
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
