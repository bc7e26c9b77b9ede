"""A real browser, Debian's chromium, and a cluster of real processes to look at with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from support.processes.cluster import PATIENCE, Cluster, running_cluster
from support.tools import tool
from triptych.apps.launch.model_path import DEMO_MODEL

#: For things that a page does by itself, in milliseconds; the machine may be busy.
PATIENCE_MS = 1000 * PATIENCE
#: Console messages of replies that a test wants to be refused.
_EXPECTED = "Failed to load resource"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=tool("chromium"))
        yield running
        running.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh tab. At the end, no script has failed and no policy was violated."""
    context = browser.new_context(viewport={"width": 1280, "height": 820})
    context.set_default_timeout(PATIENCE_MS)
    tab = context.new_page()
    faults: list[str] = []

    def heard(message: ConsoleMessage) -> None:
        if message.type == "error" and _EXPECTED not in message.text:
            faults.append(message.text)

    tab.on("console", heard)
    tab.on("pageerror", lambda error: faults.append(str(error)))
    yield tab
    context.close()
    assert faults == []


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The demo with two encoders."""
    folder: Path = tmp_path_factory.mktemp("page")
    with running_cluster(DEMO_MODEL, folder, "--encoders", "2", "--threads", "1") as running:
        yield running
