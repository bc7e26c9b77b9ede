"""The way of a request through the files, as docs/architecture.md draws it, is the one that is taken.

TRIPTYCH_WRITE_SPINE=1 writes the page's table anew in place of comparing it.
"""

from __future__ import annotations

import os
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator

import pytest

from support.data.checkpoints import build_checkpoint
from support.data.traffic import picture
from support.processes.cluster import PATIENCE, data_url, start_cluster
from support.processes.spine import FIRST_REQUEST, IDLE, ROOT, Recorder

pytestmark = pytest.mark.timeout(300)

PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- spine: begin -->", "<!-- spine: end -->"
REQUESTS = range(FIRST_REQUEST, FIRST_REQUEST + 3)
IDLE_SECONDS = 8.0
#: What a request is only shown to: it decides nothing of it.
WATCHING = ("proxy/live/", "proxy/requests/recorder.py")
#: Most files on the way of one request, by package and the process that it runs in.
MOST_FILES = {
    ("proxy", "proxy"): 14,
    ("encoder_worker", "encoder-0"): 10,
    # Which items are there yet decides how far a prompt is prefilled, and blocks are placed in runs.
    ("pd_worker", "pd-0"): 17,
    # The store may be a server, a Redis Cluster or a primary with Sentinels.
    ("ec_connector", "encoder-0"): 8,
    ("ec_connector", "pd-0"): 8,
}

#: Files in the order in which they are first entered, with entries per request, by package and process.
Spine = dict[tuple[str, str], dict[str, int]]


@pytest.fixture(scope="module")
def spine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spine]:
    folder = tmp_path_factory.mktemp("spine")
    recorder = Recorder(folder / "records")
    path = build_checkpoint("qwen3_vl", folder / "qwen3_vl")
    cluster = start_cluster(path, folder / "run", "--threads", "1", environment=recorder.environment)

    def ask(seed: int) -> None:
        image = {"type": "image_url", "image_url": {"url": data_url(picture(seed, 64, 64))}}
        content = [image, {"type": "text", "text": "what is it?"}]
        reply = cluster.post({"messages": [{"role": "user", "content": content}], "max_tokens": 1})
        assert reply["usage"]["completion_tokens"] == 1

    try:
        ask(0)
        recorder.enter(IDLE)
        # What a health check passes counts as idle, whether one comes by itself or not.
        with urllib.request.urlopen(f"{cluster.url}/health", timeout=PATIENCE):
            time.sleep(IDLE_SECONDS)
        for number in REQUESTS:
            recorder.enter(number)
            ask(number)
        names = ("proxy", "encoder-0", "pd-0")
        records = dict(zip(names, recorder.records([cluster.pid(name) for name in names]), strict=True))
        yield {
            (package, process): _merged(records[process].way(package, number) for number in REQUESTS)
            for package, process in MOST_FILES
        }
    finally:
        cluster.stop()


def _merged(ways: Iterator[list[str]]) -> dict[str, int]:
    """Most entries that any of the requests makes into each file."""
    most: Counter[str] = Counter()
    for way in ways:
        most |= Counter(file for file in way if not file.startswith(WATCHING))
    return dict(most)


def test_the_page_names_the_files_that_a_request_passes(spine: Spine) -> None:
    text = PAGE.read_text()
    if os.environ.get("TRIPTYCH_WRITE_SPINE"):
        head, _, rest = text.partition(BEGIN)
        PAGE.write_text(head + BEGIN + "\n" + "\n".join(_table(spine)) + "\n" + END + rest.partition(END)[2])
        text = PAGE.read_text()
    rows = [row.split("`")[1::2] for row in text.partition(BEGIN)[2].partition(END)[0].splitlines()]
    named = {(package, process): set(files) for package, process, *files in filter(None, rows)}
    assert named == {key: {_inside(file) for file in files} for key, files in spine.items()}


def test_the_way_is_short(spine: Spine) -> None:
    assert {key: len(files) for key, files in spine.items() if len(files) > MOST_FILES[key]} == {}


def _inside(file: str) -> str:
    """The path without the package's folder."""
    return file.partition("/")[2]


def _table(spine: Spine) -> list[str]:
    rows = ["| package | process | files | entries | the way |", "| --- | --- | --- | --- | --- |"]
    for (package, process), files in spine.items():
        way = ", ".join(f"`{_inside(file)}`" + (f" {n}x" if n > 1 else "") for file, n in files.items())
        rows.append(f"| `{package}` | `{process}` | {len(files)} | {sum(files.values())} | {way} |")
    return rows
