"""The form of an output that may call tools by itself: free text, and calls that fit their schemas.

Hermes' calls alone are JSON behind a marker that no other text has. A function without `strict` may have any
arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from triptych.base.types import OutputFormat

#: The kind of such a form; its text is the JSON of schemas by function, None where any arguments do.
CALLS = "calls"
_FORMAT, _MARKERS, _ARGUMENTS = "hermes", ("<tool_call>", "</tool_call>"), ', "arguments": '
#: As models are taught to write JSON: with a blank or without.
_OPTIONS = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}


def strict_calls(tools: Sequence[Mapping[str, Any]], tool_format: str) -> OutputFormat | None:
    """None where no function asks for it, or the model writes calls in another format."""
    functions = [tool["function"] for tool in tools]
    if tool_format != _FORMAT or not any(function.get("strict") is True for function in functions):
        return None
    schemas = {
        function["name"]: (function.get("parameters") or {"type": "object", "properties": {}})
        if function.get("strict") is True
        else None
        for function in functions
    }
    return OutputFormat(CALLS, json.dumps(schemas, ensure_ascii=False), param="tools")


def call_grammar(schemas: Mapping[str, Mapping[str, Any] | None], tokenizer: Tokenizer) -> str:
    """llguidance's grammar (Lark) of these functions, the markers as tokens where the tokenizer has them."""
    arguments = [
        f"{json.dumps(json.dumps(name) + _ARGUMENTS)} %json "
        + json.dumps({**(schema or {"type": "object"}), "x-guidance": _OPTIONS})
        for name, schema in schemas.items()
    ]
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    begin, end = (marker if marker in added else json.dumps(marker) for marker in _MARKERS)
    opened, text = f"opened[lazy]: TEXT {begin}", r"/(.|\n)*/"
    if begin in added:
        # The parser matches such a token as one, and the marker in letters would be text.
        opened, text = f"opened: TEXT {begin}", rf"{text} & ~/(.|\n)*{begin}(.|\n)*/"
    name, close = json.dumps('\n{"name": '), json.dumps("}\n")
    return "\n".join(
        (
            "%llguidance {}",
            "start: call* TEXT",
            f"TEXT: {text}",
            opened,
            f"call: opened {name} ( {' | '.join(arguments)} ) {close} {end}",
        )
    )
