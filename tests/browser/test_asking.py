"""The view Try against a cluster of real processes: answers, waterfalls, code, keys, prefixes."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from support.processes.cluster import PATIENCE, Cluster, running_cluster
from support.videos.clips import make_clip
from triptych.apps.launch.model_path import DEMO_MODEL
from triptych.demo import examples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _ask_example(page: Page, question: str) -> None:
    page.get_by_role("button", name=question, exact=True).first.click()
    expect(page.locator(".theirs[aria-busy=false]")).to_have_count(1)


def _ask(page: Page, question: str) -> None:
    page.get_by_label("Your question").fill(question)
    answers = page.locator(".theirs[aria-busy=false]").count()
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".theirs[aria-busy=false]")).to_have_count(answers + 1)


def _whole_record(page: Page) -> dict[str, Any]:
    """The last record that the page has got, of a request that has ended."""
    expect(page.locator("#time")).to_contain_text("The spans cover")
    address = page.evaluate(
        "performance.getEntriesByType('resource').map(entry => entry.name)"
        ".filter(name => name.includes('/cluster/requests/')).at(-1)"
    )
    with urllib.request.urlopen(address, timeout=PATIENCE) as reply:
        record: dict[str, Any] = json.loads(reply.read())
    return record


def test_a_demo_picture_gets_its_right_answer_and_a_waterfall_that_adds_up(cluster: Cluster, page: Page):
    page.goto(cluster.url)
    _ask_example(page, examples.EXAMPLE_QUESTION)
    expect(page.locator(".theirs .text")).to_have_text(examples.EXPECTED_ANSWER)
    record = _whole_record(page)
    stages = [span for span in record["spans"] if span["item"] is None]
    assert sum(span["end"] - span["start"] for span in stages) == pytest.approx(record["seconds"], abs=1e-3)
    expect(page.locator("#time")).to_contain_text("The spans cover 100 %")
    assert page.locator(".spans tbody tr").count() == len(record["spans"])
    shown = set(page.locator(".spans td.where").all_inner_texts())
    assert shown <= {"proxy", "store", "pd-0", "encoder-0", "encoder-1"}
    encoded = page.locator(".spans tbody tr", has_text=re.compile("^Encode 1"))
    assert encoded.locator("td.where").inner_text() in ("encoder-0", "encoder-1")
    # Each stage of the item has its time, and the request's row shows which of them it waits for.
    items = page.get_by_label("Stages of the items")
    for stage in ("Preprocess", "Encode", "Save", "Load"):
        expect(items.locator("li", has_text=re.compile(rf"^{stage} \S+ ms$"))).to_have_count(1)
    expect(page.locator(".lane").first.locator(".stage-encode.awaits")).not_to_have_count(0)
    # The same picture again: the hit is named, and no encoder has worked.
    page.get_by_role("button", name="New").click()
    _ask_example(page, "What is at the top left?")
    expect(page.locator(".theirs .text")).to_have_text("There is a red circle at the top left.")
    _whole_record(page)
    expect(page.locator(".spans .note.good").first).to_have_text(re.compile("store|cache"))
    expect(page.locator(".facts")).to_contain_text("1 of 1")


def test_both_examples_of_structure_work_on_the_demo(cluster: Cluster, page: Page):
    page.goto(cluster.url)
    _ask_example(page, examples.EXAMPLE_QUESTION)
    page.get_by_text("Tools and JSON schema").click()
    schema, tools = page.get_by_label("Answer's JSON schema"), page.get_by_label("Tools", exact=True)
    page.get_by_role("button", name="Example", exact=True).last.click()
    _ask(page, "How many shapes are there?")
    expect(page.locator(".theirs .text").last).to_have_text(re.compile(r'^\{"shapes":\d\}$'))
    schema.fill("")
    page.get_by_role("button", name="Example", exact=True).first.click()
    expect(tools).to_have_value(re.compile("report"))
    _ask(page, "How many shapes are there?")
    expect(page.locator(".theirs").last.locator("pre")).to_have_text(
        re.compile(r'^report\(\{"shapes":\d\}\)$')
    )
    expect(page.locator(".notice.bad")).to_have_count(0)


def test_a_file_of_ones_own_is_asked_about_and_the_conversation_goes_on(cluster: Cluster, page: Page):
    page.goto(cluster.url)
    page.locator("input[type=file]").set_input_files(str(examples.CROWDED_IMAGE))
    expect(page.locator(".composer .thumbs img")).to_have_attribute("alt", "four_shapes.png")
    page.get_by_text("Parameters").click()
    page.get_by_label("Seed").fill("7")
    with page.expect_request("**/v1/chat/completions") as first:
        _ask(page, "How many shapes are there?")
    assert first.value.post_data_json["seed"] == 7
    expect(page.locator(".theirs .text").last).to_have_text("There are four shapes.")
    with page.expect_request("**/v1/chat/completions") as second:
        _ask(page, "How many shapes are there?")
    roles = [message["role"] for message in second.value.post_data_json["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert second.value.post_data_json["messages"][1]["content"] == "There are four shapes."


def test_a_clip_that_is_dropped_is_sent_as_a_video(cluster: Cluster, page: Page):
    page.goto(cluster.url)
    # Of 35 s: three segments.
    content = base64.b64encode(make_clip(frames=70, rate=2)).decode()
    page.evaluate(
        """content => {
          const files = new DataTransfer();
          const bytes = Uint8Array.from(atob(content), letter => letter.charCodeAt(0));
          files.items.add(new File([bytes], "clip.mp4", { type: "video/mp4" }));
          const drop = new DragEvent("drop", { dataTransfer: files, bubbles: true });
          document.querySelector(".talk").dispatchEvent(drop);
        }""",
        content,
    )
    expect(page.locator(".composer .thumbs video")).to_have_attribute("aria-label", "clip.mp4")
    expect(page.get_by_label("The request as code")).to_contain_text("video_url")
    page.get_by_label("Your question").fill("What happens?")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send").click()
    part, text = sent.value.post_data_json["messages"][0]["content"]
    assert part == {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{content}"}}
    assert text["text"] == "What happens?"
    expect(page.locator(".theirs[aria-busy=false] .text")).not_to_be_empty()
    expect(page.locator(".theirs [role=alert]")).to_have_count(0)
    expect(page.locator("#time")).to_contain_text("The spans cover")
    lanes = page.locator(".lane-name").all_inner_texts()
    assert lanes == [
        "Request",
        *(f"Video 1, segment {each} s)" for each in ("1 (0–15", "2 (15–30", "3 (30–35")),
    ]
    expect(page.locator(".spans")).to_contain_text("Encode video 1, segment 2 (15–30 s)")


def test_what_is_not_a_picture_and_what_is_no_json_are_refused_in_words(cluster, page, tmp_path):
    page.goto(cluster.url)
    wrong = tmp_path / "notes.txt"
    wrong.write_text("hello")
    page.locator("input[type=file]").set_input_files(str(wrong))
    expect(page.get_by_role("alert")).to_have_text("notes.txt is no picture, video or sound.")
    page.get_by_text("Tools and JSON schema").click()
    box = page.get_by_label("Answer's JSON schema")
    box.fill("{")
    expect(box).to_have_attribute("aria-invalid", "true")
    page.get_by_label("Your question").fill("Hello")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_contain_text("this is no JSON yet")
    box.fill("")
    page.get_by_text("Parameters").click()
    page.get_by_label("Temperature").fill("-1")
    page.get_by_role("button", name="Send").click()
    # The server's own words, beside the question, which comes back to be changed.
    expect(page.locator(".theirs [role=alert]")).to_contain_text("temperature")
    expect(page.get_by_label("Your question")).to_have_value("Hello")


def test_the_lines_of_code_give_the_same_answer(cluster: Cluster, page: Page, tmp_path: Path):
    page.goto(cluster.url)
    _ask_example(page, examples.EXAMPLE_QUESTION)
    (tmp_path / "two_shapes.png").write_bytes(examples.EXAMPLE_IMAGE.read_bytes())
    code = page.get_by_label("The request as code")
    expect(code).to_contain_text("curl")
    shell = code.inner_text()
    environment = {"API_KEY": "none", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", shell],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    events = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    assert text == examples.EXPECTED_ANSWER
    page.get_by_role("button", name="Python").click()
    program = code.inner_text()
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stdout == examples.EXPECTED_ANSWER


def test_where_keys_are_in_use_the_page_asks_for_one_and_works_with_it(tmp_path: Path, page: Page):
    key = "sk-browser-0123456789"
    with running_cluster(DEMO_MODEL, tmp_path, "--threads", "1", "--api-key", key) as guarded:
        page.goto(f"{guarded.url}/#watch")
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("no API key was given")
        expect(page.locator("#watch")).to_have_attribute("data-state", "key")
        dialog.get_by_label("Key").fill("sk-wrong-0123456789")
        dialog.get_by_role("button", name="Use it").click()
        expect(dialog).to_contain_text("not valid here")
        dialog.get_by_label("Key").fill(key)
        dialog.get_by_role("button", name="Use it").click()
        expect(page.locator("#watch")).to_have_attribute("data-state", "live")
        page.get_by_role("link", name="Try").click()
        _ask_example(page, examples.EXAMPLE_QUESTION)
        expect(page.locator(".theirs .text")).to_have_text(examples.EXPECTED_ANSWER)
        expect(page.locator("#time")).to_contain_text("The spans cover 100 %")
        # The key is in this tab alone, and in no line of code.
        assert key not in page.get_by_label("The request as code").inner_text()
        assert page.evaluate("JSON.stringify(localStorage)").find(key) == -1
        page.get_by_role("link", name="Watch").click()
        page.get_by_label("Finished requests").locator("button.link").first.click()
        record = page.get_by_role("dialog")
        expect(record).to_contain_text(f"Asked on this page: {examples.EXAMPLE_QUESTION}")
        # The server has no prompt to show: another tab, also one with this key, sees none.
        other = page.context.new_page()
        other.goto(guarded.url)
        expect(other.get_by_role("dialog")).to_contain_text("no API key was given")
        other.get_by_role("dialog").get_by_label("Key").fill(key)
        other.get_by_role("dialog").get_by_role("button", name="Use it").click()
        other.get_by_role("link", name="Watch").click()
        row = other.get_by_label("Finished requests").locator("tbody tr").first
        expect(row).to_contain_text("1 (16 tokens)")
        row.locator("button.link").click()
        expect(other.get_by_role("dialog")).to_contain_text("of media")
        expect(other.get_by_role("dialog")).not_to_contain_text("Asked on this page")
        other.close()


def test_an_example_of_the_description_names_a_served_model_and_streams(cluster: Cluster, page: Page):
    page.goto(f"{cluster.url}/docs")
    example = page.locator('#v1-chat-completions .example[data-name="stream"]')
    expect(example.locator("textarea")).to_have_value(re.compile('"model": "demo"'))
    example.get_by_role("button", name="Run").click()
    expect(example.locator(".output")).to_contain_text("data: [DONE]")
    expect(page.locator("#v1-audio-transcriptions pre").first).to_contain_text("-F model=demo")
