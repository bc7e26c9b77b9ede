"""The page against made-up data: hostile texts, states that are rare, streams that end."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from support.page.made_up import HOSTILE, MadeUp
from support.page.server import page_server
from support.processes.cluster import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: Elements that only hostile HTML could have made.
INTRUDERS = "main script, main img[src=x], main b, main h1 script, dialog script, dialog img"


def test_hostile_texts_of_models_answers_and_errors_stay_texts(page: Page):
    said = MadeUp(
        models=[{"id": f"demo {HOSTILE}"}],
        answer=f"**bold** <b>bold</b> {HOSTILE} [link](javascript:alert(1))",
        text=HOSTILE,
        encoder_state="lost",
    )
    with page_server(said) as address:
        page.goto(address)
        page.get_by_label("Your question").fill(HOSTILE)
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".theirs[aria-busy=false] .text")).to_have_text(f"{said.answer} ")
        expect(page.locator(".mine .text")).to_have_text(HOSTILE)
        expect(page.locator(".spans tbody tr").first).to_contain_text("<script>")
        expect(page.locator("option").first).to_have_text(f"demo {HOSTILE}")
        assert page.locator(INTRUDERS).count() == 0
        page.get_by_role("link", name="Watch").click()
        expect(page.locator(".reason:visible")).to_contain_text("<script>")
        expect(page.get_by_label("Last failures")).to_contain_text("<script>")
        page.locator(".worker").first.click()
        expect(page.get_by_role("dialog")).to_contain_text("<script>")
        page.keyboard.press("Escape")
        said.events_status = 500
        expect(page.locator("#watch > .strip .notice")).to_contain_text("<script>")
        assert page.locator(INTRUDERS).count() == 0
        assert page.evaluate("window.attacked") is None


def test_a_stream_that_ends_comes_back_by_itself_and_says_so_meanwhile(page: Page):
    said = MadeUp(tick=0.1)
    with page_server(said) as address:
        page.goto(f"{address}#watch")
        expect(page.locator("#watch")).to_have_attribute("data-state", "live")
        said.events_status = 503
        expect(page.locator("#watch")).to_have_attribute("data-state", "waiting")
        expect(page.locator("#watch > .strip .notice")).to_contain_text("Next try in")
        # What was last known stays in sight.
        expect(page.locator(".worker").first).to_be_visible()
        connections = said.connections
        wait_for("further tries", lambda: said.connections >= connections + 2 or page.wait_for_timeout(100))
        said.events_status = 200
        expect(page.locator("#watch")).to_have_attribute("data-state", "live")
        expect(page.locator("#watch > .strip .notice")).to_be_hidden()


def test_lost_workers_and_a_store_that_is_down_are_shown_with_their_remedy(page: Page):
    said = MadeUp(tick=0.1, encoder_state="lost")
    with page_server(said) as address:
        page.goto(f"{address}#watch")
        lost = page.locator(".worker", has_text="Lost")
        expect(lost).to_contain_text("is the process alive?")
        expect(page.get_by_label("Encode", exact=True).locator(".size")).to_have_text("2 live → 3 wanted")
        expect(page.get_by_label("Store").locator(".state")).to_have_text("Up")
        said.store_up = False
        expect(page.get_by_label("Store").locator(".state")).to_contain_text("Down")
        said.encoder_state = "serving"
        expect(lost).to_have_count(0)
        expect(page.get_by_label("Encode", exact=True).locator(".size")).to_have_text("3 live")


def test_a_speech_model_gets_the_form_for_sound(page: Page):
    said = MadeUp(models=[{"id": "whisper", "input_modalities": ["audio"]}])
    with page_server(said) as address:
        page.goto(address)
        page.get_by_role("button", name="Transcribe").click()
        expect(page.get_by_role("alert")).to_contain_text("Add one sound file")
        page.get_by_role("button", name="Dial tones").click()
        expect(page.locator(".composer audio")).to_have_count(1)
        code = page.get_by_label("The request as code")
        expect(code).to_contain_text("v1/audio/transcriptions")
        expect(code).to_contain_text("-F file=@tones.wav")


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(page: Page, width: int):
    said = MadeUp(in_flight=50, encoder_state="lost")
    with page_server(said) as address:
        page.set_viewport_size({"width": width, "height": 800})
        page.goto(address)
        page.locator(".example").last.click()
        expect(page.locator("#time")).to_contain_text("The spans cover")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.goto(f"{address}#watch")
        expect(page.locator(".requests tbody tr")).to_have_count(50)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
