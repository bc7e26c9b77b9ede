"""The format of tool calls, found in the chat templates of the families."""

from __future__ import annotations

import pytest

from triptych.base.errors import ConfigError
from triptych.pd_worker.frontend.tool_format import find_tool_format
from triptych.proxy.call.tool_formats import FORMATS

TAUGHT = {
    "hermes": "return a json object within <tool_call></tool_call> XML tags",
    "qwen3_coder": "<tool_call>\\n<function=example_function_name>\\n<parameter=a>",
    "glm45": "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>",
    "mistral": "{{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' }}",
    "llama3_json": """{{- '{"name": "' + tool_call.name + '", "parameters": ' }}""",
    "pythonic": "[func_name1(params_name1=params_value1)]",
    "gemma4": "{{ '<|tool_call>call:' + function['name'] }}",
}


@pytest.mark.parametrize(("name", "template"), TAUGHT.items())
def test_a_template_teaches_its_format(name, template):
    assert find_tool_format("auto", template) == name
    assert find_tool_format(name, "") == name
    assert name in FORMATS, "the proxy knows it by the same name"


def test_a_template_without_tools_teaches_none():
    assert find_tool_format("auto", "{{ messages }}") == ""


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="hermes"):
        find_tool_format("xml", "")
