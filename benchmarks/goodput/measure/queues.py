"""Time line of a server's queues: its gauges, read once a second while a window runs."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

#: Gauges by the name they get in results and plots; of several sources the sum counts.
GAUGES = {
    "triptych_requests_in_flight": "in flight",
    "triptych_waiting_items": "items waiting for an encoder",
    "triptych_encoder_queue_items": "items waiting for the tower",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_requests_running": "running",
}
_PERIOD = 1.0


@dataclass(frozen=True, slots=True)
class QueueSample:
    """`at`: Unix time."""

    at: float
    depths: dict[str, float]


def depths_of(pages: Sequence[str]) -> dict[str, float]:
    """The sums of known gauges over several /metrics pages."""
    found: dict[str, float] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name in GAUGES:
                    name = GAUGES[sample.name]
                    found[name] = found.get(name, 0.0) + sample.value
    return found


class QueueSampler:
    """Samples within a `with`. A page that cannot be read is left out: servers need have none."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.samples: list[QueueSample] = []

    def __enter__(self) -> QueueSampler:
        if self._urls:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            at = time.time()
            depths = depths_of([page for url in self._urls if (page := _read(url)) is not None])
            if depths:
                self.samples.append(QueueSample(at, depths))
            self._stop.wait(max(_PERIOD - (time.time() - at), 0.05))


def _read(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=5.0) as reply:
            return str(reply.read().decode())
    except (OSError, ValueError):
        return None
