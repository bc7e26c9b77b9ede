"""Pages name what exists: versions, metrics, options and classes; links of the package's page.

TRIPTYCH_WRITE_METRICS=1 writes the table of metrics instead of comparing it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import yaml

from support.monitoring.metric_table import table
from triptych import __version__
from triptych.base.project import links, with_absolute_links
from triptych.base.vllm_classes import CLASSES
from triptych.integrations.vllm.options import _NAMES, SUPPORTED
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


URL = "https://example.org/triptych"


def test_the_package_pages_links_lead_to_files_of_the_project_and_pictures_to_their_bytes():
    page = with_absolute_links((ROOT / "README.md").read_text(encoding="utf-8"), URL)
    assert f"]({URL}/raw/main/docs/architecture.svg)" in page
    assert f"[API]({URL}/blob/main/docs/api.md)" in page
    assert "](docs/" not in page
    assert with_absolute_links("[a](#b) [c](https://d.e) [f](/g)", URL) == "[a](#b) [c](https://d.e) [f](/g)"


def test_without_an_address_links_stay_as_they_are_and_there_are_none_by_role():
    assert with_absolute_links("[a](docs/a.md)", "") == "[a](docs/a.md)"
    assert links("") == {}


def test_every_document_that_has_a_role_is_there():
    prefix = f"{URL}/blob/main/"
    assert all((ROOT / link.removeprefix(prefix)).is_file() for link in links(URL).values())


METRICS = Path(__file__).parents[3] / "docs" / "metrics.md"
BEGIN, END = "<!-- metrics: begin -->\n", "\n<!-- metrics: end -->"


def test_the_table_is_that_of_the_registries():
    text = METRICS.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    if os.environ.get("TRIPTYCH_WRITE_METRICS"):
        METRICS.write_text(text[:begin] + table() + text[end:])
        return
    assert text[begin:end] == table(), "write it with TRIPTYCH_WRITE_METRICS=1"


VLLM = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text(encoding="utf-8")


def test_every_option_is_on_the_page():
    assert [name for name in _NAMES if f"`{name}`" not in VLLM] == []


ITEMS = {"image": "pictures", "video": "videos", "audio": "sounds"}


def test_every_class_of_the_table_is_in_the_pages_with_what_it_can_do():
    rows = [line.split("|") for line in VLLM.splitlines() if "ForConditionalGeneration" in line]
    cells = {name: row for row in rows for name in CLASSES if name in row[1]}
    assert cells.keys() == CLASSES.keys()
    for name, known in CLASSES.items():
        assert cells[name][3].strip() == ("yes" if known.saved_by_vllm else "no")
        words = ", ".join(ITEMS[kind] for kind in known.modalities)
        divided = known.segments or "video" not in known.modalities
        assert cells[name][4].strip() == words + ("" if divided else " in one segment")
