"""docs/promises.md: every file of the product belongs to one promise, and each promise has its proof."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from tools import promises as tool

ROOT = Path(__file__).parents[3]
PROMISES = tool.promises()
REMEDY = "write it with: python tests/tools/promises.py"
NUMBER = re.compile(r"\| ([\d,]+) \| ([\d,]+) \|")


def test_every_file_of_the_product_belongs_to_a_promise() -> None:
    paths = {path: promise.name for promise in PROMISES for path in promise.files}
    lost = [name for name in tool.files(ROOT, *tool.PRODUCT) if tool.owner(name, paths) is None]
    assert lost == [], "name it, or its folder, in `files` of a promise in tests/tools/promises.toml"


@pytest.mark.parametrize("paths", ["files", "tests"])
def test_a_path_belongs_to_one_promise_and_leads_to_something(paths: str) -> None:
    named = Counter(path for promise in PROMISES for path in getattr(promise, paths))
    there = [*tool.files(ROOT, *tool.PRODUCT, "tests")]
    twice = [path for path, count in named.items() if count > 1]
    assert twice == [], "two promises name it: take it from one"
    gone = [path for path in named if not any(tool.leads_to(path, name) for name in there)]
    assert gone == [], "it is no more: take it out of tests/tools/promises.toml"


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.name)
def test_a_promise_has_a_test_that_proves_it(promise: tool.Promise) -> None:
    file, _, name = promise.proof.partition("::")
    assert (ROOT / file).is_file(), "name another `proof` in tests/tools/promises.toml"
    assert re.search(rf"^(?:async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), (
        f"{file} has no {name}: name another `proof` in tests/tools/promises.toml"
    )


def test_the_page_is_that_of_the_table() -> None:
    """Lines within a third, so that the page is written anew by who moves code and not by everybody."""
    page, now = tool.PAGE.read_text(encoding="utf-8"), tool.page()
    assert NUMBER.sub("| | |", page) == NUMBER.sub("| | |", now), REMEDY
    for told, true in zip(NUMBER.findall(page), NUMBER.findall(now), strict=True):
        for one, other in zip(told, true, strict=True):
            one, other = int(one.replace(",", "")), int(other.replace(",", ""))
            assert abs(one - other) <= max(300, max(one, other) / 3), REMEDY


def test_the_longest_path_owns_a_file() -> None:
    paths = {"proxy/*": "requests", "proxy/http/": "http", "proxy/http/hosts.py": "hosts"}
    assert tool.owner("proxy/dispatcher.py", paths) == "requests"
    assert tool.owner("proxy/http/peers.py", paths) == "http"
    assert tool.owner("proxy/http/hosts.py", paths) == "hosts"
    assert tool.owner("proxy/a_new_folder/file.py", paths) is None


def test_a_test_belongs_to_the_module_that_it_mirrors() -> None:
    def is_folder(name: str) -> bool:
        return name in ("proxy/http", "triptych/base/machine")

    assert tool.mirrored("tests/unit/proxy/http/test_hosts.py", is_folder) == "proxy/http/hosts.py"
    assert tool.mirrored("tests/unit/machine/test_pages.py", is_folder) == "triptych/base/machine/pages.py"
    assert tool.mirrored("tests/unit/test_log.py", is_folder) == "triptych/base/log.py"
    assert tool.mirrored("tests/support/waiting.py", is_folder) is None
