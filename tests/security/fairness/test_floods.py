"""One key floods a cluster of processes; another one's small requests are answered meanwhile.

`python -m benchmarks fairness` measures how soon; here they are answered at all, within a client's patience.
"""

from __future__ import annotations

import asyncio
import math
import os

import pytest

from benchmarks.fairness.attacker import beside, flood_process
from benchmarks.fairness.cluster import A, B, two_keys
from benchmarks.fairness.flood import Flood
from benchmarks.fairness.floods import FLOODS
from benchmarks.fairness.neighbour import ask_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
#: Seconds that a client waits for an answer, and B's answers that are waited for.
PATIENCE, ANSWERS = 20.0, 12
#: What a process says of another one that only the flood keeps from it, and of what it did not expect.
COMPLAINTS = ("does not answer", "DEADLINE_EXCEEDED", "stream of PD worker", "Traceback", "unexpected error")


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_flood_of_one_key_keeps_no_other_key_out(flood: Flood) -> None:
    with (
        two_keys() as cluster,
        beside(flood_process, flood.name, cluster.door, cluster.keys[A], 1.0) as attack,
    ):
        if flood.keys > 2:
            cluster.add_keys(flood.keys - 2)
        processes = cluster.pids()

        def ask(least: int, seconds: float) -> None:
            asked = ask_for(cluster.door, cluster.keys[B], flood.asks, seconds, PATIENCE, least)
            figures = asyncio.run(asked)
            assert figures.refused == []
            assert math.inf not in figures.seconds, f"no answer in {PATIENCE} s"

        ask(1, 0.0)
        attack.begin()
        ask(ANSWERS, 5.0)
        attack.end()
        ask(2, 0.0)
        assert cluster.pids() == processes, "a process has ended"
        assert all(os.path.exists(f"/proc/{pid}") for pid in processes.values())
        log = cluster.log.read_text(errors="replace")
        assert [line for line in log.splitlines() if any(words in line for words in COMPLAINTS)] == []
