"""Pages that point to tests point to tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::([\w:]+))?`")


def functions(node: ast.Module | ast.ClassDef, prefix: str = "") -> set[str]:
    """Names of the functions, those of classes as pytest spells them: `Class::function`."""
    found = set()
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(prefix + child.name)
        elif isinstance(child, ast.ClassDef):
            found |= functions(child, f"{prefix}{child.name}::")
    return found


@pytest.mark.parametrize(
    "page",
    [
        "conformance/encoder-decoder.md",
        "conformance/graphs-and-ranks.md",
        "conformance/known-bugs.md",
        "security.md",
    ],
)
def test_every_test_named_on_the_page_exists(page: str) -> None:
    named = NAMED.findall((ROOT / "docs" / page).read_text())
    assert named
    gone = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).is_file()
        or (name and name not in functions(ast.parse((ROOT / path).read_text())))
    ]
    assert not gone


def test_every_number_of_the_known_bugs_has_a_row_that_names_a_test_or_a_reason() -> None:
    rows = re.findall(
        r"^\| (\d+) \| (.+) \| (.+) \|$", (ROOT / "docs/conformance/known-bugs.md").read_text(), re.MULTILINE
    )
    assert [int(number) for number, _, _ in rows] == list(range(1, 68))
    assert all(len(fault) > 10 and len(answer) > 20 for _, fault, answer in rows)
