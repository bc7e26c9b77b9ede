"""The way of requests through the product's files, recorded by the processes of a cluster.

`support/spine/sitecustomize.py` records; the phase is a byte: off, idle, write, or the number of a request.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from support.processes.cluster import PATIENCE

ROOT = Path(__file__).parents[3]
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
