"""docs/compatibility.md and the changelog name the versions that the code has."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from triptych import __version__
from triptych.integrations.vllm.versions import SUPPORTED
from triptych.store.codec import LAYOUT_VERSION

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")


def test_the_page_names_the_versions_that_the_code_compares() -> None:
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "triptych" / "Chart.yaml").read_text())
    pythons = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert f"vLLM {' and '.join(SUPPORTED)} (" in PAGE
    assert f"(version {LAYOUT_VERSION}, `triptych/store/codec.py`)" in PAGE
    assert f"| {chart['kubeVersion'].removeprefix('>=').partition('.0-')[0]} and newer |" in PAGE
    assert f"| {pythons[0]} to {pythons[-1]} |" in PAGE
    assert f"| {__version__} |" in PAGE


def test_every_file_that_the_page_names_is_there() -> None:
    for name in re.findall(r"`(triptych/[\w/]+\.py)`", PAGE):
        assert (ROOT / name).is_file(), name


def test_the_changelog_has_a_heading_with_the_commit_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(
        rf"^## {re.escape(__version__)} \(\d{{4}}-\d\d-\d\d, commit [0-9a-f]{{8}}\)$", text, re.M
    )
