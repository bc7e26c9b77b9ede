"""The kubectl and helm commands of the docs name what the chart renders, and files that there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from support.kubernetes.chart import render

ROOT = Path(__file__).parents[3]
PAGES = ("operations.md", "kubernetes.md")
#: Kinds as kubectl's commands write them.
KINDS = {
    "deployment": "Deployment",
    "deploy": "Deployment",
    "statefulset": "StatefulSet",
    "service": "Service",
    "svc": "Service",
    "secret": "Secret",
    "job": "Job",
}


def commands(page: str) -> list[list[str]]:
    """The words of every kubectl and helm command in the page's blocks of code."""
    text = (ROOT / "docs" / page).read_text()
    fenced = re.findall(r"^```(?:sh|console|bash)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    indented = [line for line in text.splitlines() if line.startswith("    ")]
    lines = "\n".join([*fenced, *indented]).replace("\\\n", " ").splitlines()
    words = [
        shlex.split(line, comments=True) for line in lines if line.strip().startswith(("kubectl ", "helm "))
    ]
    return [found for found in words if found]


@pytest.mark.parametrize("page", PAGES)
def test_every_object_that_a_command_names_is_rendered(page: str) -> None:
    rendered = {(one["kind"], one["metadata"]["name"]) for one in render({})}
    named = [
        word for line in commands(page) for word in line if re.fullmatch(r"[a-z]+/triptych[a-z0-9-]*", word)
    ]
    for word in named:
        kind, _, name = word.partition("/")
        assert (KINDS[kind], name) in rendered, word


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_command_names_is_there(page: str) -> None:
    for line in commands(page):
        for word in line:
            if word.startswith("deploy/"):
                assert (ROOT / word).exists() or KINDS.get(word.split("/")[0]), word


def test_the_operations_page_has_such_commands() -> None:
    assert len(commands("operations.md")) >= 4
