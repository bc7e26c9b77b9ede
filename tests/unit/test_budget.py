"""The size of every package stays within the table in CONTRIBUTING.md: who adds makes room."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = {".py", ".js", ".css", ".html", ".cpp", ".h", ".tpl", ".jinja"}
ROW = re.compile(r"^\| `(?P<package>[a-z_]+)/` \| (?P<lines>[\d,]+) \| (?P<files>[\d,]+) \|", re.MULTILINE)


def budgets() -> dict[str, tuple[int, int]]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return {
        row["package"]: (int(row["lines"].replace(",", "")), int(row["files"].replace(",", "")))
        for row in ROW.finditer(text)
    }


def sources(package: str) -> list[Path]:
    """Tracked source files, templates of the chart among them; generated stubs and links are left out."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", package], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    paths = [ROOT / name for name in listed if name]
    return [
        path
        for path in paths
        if (path.suffix in SOURCE or "templates" in path.parts)
        and "_pb2" not in path.name
        and path.is_file()
        and not path.is_symlink()
    ]


def test_every_package_has_a_budget() -> None:
    expected = {"proxy", "encoder_worker", "pd_worker", "ec_connector", "triptych", "deploy", "benchmarks"}
    assert set(budgets()) == expected | {"tests"}


@pytest.mark.parametrize("package", sorted(budgets()))
def test_a_package_is_within_its_budget_of_lines_and_files(package: str) -> None:
    lines, files = budgets()[package]
    paths = sources(package)
    count = sum(path.read_bytes().count(b"\n") for path in paths)
    assert count <= lines, f"{package}/ has {count} lines: make room, the table in CONTRIBUTING.md is fixed"
    assert len(paths) <= files, f"{package}/ has {len(paths)} files: make room"
