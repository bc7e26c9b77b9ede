"""From no encoder to the first embedding: the seconds of a request that meets an empty pool."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from dataclasses import dataclass, field

from benchmarks.scaling.bursts import request
from triptych.goodput.launch import Launched, processes_of

#: An idle pool keeps its last encoder for three starts, which take long on a busy machine.
_PATIENCE = 600.0


@dataclass(slots=True)
class FirstStarts:
    """Seconds to the only token of a request with one picture, by how the encoder was started.

    It has its embedding before that: the token takes a prefill more. `warm`: an encoder was there.
    """

    forked: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)


def measure_first_starts(cluster: Launched, runs: int, side: int) -> FirstStarts:
    """The same `runs` times through the fork server, and then without it."""
    starts = FirstStarts()
    seed = 10_000_000
    for found in (starts.forked, starts.alone):
        if found is starts.alone:
            os.kill(processes_of(cluster.run_dir)["fork-server"], signal.SIGKILL)
        for _ in range(runs):
            _until_empty(cluster)
            found.append(_one(cluster, seed, side))
            starts.warm.append(_one(cluster, seed + 1, side))
            seed += 2
    return starts


def _until_empty(cluster: Launched) -> None:
    deadline = time.monotonic() + _PATIENCE
    while any(name.startswith("encoder-") for name in processes_of(cluster.run_dir)):
        if time.monotonic() > deadline:
            raise SystemExit(f"the encoder pool is not empty after {_PATIENCE:.0f} s")
        time.sleep(0.05)
    # The proxy polls the registry: it shall know that nobody is there.
    time.sleep(1.0)


def _one(cluster: Launched, seed: int, side: int) -> float:
    body = request([seed], side, 1)
    began = time.monotonic()
    asked = urllib.request.Request(
        f"{cluster.url}/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=_PATIENCE) as reply:
        if not json.loads(reply.read())["choices"]:
            raise SystemExit("a request was not answered")
    return time.monotonic() - began
