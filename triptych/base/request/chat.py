"""A chat as Submit carries it from a proxy to a PD worker: messages with item slots, and template options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

#: The last two are of a pair to score, and of no conversation.
Role = Literal["system", "user", "assistant", "tool", "query", "document"]


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """A text among a message's parts."""

    text: str


class ItemSlot(msgspec.Struct, frozen=True, tag="image"):
    """The place of a multimodal item among a message's parts."""

    @property
    def modality(self) -> str:
        """What chat templates call the item."""
        return "image"


class VideoSlot(msgspec.Struct, frozen=True, tag="video"):
    """The place of a video."""

    @property
    def modality(self) -> str:
        return "video"


class AudioSlot(msgspec.Struct, frozen=True, tag="audio"):
    """The place of a sound."""

    @property
    def modality(self) -> str:
        return "audio"


Slot = ItemSlot | VideoSlot | AudioSlot


class FunctionCall(msgspec.Struct, frozen=True):
    """A function's name and arguments: a JSON object in a string, as OpenAI has it, or that object."""

    name: str
    arguments: str | dict[str, object] = "{}"

    def parsed_arguments(self) -> dict[str, object] | None:
        """The arguments as an object; None when they are none."""
        if not isinstance(self.arguments, str):
            return self.arguments
        try:
            arguments = msgspec.json.decode(self.arguments or "{}")
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        return arguments if isinstance(arguments, dict) else None


class MessageToolCall(msgspec.Struct, frozen=True):
    """A tool call of an earlier answer, as the conversation repeats it."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation; items are slots in it, filled in order."""

    role: Role
    content: str | list[TextPart | Slot] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    #: Of an earlier answer; templates show it or leave it out.
    reasoning_content: str | None = None

    @property
    def slots(self) -> list[str]:
        """The modalities of the items that the message takes."""
        return [part.modality for part in self.content or () if isinstance(part, Slot)]


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What the chat template gets beside the messages; `tools` and `variables` are JSON, empty for none.

    `continue_final_message` leaves the last message's turn open, for the model to go on in it.
    """

    tools: bytes = b""
    variables: bytes = b""
    generation_prompt: bool = True
    continue_final_message: bool = False
