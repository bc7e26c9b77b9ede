"""The page when things are unlucky: crowds of workers, clocks that differ, slow lines, a proxy that dies."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from support.page.made_up import MadeUp
from support.page.server import make_page_app, page_server
from support.page.serving import serving
from support.processes.cluster import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: Right-to-left override, a zero-width space, an emoji of several code points, quotes and HTML's own signs.
ODD_NAME = "x\u202eabc\u200b \U0001f469\u200d\U0001f680 \"quoted\" 'single' &amp; <i>&lt;"
NOTICE = "#watch > .strip .notice"


def live(page: Page, address: str) -> None:
    page.goto(f"{address}#watch")
    expect(page.locator("#watch")).to_have_attribute("data-state", "live")


def test_a_cluster_without_workers_says_what_to_start(page: Page):
    with page_server(MadeUp(encoders=0, pd_workers=0, in_flight=0, models=[])) as address:
        live(page, address)
        expect(page.get_by_label("Encode", exact=True)).to_contain_text("No encoder is registered")
        expect(page.get_by_label("Prefill · decode")).to_contain_text("No PD worker is registered")
        expect(page.get_by_label("Requests in flight")).to_contain_text("No request is in flight.")
        page.get_by_role("link", name="Try").click()
        expect(page.get_by_role("alert")).to_contain_text("No model is served yet")


@pytest.mark.parametrize("width", [360, 1280])
def test_two_hundred_workers_are_listed_and_fit(page: Page, width: int):
    said = MadeUp(tick=0.2, encoders=200, pd_workers=200, encoder_state="stalled")
    with page_server(said) as address:
        page.set_viewport_size({"width": width, "height": 740})
        live(page, address)
        encoders = page.get_by_label("Encode", exact=True).locator(".worker")
        expect(encoders).to_have_count(200)
        expect(page.get_by_label("Prefill · decode").locator(".worker")).to_have_count(200)
        expect(encoders.nth(1)).to_contain_text("Stalled")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        # The lists scroll in themselves: nothing of them makes the page longer than what is in sight.
        end = "document.querySelector('main').getBoundingClientRect().bottom + scrollY"
        assert page.evaluate("document.documentElement.scrollHeight") <= page.evaluate(end) + 1
        # Scaled down: what has left is gone, and what stays is the same element, so that focus is kept.
        encoders.nth(2).focus()
        said.encoders = 3
        expect(encoders).to_have_count(3)
        expect(encoders.nth(2)).to_be_focused()


def test_odd_names_are_shown_as_they_are_and_turn_nothing_around(page: Page):
    with page_server(MadeUp(models=[{"id": ODD_NAME}], text=ODD_NAME)) as address:
        page.goto(address)
        expect(page.locator("option").first).to_have_text(ODD_NAME)
        page.get_by_label("Your question").fill("Hello")
        page.keyboard.press("Enter")
        assert page.locator(".theirs .who").text_content() == ODD_NAME
        expect(page.get_by_label("The request as code")).to_contain_text("curl")
        page.get_by_role("link", name="Watch").click()
        name = page.locator(".worker strong").first
        expect(name).to_be_attached()
        assert name.text_content() == f"10.0.0.7:50051{ODD_NAME}"
        # A right-to-left override ends with its own element.
        assert name.evaluate("node => getComputedStyle(node).unicodeBidi") == "isolate"
        assert page.locator("main i").count() == 0


def test_a_proxy_that_dies_and_comes_back_is_found_again(page: Page):
    said, port = MadeUp(tick=0.1), free_port()
    address = f"http://127.0.0.1:{port}/"
    with serving(make_page_app(said), port):
        live(page, address)
        said.events_status = 503
    expect(page.locator(NOTICE)).to_contain_text("The server cannot be reached")
    expect(page.locator(".worker").first).to_be_visible()
    page.get_by_role("link", name="Try").click()
    page.get_by_label("Your question").fill("Are you there?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached")
    expect(page.get_by_label("Your question")).to_have_value("Are you there?")
    page.get_by_role("link", name="Watch").click()
    said.events_status, said.version = 200, "1.0"
    with serving(make_page_app(said), port):
        expect(page.locator("#watch")).to_have_attribute("data-state", "live")
        # It is another version now: the tab still runs the scripts of the one before.
        expect(page.get_by_role("button", name="This page is of another version")).to_be_visible()
        said.events_status = 503


def test_everything_is_reached_by_keyboard(page: Page):
    with page_server(MadeUp()) as address:
        page.goto(address)
        expect(page.locator(".example").first).to_be_visible()
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        reached = set()
        for _ in range(60):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.textContent.trim().slice(0, 20)"))
        assert {"Try", "Watch", "API", "API key", "Add files", "New", "Send", "Python"} <= reached
        page.get_by_label("Your question").focus()
        page.keyboard.type("Hello")
        page.keyboard.press("Enter")
        expect(page.locator(".theirs[aria-busy=false]")).to_have_count(1)
        expect(page.get_by_label("Your question")).to_be_focused()
        page.get_by_role("link", name="Watch").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#watch")).to_have_attribute("data-state", "live")
