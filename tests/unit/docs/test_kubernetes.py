"""docs/kubernetes.md names values, files, objects and commands that exist."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import click
import pytest

from support.kubernetes.chart import CHART, ROOT
from triptych.apps.cli.app import app

TEXT = (ROOT / "docs" / "kubernetes.md").read_text()
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def value(path: str) -> dict[str, Any] | None:
    """The schema of a value by its dotted path; None where there is none."""
    schema = SCHEMA
    for name in path.split("."):
        if "$ref" in str(schema.get("allOf", "")):
            schema = SCHEMA["definitions"][schema["allOf"][0]["$ref"].rpartition("/")[2]]
        inner = schema.get("properties", {})
        if name not in inner:
            return None
        schema = inner[name]
    return schema


def test_every_value_that_is_named_exists() -> None:
    blocks = "|".join(SCHEMA["properties"])
    named = set(re.findall(rf"`((?:{blocks})\.[\w.]+)", TEXT))
    assert len(named) > 20
    assert [name for name in sorted(named) if value(name) is None] == []


@pytest.mark.parametrize("line", re.findall(r"^    (triptych .+?)(?: > \w.*)?$", TEXT, re.MULTILINE))
def test_every_command_of_ours_is_one(line: str) -> None:
    _, *words = shlex.split(line)
    group: click.Command = app
    while isinstance(group, click.Group):
        group = group.commands[words.pop(0)]
    group.make_context(group.name, words)
