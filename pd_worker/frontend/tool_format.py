"""The format of a checkpoint's tool calls: found in its chat template, with its tokens and ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace
from tokenizers import Tokenizer

from triptych.base.errors import ConfigError
from triptych.base.request import Message, MessageToolCall
from triptych.pd_worker.frontend.reasoning import Reasoning


@dataclass(frozen=True, slots=True)
class _Format:
    """Patterns: what a template that teaches the format holds, and of added tokens.

    Those that are `marks` of calls stay in the output's text. Those `around` the answer are left out of it.
    """

    taught: str
    marks: str = ""
    around: str = ""


_PAIRS = r"</?(tool_calls?|tool_sep|arg_key|arg_value)(:.*)?>"
_TOOL_CALL = "</?tool_call>"
#: The more special ones first. The names are those of vLLM's parsers; proxies know the formats by them.
_FORMATS = {
    "gemma4": _Format(r"<\|tool_call>", r"<\|tool_call>|<tool_call\|>|<\|\"\|>"),
    "minimax_m3": _Format(r"\]<\]minimax\[>\[", r"\]<\]minimax\[>\[.*|</?(tool_call|invoke.*)>"),
    "minimax_m2": _Format("<minimax:tool_call>", "</?minimax:tool_call>"),
    "kimi_k2": _Format(r"<\|tool_calls_section_begin\|>", r"<\|tool_call.*\|>"),
    "step3": _Format("<steptml:|<\uff5ctool_calls_begin\uff5c>", "<\uff5ctool_.*\uff5c>"),
    "qwen3_coder": _Format("<function=", _TOOL_CALL),
    "hy_v3": _Format("<tool_sep", _PAIRS),
    "glm45": _Format("<arg_key>", _PAIRS),
    "nemotron_json": _Format("<TOOLCALL>", "</?TOOLCALL>"),
    "cohere_command3": _Format(
        r"<\|START_ACTION\|>", r"<\|(START|END)_ACTION\|>", r"<\|(START|END)_(RESPONSE|TEXT)\|>"
    ),
    "ernie45": _Format("(?s)<tool_call>.*<response>|<response>.*<tool_call>", _TOOL_CALL, "</?response>"),
    "hermes": _Format("<tool_call>", _TOOL_CALL),
    "hunyuan_a13b": _Format("<tool_calls>", "</?tool_calls>"),
    "mistral": _Format(r"\[TOOL_CALLS\]", r"\[(TOOL_CALLS|ARGS|CALL_ID)\]"),
    "pythonic": _Format(r"\[func_name1\("),
    "lfm2": _Format(r"<\|tool_(call|list)_start\|>|List of tools: \[", r"<\|tool_call_(start|end)\|>"),
    "llama3_json": _Format(r"<\|python_tag\|>|\"parameters\":", r"<\|python_tag\|>"),
}
#: vLLM's names of parsers that read the same.
_ALIASES = {
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "glm47": "glm45",
    "minimax": "hunyuan_a13b",
    "cohere_command4": "cohere_command3",
    "llama4_json": "llama3_json",
}


def find_tool_format(parser: str, template: str) -> str:
    """The format that `--tool-call-parser` names; "auto" by the template, empty where it teaches none.

    ConfigError for a name that does not exist.
    """
    if parser == "auto":
        matching = (name for name, known in _FORMATS.items() if re.search(known.taught, template))
        return next(matching, "")
    name = _ALIASES.get(parser, parser)
    if name not in _FORMATS:
        names = ", ".join((*_FORMATS, *_ALIASES))
        raise ConfigError(f"--tool-call-parser {parser!r} must be auto or one of {names}")
    return name


def output_markers(
    tool_format: str, reasoning: Reasoning | None, tokenizer: Tokenizer
) -> tuple[frozenset[int], frozenset[int]]:
    """Special tokens that stay in an output's text, and tokens that are left out of it.

    The ones mark the calls and the reasoning of a checkpoint, the others stand around its answers.
    """
    known = _FORMATS[tool_format] if tool_format else _Format("")
    marking = frozenset() if reasoning is None else reasoning.tokens
    kept, dropped = set[int](), set[int]()
    for token, added in tokenizer.get_added_tokens_decoder().items():
        if token in marking or re.fullmatch(known.marks, added.content):
            kept.update([token] if added.special else [])
        elif known.around and re.fullmatch(known.around, added.content):
            dropped.add(token)
    return frozenset(kept), frozenset(dropped)


def _kimi_id(call: MessageToolCall, number: int) -> str:
    return f"functions.{call.function.name}:{number}"


def _mistral_id(call: MessageToolCall, number: int) -> str:
    return call.id if re.fullmatch("[A-Za-z0-9]{9}", call.id) else f"{number:09}"


#: Ids that templates need: Kimi's writes the id in the name's place, Mistral's refuses other lengths.
_IDS: dict[str, Callable[[MessageToolCall, int], str]] = {"kimi_k2": _kimi_id, "mistral": _mistral_id}


def with_native_ids(tool_format: str, messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with the ids of calls, and of the answers to them, that the format's templates need."""
    if (make := _IDS.get(tool_format)) is None:
        return messages
    ids: dict[str, str] = {}
    shaped, number = list[Message](), 0
    for message in messages:
        calls = list[MessageToolCall]()
        for call in message.tool_calls or ():
            ids[call.id] = make(call, number)
            calls.append(replace(call, id=ids[call.id]))
            number += 1
        answered = message.tool_call_id
        shaped.append(
            replace(
                message,
                tool_calls=calls or message.tool_calls,
                tool_call_id=None if answered is None else ids.get(answered, answered),
            )
        )
    return shaped
