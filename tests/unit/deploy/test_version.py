"""One version: of code, both distributions, chart, images, API document and changelog."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from itertools import chain
from pathlib import Path

import yaml
from click.testing import CliRunner

from triptych import __version__
from triptych.apps.cli.app import app

ROOT = Path(__file__).parents[3]


def test_both_distributions_have_it_and_the_second_needs_the_first_of_the_same() -> None:
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in core["project"]["dynamic"]
    assert core["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "triptych.__version__"}
    bench = tomllib.loads((ROOT / "triptych_bench" / "pyproject.toml").read_text())["project"]
    assert bench["version"] == __version__
    assert f"triptych=={__version__}" in bench["dependencies"]


def test_the_chart_and_the_api_document_have_it_and_the_command_prints_it() -> None:
    about = yaml.safe_load((ROOT / "deploy" / "helm" / "triptych" / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == __version__
    document = json.loads((ROOT / "proxy" / "page" / "static" / "openapi.json").read_text())
    assert document["info"]["version"] == __version__
    assert CliRunner().invoke(app, ["--version"]).output.split()[-1] == __version__


def test_every_image_of_ours_that_a_file_or_page_names_with_a_tag_has_it() -> None:
    files = [
        file for file in (ROOT / "deploy").rglob("*") if file.suffix in (".yaml", ".md", ".sbatch", ".toml")
    ]
    found = {
        (str(file.relative_to(ROOT)), tag)
        for file in chain(files, (ROOT / "docs").glob("*.md"), [ROOT / "README.md"])
        for tag in re.findall(r"triptych-(?:proxy|worker-\w+|\$name):(\d[\w.]*)", file.read_text())
    }
    assert {"deploy/compose.yaml", "deploy/compose.vllm.yaml", "docs/quick-start.md"} <= {
        one for one, _ in found
    }
    assert {tag for _, tag in found} == {__version__}, found


def test_the_changelog_has_it_below_what_is_not_released() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert [one.split()[0] for one in headings[:2]] == ["Unreleased", __version__]


def test_the_version_is_no_older_than_the_newest_tag() -> None:
    listed = subprocess.run(
        ["git", "tag", "--list", "v*"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    tags = [tuple(map(int, re.findall(r"\d+", tag)[:3])) for tag in listed.stdout.split()]
    assert all(tag <= tuple(map(int, __version__.split("."))) for tag in tags), listed.stdout
