"""Every view of the page by axe-core, in light and dark colours, on a screen and on a telephone."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from support.page.made_up import MadeUp
from support.page.server import page_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _violations(page: Page) -> list[str]:
    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']} ({each['impact']}): {node['html'][:160]}" for each in found for node in each["nodes"]
    ]


def _asked(page: Page, address: str) -> None:
    page.goto(f"{address}#try")
    page.get_by_label("Your question").fill("What is it?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".theirs[aria-busy=false] .text")).to_have_text("A red circle. ")


def _watched(page: Page, address: str) -> None:
    page.goto(f"{address}#watch")
    expect(page.locator("#watch")).to_have_attribute("data-state", "live")
    expect(page.get_by_label("Finished requests", exact=True).locator("tbody tr").first).to_be_visible()


def _worker(page: Page, address: str) -> None:
    _watched(page, address)
    page.locator(".worker").first.click()
    expect(page.get_by_role("dialog")).to_be_visible()


def _record(page: Page, address: str) -> None:
    _watched(page, address)
    page.get_by_label("Finished requests", exact=True).locator("tbody tr .link").first.click()
    expect(page.get_by_role("dialog")).to_be_visible()


def _read(page: Page, address: str) -> None:
    page.goto(f"{address}docs")
    expect(page.locator("pre.code:visible").first).to_be_visible()


VIEWS = (_asked, _watched, _worker, _record, _read)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__[1:])
def test_axe_finds_nothing(browser: Browser, view, colours: str, width: int):
    with page_server(MadeUp(encoder_state="lost", reasoning="I look at it.", items=3)) as address:
        context = browser.new_context(viewport={"width": width, "height": 820}, color_scheme=colours)
        page = context.new_page()
        view(page, address)
        assert _violations(page) == []
        context.close()
