"""The files that one request runs through are those that docs/architecture.md names.

TRIPTYCH_WRITE_SPINE=1 writes the page's table in place of comparing it.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest
import redis

from support.data.checkpoints import build_checkpoint
from support.data.traffic import picture
from support.processes.cluster import PATIENCE, data_url, start_cluster, wait_for
from triptych.store import keys

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


ROOT = Path(__file__).parents[2]
_PATCH = ROOT / "tests" / "support" / "spine"
OFF, IDLE, WRITE, FIRST_REQUEST = 0, 1, 2, 10


class Recorder:
    """The phase that all processes of a cluster see, and what they have recorded."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "phase"
        self._file.write_bytes(bytes([OFF]))

    @property
    def environment(self) -> dict[str, str]:
        """What the cluster is started with."""
        paths = [str(_PATCH), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "PYTHONPATH": os.pathsep.join(paths),
            "TRIPTYCH_TEST_SPINE": str(self._file),
            "TRIPTYCH_TEST_ROOT": str(ROOT),
        }

    def enter(self, phase: int) -> None:
        with self._file.open("r+b") as file:
            file.write(bytes([phase]))

    def records(self, pids: list[int]) -> list[Record]:
        """What these processes recorded; they write it down when they run next."""
        self.enter(WRITE)
        files = [self._file.with_name(f"{pid}.json") for pid in pids]
        deadline = time.monotonic() + PATIENCE
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline, f"no record of {[f for f in files if not f.exists()]}"
            time.sleep(0.05)
        self.enter(OFF)
        return [Record(**json.loads(file.read_text())) for file in files]


@dataclass(frozen=True)
class Record:
    """One process: (file, function) of what runs in idle times, and (request, thread, caller's file, file,
    function) of what runs for requests."""

    idle: list[list[str]]
    calls: list[tuple[int, int, str, str, str]]

    def files(self, package: str) -> set[str]:
        """All files of the package that ran code for every request.

        What comes by now and then, like the look after a pool, meets one on a busy machine, rarely all.
        """
        ran = {number: set[str]() for number in REQUESTS}
        for number, _, _, file, _ in self.calls:
            if file.startswith(package + "/"):
                ran[number].add(file)
        return set.intersection(*ran.values())

    def background(self, package: str) -> set[str]:
        """Those of them that run code without requests, too."""
        return self.files(package) & {file for file, _ in self.idle}

    def way(self, package: str, request: int) -> list[str]:
        """Files of the package as the request enters them, thread by thread; calls in a row count once.

        What runs in idle times is left out, and so are leaves: files that call no other of their package.
        """
        background = {tuple(pair) for pair in self.idle}
        calls = [
            (number, thread, caller, file)
            for number, thread, caller, file, function in self.calls
            if file.startswith(package + "/") and (file, function) not in background
        ]
        carriers = {caller for _, _, caller, file in calls if file != caller}
        way: list[str] = []
        for own in dict.fromkeys(thread for _, thread, _, _ in calls):
            files = [file for number, thread, _, file in calls if thread == own and number == request]
            way += [file for file, _ in groupby(file for file in files if file in carriers)]
        return way


PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- spine: begin -->", "<!-- spine: end -->"
REQUESTS = range(FIRST_REQUEST, FIRST_REQUEST + 3)
IDLE_SECONDS = 8.0
PACKAGES = ("proxy", "encoder_worker", "pd_worker", "ec_connector", "protos", "triptych")
PROCESSES = ("proxy", "encoder-0", "pd-0")
#: What a request is only shown to, when it pleases: counted, and no carrier.
WATCHING = ("proxy/live/", "proxy/requests/recorder.py")
#: Carriers, which call another file of their package, of one request with an image, in each process by
#: itself: the way that the page names.
MAX_CARRIERS = 96
#: Files that run code for it, leaves and what also runs in idle times included. They were 132 while several
#: ideas were glued into a file; those are split by what they say (a window, a load report, a stall watch, a
#: turn), and three are the adapter's, which reads prompts by the class's own code.
MAX_FILES = 190


@dataclass(frozen=True)
class Way:
    """One package in one process: all files that ran, those that run without requests, too, and the carriers,
    which call another file of their package, with entries per request."""

    files: frozenset[str]
    background: frozenset[str]
    carriers: dict[str, int]


Spine = dict[tuple[str, str], Way]


@pytest.fixture(scope="module")
def spine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spine]:
    folder = tmp_path_factory.mktemp("spine")
    recorder = Recorder(folder / "records")
    path = build_checkpoint("qwen3_vl", folder / "qwen3_vl")
    cluster = start_cluster(path, folder / "run", "--threads", "1", environment=recorder.environment)

    store = redis.Redis.from_url(cluster.store_url)
    asked: list[int] = []

    def stored() -> list[bytes]:
        return list(store.scan_iter(keys.EMBEDDING + "*"))

    def ask(seed: int) -> None:
        asked.append(seed)
        image = {"type": "image_url", "image_url": {"url": data_url(picture(seed, 64, 64))}}
        content = [image, {"type": "text", "text": "what is it?"}]
        reply = cluster.post({"messages": [{"role": "user", "content": content}], "max_tokens": 1})
        assert reply["usage"]["completion_tokens"] == 1
        # The save may land after the answer, and is the request's, too.
        wait_for("the embedding in the store", lambda: len(stored()) == len(asked))

    try:
        ask(0)
        recorder.enter(IDLE)
        # What a health check passes counts as idle, whether one comes by itself or not.
        with urllib.request.urlopen(f"{cluster.url}/health", timeout=PATIENCE):
            time.sleep(IDLE_SECONDS)
        for number in REQUESTS:
            recorder.enter(number)
            ask(number)
        records = recorder.records([cluster.pid(name) for name in PROCESSES])
        yield {
            (package, process): Way(
                frozenset(record.files(package)),
                frozenset(record.background(package)),
                _merged(record.way(package, number) for number in REQUESTS),
            )
            for process, record in zip(PROCESSES, records, strict=True)
            for package in PACKAGES
            if record.files(package)
        }
    finally:
        store.close()
        cluster.stop()


def _merged(ways: Iterator[list[str]]) -> dict[str, int]:
    """Most entries that any of the requests makes into each file."""
    maximum: Counter[str] = Counter()
    for way in ways:
        maximum |= Counter(file for file in way if not file.startswith(WATCHING))
    return dict(maximum)


def test_the_page_names_the_files_that_a_request_passes(spine: Spine) -> None:
    text = PAGE.read_text()
    if os.environ.get("TRIPTYCH_WRITE_SPINE"):
        head, _, rest = text.partition(BEGIN)
        PAGE.write_text(head + BEGIN + "\n" + "\n".join(_table(spine)) + "\n" + END + rest.partition(END)[2])
        text = PAGE.read_text()
    rows = [row.split("`")[1::2] for row in text.partition(BEGIN)[2].partition(END)[0].splitlines()]
    named = {(package, process): set(files) for package, process, *files in filter(None, rows)}
    assert named == {key: {_inside(file) for file in way.carriers} for key, way in spine.items()}


def test_the_way_is_short(spine: Spine) -> None:
    files = {file for way in spine.values() for file in way.files}
    listed = "\n".join(sorted(files))
    assert len(files) <= MAX_FILES, f"one image request runs through {len(files)} files:\n{listed}"
    carriers = sum(len(way.carriers) for way in spine.values())
    assert carriers <= MAX_CARRIERS, f"one image request is carried by {carriers} files: see {PAGE.name}"


def _inside(file: str) -> str:
    """The path without the package's folder."""
    return file.partition("/")[2]


def _table(spine: Spine) -> list[str]:
    rows = [
        "| package | process | files | of these also idle | carriers | entries | carriers, in order |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (package, process), way in spine.items():
        carriers = ", ".join(
            f"`{_inside(file)}`" + (f" {n}x" if n > 1 else "") for file, n in way.carriers.items()
        )
        counts = (len(way.files), len(way.background), len(way.carriers), sum(way.carriers.values()))
        rows.append(f"| `{package}` | `{process}` | " + " | ".join(map(str, counts)) + f" | {carriers} |")
    total = {file for way in spine.values() for file in way.files}
    rows += ["", f"Different files in all processes together: {len(total)}."]
    return rows
