from __future__ import annotations

import base64
import json

import pytest

from support.data.media import split_alone
from support.hostile.operations import operations
from triptych.base.errors import InvalidRequest
from triptych.base.hashing import mm_hash
from triptych.base.request import TextPart
from triptych.base.types import SamplingParams
from triptych.proxy.call.chat import ChatCall, ChatMessage, EncoderPrompt
from triptych.proxy.media.source import ImagePart, VideoPart
from triptych.proxy.splitter import SplitItem, SplitRequest, VideoSegment, prompt_chain


def call(
    *parts: TextPart | ImagePart | VideoPart, salt: str = "", options: dict[str, object] | None = None
) -> ChatCall:
    messages = (ChatMessage("system", "be brief"), ChatMessage("user", parts))
    return ChatCall("r", "m", messages, SamplingParams(), 1.0, salt, options or {})


async def made(request: ChatCall, namespace: str = "n") -> SplitRequest:
    split, _ = await split_alone(request, namespace)
    return split


def image(media: bytes) -> ImagePart:
    return ImagePart(base64.b64encode(media).decode(), "field")


@pytest.mark.parametrize("piece", ["x", (7,)])
def test_the_chain_of_a_raw_prompt_costs_the_same_however_long_it_is(piece: str | tuple[int, ...]) -> None:
    long, longer = piece * 500_000, piece * 1_000_000
    assert operations(lambda: prompt_chain(call(), longer)) == operations(lambda: prompt_chain(call(), long))
    assert prompt_chain(call(), longer) == prompt_chain(call(), long)


def test_a_raw_prompt_beside_an_item_begins_with_the_item() -> None:
    bare, cat, dog = (prompt_chain(call(), "what is it?", item) for item in ("", "cat", "dog"))
    assert (len(bare), len(cat), len(dog)) == (1, 2, 2)
    assert not {*bare} & {*cat} and not {*cat} & {*dog}


def test_the_bytes_of_an_encoders_token_ids_are_made_without_a_walk() -> None:
    short, long = (EncoderPrompt((1, 2) * count, "encoder_prompt") for count in (100, 200))
    assert operations(long.text_bytes) == operations(short.text_bytes)
    assert EncoderPrompt((1, 1 << 16), "encoder_prompt").text_bytes() == b"\1\0\0\0\0\0\1\0"


async def test_pictures_become_empty_slots_in_order() -> None:
    request, contents = await split_alone(call(image(b"one"), TextPart("and"), image(b"two")))
    assert json.loads(request.messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]},
    ]
    assert contents == [b"one", b"two"]


async def test_options_of_sampling_belong_to_the_videos_beside_pictures() -> None:
    video = VideoPart(base64.b64encode(b"clip").decode(), "field")
    options: dict[str, object] = {"fps": 1, "max_pixels": 64}
    request, contents = await split_alone(call(video, image(b"one"), options=options))
    slots = [part["type"] for part in json.loads(request.messages)[1]["content"]]
    assert (slots, contents) == (["video", "image"], [b"clip", b"one"])
    assert [item.modality for item in request.items] == ["video", "image"]
    first, second = (item.mm_hash for item in request.items)
    assert first == mm_hash(b"clip", namespace="n", modality="video", processor_options=options, salt="")
    pictures = {"max_pixels": 64}
    assert second == mm_hash(b"one", namespace="n", modality="image", processor_options=pictures, salt="")
    # Alone, a picture gets all options: one that it does not know is refused.
    alone = await made(call(image(b"one"), options=options))
    expected = mm_hash(b"one", namespace="n", modality="image", processor_options=options, salt="")
    assert alone.items[0].mm_hash == expected


async def test_the_key_is_the_shared_one_over_the_decoded_bytes() -> None:
    request = await made(call(image(b"one"), salt="s", options={"a": 1}))
    expected = mm_hash(b"one", namespace="n", modality="image", processor_options={"a": 1}, salt="s")
    assert request.items[0].mm_hash == expected


async def test_large_pictures_are_decoded_in_slices_to_the_same_bytes() -> None:
    media = bytes(range(256)) * 12_345
    assert (await split_alone(call(image(media))))[1] == [media]


@pytest.mark.parametrize("text", ["a", "ab c", "ab=c", "====", "é", "", "AAAA" * 300_000 + "=A=="])
async def test_bad_base64_is_an_error_that_names_the_field(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await made(call(ImagePart(text, "field")))
    assert caught.value.param == "field"


async def test_equal_prefixes_have_equal_hashes_and_another_picture_changes_them() -> None:
    same = await made(call(image(b"one"), TextPart("x")))
    again = await made(call(image(b"one"), TextPart("x")))
    other = await made(call(image(b"two"), TextPart("x")))
    salted = await made(call(image(b"one"), TextPart("x"), salt="s"))
    assert same.chain == again.chain
    assert same.chain[0] == other.chain[0]
    assert same.chain[1] != other.chain[1]
    assert same.chain[0] != salted.chain[0]


async def test_an_item_names_the_shortest_prefix_that_holds_it() -> None:
    turns = (
        ChatMessage("system", "be brief"),
        ChatMessage("user", (image(b"one"), TextPart("and"), image(b"two"))),
        ChatMessage("assistant", "so"),
        ChatMessage("user", (image(b"one"),)),
    )
    request = await made(ChatCall("r", "m", turns, SamplingParams(), 1.0))
    assert [item.prefix for item in request.items] == [1, 1, 3]
    assert len(request.chain) == 4


class Halves:
    """Divides every video into two segments, and notes which ones it was asked about."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def segments(
        self, video: SplitItem, namespace: str, salt: str, tenant: str = ""
    ) -> list[VideoSegment]:
        self.asked.append(video.mm_hash)
        return [VideoSegment(0, 4, 1, 0.0, 2.04), VideoSegment(4, 6, 1, 2.04, 61.0)]


async def test_a_videos_segments_are_items_of_its_slot_and_prefix() -> None:
    video = VideoPart(base64.b64encode(b"clip").decode(), "field")
    halves, options = Halves(), {"fps": 1}
    request, contents = await split_alone(
        call(image(b"one"), video, image(b"two"), salt="s", options=options), videos=halves
    )
    slots = [part["type"] for part in json.loads(request.messages)[1]["content"]]
    assert slots == ["image", "video", "image"]
    assert contents == [b"one", b"clip", b"clip", b"two"]
    assert [item.modality for item in request.items] == ["image", "video", "video", "image"]
    assert {item.param for item in request.items} == {"field"}
    titles = [item.title for item in request.items]
    assert titles == ["", "video 1, segment 1 (0–2 s)", "video 1, segment 2 (2–61 s)", ""]

    def key(**more: object) -> str:
        given = {**options, **more}
        return mm_hash(b"clip", namespace="n", modality="video", processor_options=given, salt="s")

    assert halves.asked == [key()]
    assert [item.mm_hash for item in request.items[1:3]] == [key(segment=[0, 4, 1]), key(segment=[4, 6, 1])]
    whole, _ = await split_alone(call(image(b"one"), video, image(b"two"), salt="s", options=options))
    assert whole.chain[0] == request.chain[0]
    assert whole.chain[1] != request.chain[1]


async def test_a_client_names_no_segment() -> None:
    with pytest.raises(InvalidRequest, match="leave it out") as caught:
        await made(call(image(b"one"), options={"segment": [0, 4, 0]}))
    assert caught.value.param == "mm_processor_kwargs.segment"
