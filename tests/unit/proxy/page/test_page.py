"""The page's files and its endpoint."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from triptych.proxy.page.endpoint import DOCS, INDEX, STATIC, STYLE, PageEndpoints, page_files

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
    text = FILES[name].data.decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text)
    addresses = re.findall(r'(?:href|src)="([^"]*)"', text)
    assert addresses and not [to for to in addresses if re.match(r"/|\w+:", to)]


@pytest.fixture
async def http() -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(Starlette(routes=PageEndpoints().routes()))
    async with httpx2.AsyncClient(transport=transport, base_url="http://proxy") as client:
        yield client


async def test_the_policy_allows_no_inline_script_no_other_origin_and_no_html_from_text(http):
    for path in ("/", "/docs", "/page/app.js"):
        policy = (await http.get(path)).headers["content-security-policy"]
        rules = dict(rule.partition(" ")[::2] for rule in policy.split("; "))
        assert rules["default-src"] == "'none'"
        assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
        assert rules["frame-ancestors"] == rules["base-uri"] == "'none'"
        assert rules["require-trusted-types-for"] == "'script'"
        assert "unsafe" not in policy and "http" not in policy


async def test_a_known_tag_gets_304_without_a_body(http):
    first = await http.get("/page/app.js")
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for wanted in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = await http.get("/page/app.js", headers={"if-none-match": wanted})
        assert (again.status_code, again.content) == (304, b""), wanted
        assert again.headers["etag"] == tag
    assert (await http.get("/page/app.js", headers={"if-none-match": '"other"'})).status_code == 200


async def test_the_page_works_below_a_path_prefix():
    app = Starlette(routes=[Mount("/some/prefix", routes=PageEndpoints().routes())])
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://proxy") as client:
        page = await client.get("/some/prefix/")
        assert 'src="page/app.js"' in page.text
        assert (await client.get("/some/prefix/page/app.js")).status_code == 200
