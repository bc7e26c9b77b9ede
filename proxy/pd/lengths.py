"""Lengths of requests, as far as the proxy knows them, against what PD workers take. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable

from triptych.base.errors import ContextTooLong
from triptych.proxy.call.chat import ChatCall
from triptych.proxy.call.prompt_length import characters_of

#: Of a token of text, on average.
CHARS_PER_TOKEN = 4


def min_tokens(call: ChatCall, item_tokens: Iterable[int], prompt: int | None = None, sent: int = 0) -> int:
    """The fewest tokens of prompt and output that a worker has to take.

    Text counts nothing: only PD workers have the tokenizer. `item_tokens`: placeholders of each item;
    `prompt` and `sent`: tokens of one that goes on, and of its output so far.
    """
    output = max(call.sampling.max_tokens or 1, 1)
    if prompt is not None:
        return prompt + max(output, sent)
    if isinstance(call.prompt, tuple):
        return len(call.prompt) + output
    return sum(item_tokens) + output


def prompt_tokens(call: ChatCall, item_tokens: Iterable[int]) -> int:
    """About how many tokens the prompt has: only PD workers have the tokenizer."""
    if isinstance(call.prompt, tuple):
        return len(call.prompt)
    characters = characters_of(call.messages) if call.prompt is None else len(call.prompt)
    return characters // CHARS_PER_TOKEN + sum(item_tokens)


def takes(max_model_len: int, tokens: int) -> bool:
    """Whether a worker with this limit (0: it names none) may take a request of at least `tokens`."""
    return max_model_len == 0 or tokens <= max_model_len


def too_long(call: ChatCall, tokens: int, longest: int) -> ContextTooLong:
    """The error of a request of at least `tokens` that no worker takes; `longest` is the largest limit."""
    max_tokens = call.sampling.max_tokens
    prompt = tokens - max(max_tokens or 1, 1)
    if max_tokens is not None and prompt < longest:
        return ContextTooLong(
            f"max_tokens is {max_tokens} and the prompt has at least {max(prompt, 1)} tokens, but the model "
            f"takes {longest} with the output: ask for fewer",
            param="max_tokens",
        )
    field = call.text_param
    return ContextTooLong(
        f"the prompt has at least {prompt} tokens, but the model takes {longest} with the output: "
        f"shorten {field}",
        param=field,
    )
