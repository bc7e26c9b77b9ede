"""Calls as the families' own chat templates write them, which their parsers read back."""

from __future__ import annotations

import json

import pytest

from support.tool_calls import joined
from triptych.pd_worker.frontend.chat_template import ChatTemplate
from triptych.pd_worker.frontend.prompt import find_tool_format
from triptych.proxy.call.tool_formats import FORMATS, make_parser
from triptych.proxy.call.tools import CallForm

#: How each family's template writes one call, of `f.name` and `f.arguments`; and what stands between calls.
SHAPES = {
    "hermes": (
        '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>',
        "\n",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
        "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
        "\n",
    ),
    "glm45": (
        "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>",
        "\n",
    ),
    "mistral": ("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}", ""),
    "gemma4": (
        '{%- macro value(v) -%}{%- if v is string -%}<|"|>{{ v }}<|"|>{%- elif v is mapping -%}'
        "{ {%- for k, w in v.items() -%}{{ k }}:{{ value(w) }}{{ ',' if not loop.last }}{%- endfor -%} }"
        "{%- elif v is sequence -%}[{%- for w in v -%}{{ value(w) }}{{ ',' if not loop.last }}{%- endfor -%}]"
        "{%- else -%}{{ v | tojson }}{%- endif -%}{%- endmacro -%}"
        "<|tool_call>call:{{ f.name }}{{ value(f.arguments) }}<tool_call|>",
        "",
    ),
    "llama3_json": ('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', "; "),
}
ARGUMENTS = [
    {},
    {"town": "Zürich"},
    {"code": "a\nb <tag> \"q\" 'p' \\n {x} [y]", "count": 3, "exact": -1.5e-3},
    {"deep": {"list": [1, "two", None, True, {"k": []}], "s": ""}, "flag": False},
    {"text": "line\r\n\ttab 你好 👩‍👩‍👧 </", "none": None},
]
SCHEMAS = {
    "look": {"properties": {name: {"type": "string"} for name in ("town", "code", "text")}, "type": "object"}
}


def written(name: str, calls: list[dict[str, object]]) -> str:
    if name == "pythonic":
        # Its templates show the form in words alone.
        texts = [f"look({', '.join(f'{k}={v!r}' for k, v in call.items())})" for call in calls]
        return f"[{', '.join(texts)}]"
    shape, between = SHAPES[name]
    template = ChatTemplate("{% set f = messages[0].tool_calls[0].function %}" + shape)
    return between.join(
        template.render(
            [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "look", "arguments": call}}],
                }
            ]
        )
        for call in calls
    )


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_familys_template_writes_its_parser_reads(name):
    for calls in ([arguments] for arguments in ARGUMENTS):
        check(name, calls)
    check(name, ARGUMENTS)


def check(name: str, calls: list[dict[str, object]]) -> None:
    text = written(name, calls)
    for size in (1, 3, len(text)):
        parser = make_parser(CallForm.TAGGED, parallel=True, tool_format=name, schemas=SCHEMAS)
        pieces = [piece for at in range(0, len(text), size) for piece in parser.feed(text[at : at + size])]
        parts = joined([*pieces, *parser.finish()])
        assert [(part[0], json.loads(part[1])) for part in parts] == [("look", call) for call in calls], text


@pytest.mark.parametrize("name", SHAPES)
def test_a_template_of_that_shape_names_its_format(name):
    assert find_tool_format("auto", "{% for m in messages %}{% endfor %}" + SHAPES[name][0]) == name
