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
TOKENS = 150
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
    cluster.kill("encoder-0")
    # Its successor may be there before the next snapshot: that it has left stays visible among the failures.
    expect(page.get_by_label("Last failures")).to_contain_text(re.compile("|".join(map(re.escape, before))))
    expect(page.get_by_label("Encode", exact=True).locator(".size")).to_have_text("2 live")
    serving = encoders.filter(has=page.locator(".dot.good"))
    expect(serving).to_have_count(2)
    expect(serving.filter(has_text=re.compile("|".join(map(re.escape, before))))).to_have_count(1)
    names = set(serving.locator("strong").all_inner_texts())
    assert len(names & before) == 1, (names, before)
    expect(page.get_by_label("Last failures")).to_contain_text(next(iter(before - names)))


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
        expect(page.locator(".requests tbody tr")).not_to_have_count(0)
        wait_for("25 in flight", lambda: int(page.locator(".tile dd.big").first.inner_text()) >= 25)
        drawn = page.evaluate("counted.drawn")
        # The tab takes clicks meanwhile, and what is drawn goes on.
        page.get_by_role("link", name="Try").click()
        expect(page.get_by_label("Your question")).to_be_visible()
        page.get_by_role("link", name="Watch").click()
        wait_for("further drawings", lambda: page.evaluate("counted.drawn") >= drawn + 2)
        assert page.locator(".requests tbody tr").count() <= 64
        tokens = [stream.result(PATIENCE) for stream in streams]
    assert min(tokens) > 1
    counted = page.evaluate("counted")
    assert counted["frames"] > 0
    print(counted)
    expect(page.locator(".requests tbody tr")).to_have_count(0)
