"""docs/kubernetes.md names values, files, objects and commands that exist."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import click
import pytest

from support.kubernetes.chart import CHART, EXAMPLES, ROOT, render
from triptych.cli.app import app

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


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT)
    assert len(links) > 5
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_every_value_that_is_named_exists() -> None:
    blocks = "|".join(SCHEMA["properties"])
    named = set(re.findall(rf"`((?:{blocks})\.[\w.]+)", TEXT))
    assert len(named) > 20
    assert [name for name in sorted(named) if value(name) is None] == []


def test_every_example_has_its_row() -> None:
    rows = set(re.findall(r"^\| \[`([\w-]+)`\]", TEXT, re.MULTILINE))
    assert rows == {path.stem for path in EXAMPLES.glob("*.yaml")}


def test_every_object_that_is_named_is_rendered() -> None:
    found = {(one["kind"], one["metadata"]["name"]) for one in render(name="release")}
    rows = re.findall(r"^\| (Deployment|StatefulSet|Service|Secret) \| ([^|]+) \|", TEXT, re.MULTILINE)
    assert len(rows) >= 8
    for kind, names in rows:
        for name in re.findall(r"`([^`]+)`", names):
            if "colocated" not in name:
                assert (
                    kind,
                    name.replace("RELEASE", "release").replace("POOL", "default").replace("-N", "-0"),
                ) in found, name


@pytest.mark.parametrize("line", re.findall(r"^    (triptych .+?)(?: > \w.*)?$", TEXT, re.MULTILINE))
def test_every_command_of_ours_is_one(line: str) -> None:
    _, *words = shlex.split(line)
    group: click.Command = app
    while isinstance(group, click.Group):
        group = group.commands[words.pop(0)]
    group.make_context(group.name, words)


def test_the_make_target_exists() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"^    make (\w+)", TEXT, re.MULTILINE):
        assert target in targets
