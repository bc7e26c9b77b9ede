"""The page against made-up data: hostile texts, states that are rare, streams that end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from support.page.made_up import HOSTILE, MadeUp
from support.page.server import page_server
from support.processes.cluster import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: The points of a line that is full, and the path of a value between two gaps.
CHART_PATHS = """
async () => {
  const { linePath } = await import("./page/chart.js");
  const pairs = linePath([0, 1, 1, 0.5], 1).match(/[\\d.]+ [\\d.]+/g);
  return [pairs.map((pair) => pair.split(" ").map(Number)), linePath([null, null, 0.5, null, null], 1)];
}
"""
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
        expect(page.get_by_label("Encode", exact=True).locator(".size")).to_have_text("2 live → 3 desired")
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


def test_a_chat_model_that_hears_gets_the_sound_as_a_part(page: Page):
    said = MadeUp(models=[{"id": "omni", "input_modalities": ["text", "image", "audio"]}])
    with page_server(said) as address:
        page.goto(address)
        wav = {"name": "clip.wav", "mimeType": "audio/wav", "buffer": b"RIFF"}
        page.locator("input[type=file]").set_input_files(files=[wav])
        expect(page.locator(".composer audio")).to_have_count(1)
        code = page.get_by_label("The request as code")
        expect(code).to_contain_text("v1/chat/completions")
        expect(code).to_contain_text("audio_url")


def test_a_worker_shows_its_busy_share_memory_and_gpu(page: Page):
    with page_server(MadeUp(tick=0.1)) as address:
        page.goto(f"{address}#watch")
        encoder = page.get_by_label("Encode", exact=True).locator(".worker").first
        expect(encoder.locator(".measure")).to_have_text(re.compile("^Busy 97 %$".replace(" ", r"\s*")))
        expect(encoder.locator(".meter.high")).to_have_count(1)
        expect(encoder).to_contain_text("372 MiB")
        decoder = page.get_by_label("Prefill · decode").locator(".worker").first
        expect(decoder.locator(".measure", has_text="GPU")).to_contain_text("71 %")
        expect(decoder).to_contain_text("16 GiB of 24 GiB")
        decoder.click()
        expect(page.get_by_role("dialog").locator(".facts")).to_contain_text("71 %")


def test_arrows_show_how_many_items_go_each_way(page: Page):
    with page_server(MadeUp(tick=0.1)) as address:
        page.goto(f"{address}#watch")
        for name, text in (("jobs", "5.1/s"), ("saves", "3.0 MiB/s"), ("loads", "2.0/s"), ("shm", "3.1/s")):
            expect(page.locator(f".flow-{name}[data-flows]")).to_contain_text(text)
        expect(page.locator(".flow-peer")).to_contain_text("0/s")
        expect(page.locator(".flow-peer[data-flows]")).to_have_count(0)


def test_finished_requests_are_listed_by_order_outcome_and_model_and_open_their_waterfall(page: Page):
    with page_server(MadeUp(tick=0.1)) as address:
        page.goto(f"{address}#watch")
        card = page.get_by_label("Finished requests", exact=True)
        rows = card.locator("tbody tr")
        expect(rows).to_have_count(12)
        # Ten tokens in 3.3 s, the first of them after 0.2.
        expect(rows.nth(2)).to_contain_text("10" + "3" + "200 ms" + "3.30 s")
        card.get_by_role("button", name="Slowest").click()
        expect(rows.first).to_contain_text("6.30 s")
        card.get_by_role("button", name="Failed").click()
        expect(rows).to_have_count(3)
        expect(rows.locator(".tag.bad")).to_have_text(["503", "503", "503"])
        card.get_by_role("button", name="Newest").click()
        card.get_by_label("Model of the finished requests").select_option("other")
        expect(rows).to_have_count(6)
        name = rows.first.locator("button.link").inner_text()
        rows.first.locator("button.link").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text(f"Request {name}")
        expect(dialog).to_contain_text("The spans cover")
        with page.expect_download() as saved:
            dialog.get_by_role("link", name="Save as JSON").click()
        assert saved.value.suggested_filename == f"request-{name}.json"
        assert json.loads(Path(saved.value.path()).read_text())["spans"]
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)


def test_the_waits_of_a_request_have_the_colour_of_what_they_wait_for(page: Page):
    with page_server(MadeUp()) as address:
        page.goto(address)
        page.locator(".example").first.click()
        lane = page.locator(".lane").first
        for stage in ("encode", "save", "load"):
            expect(lane.locator(f".stage-{stage}.awaits")).to_have_count(1)
        expect(page.get_by_label("Stages of the request")).to_contain_text("Wait 280 ms")
        expect(page.get_by_label("Stages of the items")).to_contain_text("Encode 250 ms")


def test_a_point_read_in_one_chart_is_read_in_all_over_the_span_that_was_chosen(page: Page):
    with page_server(MadeUp(tick=0.1)) as address:
        page.goto(f"{address}#watch")
        charts = page.locator(".charts .chart")
        expect(charts.first.locator(".axis")).to_contain_text("15 min ago")
        plot = charts.nth(2).locator(".plot")
        plot.hover(position={"x": 3, "y": 20})
        expect(page.locator(".charts .cursor[visibility=visible]")).to_have_count(charts.count())
        expect(charts.last.locator(".axis span").first).to_have_text(re.compile("^14 min"))
        for label, words in (("1 min", "1 min ago"), ("1 h", "1 h ago"), ("5 min", "5 min ago")):
            page.get_by_role("button", name=label, exact=True).click()
            page.mouse.move(0, 0)
            expect(charts.locator(".axis span", has_text=words)).to_have_count(charts.count())


def test_no_line_of_a_chart_is_cut_off_or_a_dot(page: Page):
    with page_server(MadeUp(tick=0.1)) as address:
        page.goto(f"{address}#watch")
        expect(page.locator(".worker").first).to_be_visible()
        drawn = page.evaluate(CHART_PATHS)
    whole, alone = drawn
    assert min(y for _, y in whole) >= 10 and max(y for _, y in whole) < 90, whole
    assert alone.count("M") == 1 and "h" in alone and abs(float(alone.partition("h")[2])) > 2


def test_reasoning_is_shown_apart_from_the_answer(page: Page):
    with page_server(MadeUp(reasoning="It is round.", answer="A circle.")) as address:
        page.goto(address)
        page.get_by_label("Your question").fill("What is it?")
        page.keyboard.press("Enter")
        expect(page.locator(".theirs[aria-busy=false] .text")).to_have_text("A circle. ")
        thought = page.locator(".theirs details.reasoning")
        expect(thought).not_to_have_attribute("open", "")
        thought.locator("summary").click()
        expect(thought.locator("p")).to_have_text("It is round. ")


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_the_form_has_its_buttons_at_the_right_end(page: Page, width: int):
    """Also of a speech model, whose form has more of them."""
    for models in ([{"id": "demo"}], [{"id": "whisper", "input_modalities": ["audio"]}]):
        with page_server(MadeUp(models=models)) as address:
            page.set_viewport_size({"width": width, "height": 800})
            page.goto(address)
            expect(page.locator("option").first).to_have_text(models[0]["id"])
            form, send = (
                page.locator(".composer").bounding_box(),
                page.locator(".composer .primary").bounding_box(),
            )
            new = page.get_by_role("button", name="New", exact=True).bounding_box()
            assert form and send and new
            assert abs(send["x"] + send["width"] - form["x"] - form["width"]) < 2
            assert abs(new["y"] - send["y"]) < 2


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_panels_do_not_move_when_numbers_grow(page: Page, width: int):
    said = MadeUp(tick=0.1, in_flight=0)
    with page_server(said) as address:
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(f"{address}#watch")
        charts = page.locator(".charts .card")
        expect(page.locator(".tile dd.big").first).to_have_text("0")
        before = [charts.nth(at).bounding_box() for at in range(charts.count())]
        said.in_flight = 90
        expect(page.locator(".tile dd.big").first).to_have_text("90")
        after = [charts.nth(at).bounding_box() for at in range(charts.count())]
        assert [box["height"] for box in after if box] == [box["height"] for box in before if box]
        assert len({box["height"] for box in after if box}) == 1


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_nothing_is_wider_than_the_window(page: Page, width: int):
    said = MadeUp(in_flight=50, encoder_state="lost")
    with page_server(said) as address:
        page.set_viewport_size({"width": width, "height": 800})
        page.goto(address)
        page.locator(".example").last.click()
        expect(page.locator("#time")).to_contain_text("The spans cover")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.goto(f"{address}#watch")
        expect(page.get_by_label("Requests in flight").locator("tbody tr")).to_have_count(50)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
