"""The view Watch against a cluster of real processes: a worker that dies, and 50 streams at once."""

from __future__ import annotations

import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from playwright.sync_api import Page, expect

from support.processes.cluster import PATIENCE, Cluster, wait_for
from triptych.demo import examples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STREAMS = 50
TOKENS = 400
#: Counts frames, long tasks and snapshots that were drawn.
COUNTING = """
() => {
  window.counted = {frames: 0, longest: 0, drawn: 0};
  const frame = () => { window.counted.frames += 1; requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
  new PerformanceObserver((list) => {
    for (const task of list.getEntries()) {
      window.counted.longest = Math.max(window.counted.longest, task.duration);
    }
  }).observe({type: "longtask"});
  new MutationObserver(() => { window.counted.drawn += 1; })
    .observe(document.getElementById("watch"), {attributes: true, attributeFilter: ["data-time"]});
}
"""


def test_an_encoder_that_is_killed_is_seen_to_leave_and_its_successor_to_come(cluster: Cluster, page: Page):
    before = {worker.address for worker in cluster.workers() if worker.pool == "encoder"}
    page.goto(f"{cluster.url}/#watch")
    encoders = page.get_by_label("Encode", exact=True).locator(".worker")
    expect(encoders).to_have_count(2)
    expect(encoders.locator("strong").filter(has_text=re.compile("^encoder-[01]$"))).to_have_count(2)
    cluster.kill("encoder-0")
    # Its successor may be there before the next snapshot: that it has left stays visible among the failures.
    expect(page.get_by_label("Last failures")).to_contain_text("encoder worker encoder-0 is lost")
    serving = encoders.filter(has=page.locator(".dot.good"))
    # The address is in the tip: the one that was not killed still has its own.
    left = page.locator(",".join(f"[title^='{address} ']" for address in before))
    expect(serving.and_(left)).to_have_count(1)
    expect(serving).to_have_count(2)
    expect(page.get_by_label("Encode", exact=True).locator(".size")).to_have_text("2 live")
    expect(serving.locator("strong").filter(has_text=re.compile("^encoder-[01]$"))).to_have_count(2)


def _stream(cluster: Cluster, index: int) -> int:
    """Tokens of one long streamed answer about a picture."""
    body = json.loads(examples.EXAMPLE_REQUEST.read_text())
    body |= {"stream": True, "max_tokens": TOKENS, "ignore_eos": True, "seed": index}
    request = urllib.request.Request(
        f"{cluster.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        return sum(line.startswith(b"data: {") for line in reply)


def test_fifty_streams_at_once_leave_the_page_alive(cluster: Cluster, page: Page):
    page.goto(f"{cluster.url}/#watch")
    expect(page.locator("#watch")).to_have_attribute("data-state", "live")
    page.evaluate(COUNTING)
    with ThreadPoolExecutor(STREAMS) as threads:
        streams = [threads.submit(_stream, cluster, index) for index in range(STREAMS)]
        in_flight = page.get_by_label("Requests in flight").locator("tbody tr")
        expect(in_flight).not_to_have_count(0)
        wait_for("25 in flight", lambda: int(page.locator(".tile dd.big").first.inner_text()) >= 25)
        # A saturated worker looks saturated, and the arrows that lead to it flow.
        busy = page.get_by_label("Prefill · decode").locator(".worker .value").first
        wait_for("a busy PD worker", lambda: int(busy.inner_text().split()[0]) >= 80)
        expect(page.locator(".flow-requests[data-flows]")).to_have_count(1)
        drawn = page.evaluate("counted.drawn")
        # The tab takes clicks meanwhile, and what is drawn goes on.
        page.get_by_role("link", name="Try").click()
        expect(page.get_by_label("Your question")).to_be_visible()
        page.get_by_role("link", name="Watch").click()
        wait_for("further drawings", lambda: page.evaluate("counted.drawn") >= drawn + 2)
        assert in_flight.count() <= 64
        tokens = [stream.result(PATIENCE) for stream in streams]
    assert min(tokens) > 1
    counted = page.evaluate("counted")
    assert counted["frames"] > 0
    print(counted)
    expect(page.get_by_label("Requests in flight").locator("tbody tr")).to_have_count(0)
    # Those that have ended are listed, and each opens its waterfall.
    finished = page.get_by_label("Finished requests")
    finished.get_by_role("button", name="Slowest").click()
    expect(finished.locator("tbody tr")).to_have_count(50)
    finished.locator("button.link").first.click()
    expect(page.get_by_role("dialog")).to_contain_text("The spans cover 100 %")
