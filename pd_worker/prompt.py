"""From messages to the expanded prompt: rendered, tokenised, every image token made a placeholder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from tokenizers import Tokenizer

from triptych.errors import InvalidRequest
from triptych.models.base import DecoderSide
from triptych.pd_worker.chat_template import ChatTemplate, read_template
from triptych.pd_worker.tokenization import GuardedTokenizer, load_tokenizer
from triptych.types import ItemPlan, MMFeature, Placement

#: No vocabulary's token is longer, so that a longer text is too long before it is tokenised.
_MOST_CHARS_PER_TOKEN = 128


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ImagePart(msgspec.Struct, frozen=True, tag="image"):
    """An item slot."""


class Message(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[TextPart | ImagePart]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The expanded prompt, and its items where they stand in it, in slot order."""

    token_ids: tuple[int, ...]
    features: tuple[MMFeature, ...]


class PromptBuilder:
    """Makes prompts for one checkpoint. Thread-safe."""

    def __init__(
        self, template: ChatTemplate, tokenizer: GuardedTokenizer, decoder: DecoderSide, max_model_len: int
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._decoder = decoder
        self._max_model_len = max_model_len

    def build(self, messages: bytes, plans: Sequence[ItemPlan]) -> Prompt:
        """The prompt of Submit's JSON messages; InvalidRequest names what is wrong."""
        parsed = parse_messages(messages)
        slots = sum(
            isinstance(part, ImagePart)
            for m in parsed
            if not isinstance(m.content, str)
            for part in m.content
        )
        if slots != len(plans):
            raise InvalidRequest(
                f"messages hold {slots} images, but {len(plans)} items came", param="messages"
            )
        try:
            text = self._template.render([self._protected(message) for message in parsed])
            most = self._max_model_len * _MOST_CHARS_PER_TOKEN
            if len(text) > most:
                raise InvalidRequest(
                    f"the prompt has {len(text)} characters, which is more than the {self._max_model_len} "
                    "tokens that the model takes: shorten messages",
                    param="messages",
                )
            token_ids = self._tokenizer.encode(text)
        except UnicodeError as error:
            raise InvalidRequest("messages hold text that is no Unicode", param="messages") from error
        return self._expand(token_ids, plans)

    def take_up(
        self, token_ids: Sequence[int], placements: Sequence[tuple[int, int]], plans: Sequence[ItemPlan]
    ) -> Prompt:
        """The prompt that an earlier attempt expanded; InvalidRequest when items and places do not fit."""
        if len(placements) != len(plans):
            raise InvalidRequest(f"{len(placements)} placements for {len(plans)} items", param="resume")
        vocab_size = self._decoder.geometry.vocab_size
        token_ids = tuple(token_ids)
        if not token_ids or max(token_ids) >= vocab_size:
            raise InvalidRequest(f"prompt_token_ids must be from 0 to {vocab_size - 1}", param="resume")
        features, end = [], 0
        for (offset, length), plan in zip(placements, plans, strict=True):
            expected = self._decoder.placeholder(plan)
            if (
                offset < end
                or length != len(expected)
                or list(token_ids[offset : offset + length]) != expected
            ):
                raise InvalidRequest(f"no placeholder of {length} tokens stands at {offset}", param="resume")
            features.append(MMFeature(plan, Placement(offset, length, plan.runs)))
            end = offset + length
        self._check_images(token_ids, features)
        return Prompt(token_ids, tuple(features))

    def _check_images(self, token_ids: tuple[int, ...], features: Sequence[MMFeature]) -> None:
        image = self._decoder.image_token_id
        placed = sum(token_ids[f.placement.offset : f.placement.end].count(image) for f in features)
        if image is not None and token_ids.count(image) != placed:
            raise InvalidRequest("prompt_token_ids hold image tokens outside placements", param="resume")

    def _protected(self, message: Message) -> dict[str, Any]:
        protect = self._tokenizer.protect
        if isinstance(message.content, str):
            return {"role": message.role, "content": protect(message.content)}
        parts = [
            {"type": "text", "text": protect(part.text)} if isinstance(part, TextPart) else {"type": "image"}
            for part in message.content
        ]
        return {"role": message.role, "content": parts}

    def _expand(self, token_ids: Sequence[int], plans: Sequence[ItemPlan]) -> Prompt:
        image = self._decoder.image_token_id
        written = token_ids.count(image) if image is not None else 0
        if written != len(plans):
            raise InvalidRequest(
                f"the model's chat template wrote {written} image tokens for {len(plans)} images in messages",
                param="messages",
            )
        remaining = iter(plans)
        expanded: list[int] = []
        features: list[MMFeature] = []
        for token in token_ids:
            if token != image:
                expanded.append(token)
                continue
            plan = next(remaining)
            placeholder = self._decoder.placeholder(plan)
            features.append(MMFeature(plan, Placement(len(expanded), len(placeholder), plan.runs)))
            expanded.extend(placeholder)
        return Prompt(tuple(expanded), tuple(features))


def parse_messages(raw: bytes) -> list[Message]:
    """Submit's JSON array of messages; InvalidRequest names the path of what is wrong."""
    try:
        messages = msgspec.json.decode(raw, type=list[Message])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"messages: {error}", param="messages") from error
    if not messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    return messages


def open_checkpoint(path: Path, decoder: DecoderSide, max_model_len: int) -> tuple[PromptBuilder, Tokenizer]:
    """The prompt builder of a checkpoint folder, and the tokenizer that decodes its output."""
    tokenizer = load_tokenizer(path)
    variables = {
        name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
    }
    template = ChatTemplate(read_template(path, tokenizer.chat_template), variables)
    image = () if decoder.image_token_id is None else (decoder.image_token_id,)
    guarded = GuardedTokenizer(
        tokenizer.backend_tokenizer, bos_token=variables.get("bos_token", ""), specials=image
    )
    return PromptBuilder(template, guarded, decoder, max_model_len), tokenizer.backend_tokenizer
