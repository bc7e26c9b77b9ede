"""Loads of the comparison, and the figures of one turn on one of them. Pure."""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import msgspec

from triptych_bench.goodput.load.job import RequestRecord
from triptych_bench.goodput.load.workload import Workload
from triptych_bench.goodput.measure.slo import preset

_TEXT = preset("text").workload
#: 64 output tokens each; pictures of 320 x 320.
WORKLOADS: dict[str, Workload] = {
    "text": _TEXT,
    "text-450": replace(_TEXT, text_tokens=450),
    **{name: preset(name).workload for name in ("image", "images-4", "reuse-50")},
}
CONCURRENCIES = (1, 4, 16)
#: Fewer say nothing of a mean.
_MIN_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class Load:
    """A workload in a closed loop of `at_once` requests, written `image@16`."""

    workload: str
    at_once: int

    @property
    def name(self) -> str:
        return f"{self.workload}@{self.at_once}"

    def requests(self, waves: int) -> int:
        """Measured requests of a round; as many as are in flight come before them, unmeasured."""
        return max(self.at_once * waves, _MIN_REQUESTS)


LOADS = tuple(Load(workload, at_once) for workload in WORKLOADS for at_once in CONCURRENCIES)


def turn(systems: Sequence[str], number: int) -> list[str]:
    """The order of the systems in a round: each begins as often as it ends."""
    return list(systems) if number % 2 == 0 else list(reversed(systems))


def seed_of(model: str, load: Load, number: int) -> int:
    """Of a round's requests: the same for all systems, and for no other round, so that no cache answers."""
    return zlib.crc32(f"{model} {load.name} {number}".encode()) % 1_000_000


#: What a round gives, in the order of the tables: requests per second, means in ms, the step, CPU seconds.
FIGURES = ("req_s", "ttft_ms", "tpot_ms", "step_ms", "cpu_s")

#: A turn in which others used more cores than this is no figure.
OTHERS_LIMIT = 0.15


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One system's window of one round.

    `others`: cores that processes outside of the run used meanwhile. `step_ms` is None where the load is
    never all in decode. `cpu_s`: CPU seconds of all of the system's processes per request. Of `requests`
    `failed` did not end; then nothing of the turn counts.
    """

    model: str
    load: str
    system: str
    number: int
    seed: int
    date: str
    commit: str
    chip: str
    requests: int
    failed: int
    others: float
    req_s: float
    ttft_ms: float
    tpot_ms: float
    cpu_s: float
    step_ms: float | None = None

    def figure(self, name: str) -> float | None:
        """A figure by its name; None where the turn has none.

        A step of 0 is none: tokens of several steps came together.
        """
        result = getattr(self, name)
        return float(result) if result else None


def decode_step(records: Sequence[RequestRecord], at_once: int) -> float | None:
    """Median seconds between tokens while `at_once` sequences decode and none is prefilled.

    `records` are all of the window, warm-up included. None when that lasted for no two tokens.
    """
    done = [record for record in records if record.ok and record.itls]
    spans = list(_all_decode([(r.sent + r.ttft, r.sent + r.e2e) for r in done], at_once))
    gaps = []
    for record in done:
        times = list(accumulate(record.itls, initial=record.sent + record.ttft))
        for begin, end in zip(times, times[1:], strict=False):
            if any(low <= begin and end <= high for low, high in spans):
                gaps.append(end - begin)
    return statistics.median(gaps) if gaps else None


def _all_decode(lives: Sequence[tuple[float, float]], at_once: int) -> Iterable[tuple[float, float]]:
    """The spans of time in which `at_once` of the lives overlap."""
    changes = sorted([(begin, 1) for begin, _ in lives] + [(end, -1) for _, end in lives])
    alive, since = 0, 0.0
    for time, change in changes:
        if alive == at_once and time > since:
            yield since, time
        alive, since = alive + change, time


def ratios(ours: Sequence[Turn], theirs: Sequence[Turn], figure: str) -> list[float]:
    """Ours by theirs of the rounds that both have; empty where the figure is missing."""
    other = {turn.number: turn.figure(figure) for turn in theirs if not turn.failed}
    pairs = [(turn.figure(figure), other.get(turn.number)) for turn in ours if not turn.failed]
    return [mine / peer for mine, peer in pairs if mine is not None and peer]


def quiet(turns: Iterable[Turn]) -> list[Turn]:
    """The last quiet turn of each system, load and round: a round that was measured again counts once.

    Where others use the cores, threads wait for each other's turn, and the order of systems turns over.
    """
    kept = (turn for turn in turns if turn.others <= OTHERS_LIMIT)
    return list({(turn.model, turn.load, turn.system, turn.number): turn for turn in kept}.values())
