"""What a request's tools let a forced call say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from triptych.proxy.call.tools import FunctionChoice, FunctionName, tool_use

ANY = {"type": "object"}


def arguments(**function: Any) -> Any:
    """The schema of a forced call's arguments."""
    tool = {"type": "function", "function": {"name": "look", **function}}
    used = tool_use([tool], FunctionChoice(FunctionName("look")), None)
    assert used.forced is not None
    return json.loads(used.forced.text)["$defs"]["tool0"]


@pytest.mark.parametrize("parameters", [None, {}, ANY, {"type": "object", "description": "none"}])
def test_a_function_that_names_no_parameters_takes_none(parameters: dict[str, Any] | None) -> None:
    given = {} if parameters is None else {"parameters": parameters}
    assert arguments(**given)["properties"] == {}
    assert "properties" not in arguments(**given, strict=False)


def test_what_a_function_says_of_its_parameters_stays() -> None:
    for parameters in ({**ANY, "additionalProperties": True}, {"$ref": "#/$defs/a", "$defs": {"a": ANY}}):
        assert arguments(parameters=parameters).keys() == parameters.keys()
