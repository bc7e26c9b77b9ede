from __future__ import annotations

import re

import pytest

from triptych.proxy.page.endpoint import DOCS, INDEX, STATIC, STYLE, page_files

FILES = page_files()
SCRIPTS = sorted(name for name in FILES if name.endswith(".js"))


def test_every_file_of_the_folder_is_served_under_its_name():
    assert {path.name for path in STATIC.iterdir()} <= set(FILES)
    assert {INDEX, DOCS, STYLE, "app.js"} <= set(FILES)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_imports_only_files_that_are_served(name):
    wanted = re.findall(r'from "\./([^"]+)"', FILES[name].data.decode())
    assert set(wanted) <= set(FILES)
    assert not re.findall(r"(?:import|from) ['\"](?!\./)", FILES[name].data.decode())


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_makes_no_html_of_text_and_asks_no_other_host(name):
    text = FILES[name].data.decode()
    for forbidden in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
    ):
        assert forbidden not in text, forbidden
    assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}


@pytest.mark.parametrize("name", [INDEX, DOCS])
def test_a_document_has_no_inline_script_or_style_and_only_relative_addresses(name):
    text = FILES[name].data.decode().replace('<script type="application/json" id="openapi">', "")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text)
    addresses = re.findall(r'(?:href|src)="([^"]*)"', text)
    assert addresses and not [to for to in addresses if re.match(r"/|\w+:", to)]
