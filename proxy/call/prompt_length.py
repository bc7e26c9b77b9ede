"""The length of a prompt's text against what PD workers take, before anything is done for it."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.base.errors import ContextTooLong
from triptych.base.request import MAX_CHARS_PER_TOKEN, TextPart
from triptych.proxy.call.chat import ChatCall, ChatMessage


def check_prompt_length(call: ChatCall, limits: Sequence[int]) -> None:
    """ContextTooLong for text of more tokens than a PD worker takes, by the `limits` that they name.

    Only PD workers have the tokenizer: what counts here is that no token has more than so many characters.
    A text encoder's prompt has limits of its own.
    """
    param = call.text_param
    if isinstance(call.prompt, str):
        check_characters(len(call.prompt), limits, param)
    else:
        check_characters(characters_of(call.messages), limits, param)


def check_characters(characters: int, limits: Sequence[int], param: str) -> None:
    """ContextTooLong for so many characters. A limit of 0 is that of a worker that names none."""
    if not limits or 0 in limits or characters <= (longest := max(limits)) * MAX_CHARS_PER_TOKEN:
        return
    raise ContextTooLong(
        f"the prompt has {characters} characters, which is more than the {longest} tokens that the model "
        f"takes: shorten {param}",
        param=param,
    )


def characters_of(messages: Sequence[ChatMessage]) -> int:
    """Characters of what every chat template writes. Of earlier answers some leave out thoughts, also those
    in the content, or calls: a worker measures them once it has rendered the prompt."""
    characters = 0
    for message in messages:
        if message.role == "assistant":
            continue
        if isinstance(message.content, str):
            characters += len(message.content)
        else:
            characters += sum(len(part.text) for part in message.content if isinstance(part, TextPart))
    return characters
