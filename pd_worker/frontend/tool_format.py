"""The format in which a model writes tool calls, found in its chat template."""

from __future__ import annotations

import re

from tokenizers import Tokenizer

from triptych.base.errors import ConfigError

#: What a template that teaches a format holds, the more special ones first, and the tokens that mark calls.
#: The names are those of vLLM's parsers, and those by which proxies know the formats.
_FORMATS = {
    "gemma4": (r"<\|tool_call>", ("<|tool_call>", "<tool_call|>", '<|"|>')),
    "qwen3_coder": ("<function=", ("<tool_call>", "</tool_call>")),
    "glm45": (
        "<arg_key>",
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "hermes": ("<tool_call>", ("<tool_call>", "</tool_call>")),
    "mistral": (r"\[TOOL_CALLS\]", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "pythonic": (r"\[func_name1\(", ()),
    "llama3_json": (r"<\|python_tag\|>|\"parameters\":", ("<|python_tag|>",)),
}


def find_tool_format(parser: str, template: str) -> str:
    """The format that `--tool-call-parser` names; "auto" by the template, empty where it teaches none.

    ConfigError for a name that does not exist.
    """
    if parser == "auto":
        matching = (name for name, (taught, _) in _FORMATS.items() if re.search(taught, template))
        return next(matching, "")
    if parser not in _FORMATS:
        raise ConfigError(f"--tool-call-parser {parser!r} must be auto or one of {', '.join(_FORMATS)}")
    return parser


def marker_tokens(tool_format: str, tokenizer: Tokenizer) -> frozenset[int]:
    """The ids of a format's markers."""
    markers = _FORMATS[tool_format][1] if tool_format else ()
    tokens = (tokenizer.token_to_id(marker) for marker in markers)
    return frozenset(token for token in tokens if token is not None)
