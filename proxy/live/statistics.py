"""Statistics of one proxy: counts, goodput, history, and what each encoder worker has done."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import msgspec
from prometheus_client import Counter

from triptych.base.metrics import ProxyMetrics
from triptych.protos.encoder_pb2 import ItemReady
from triptych.proxy.live.objects import ClusterGoodput, ClusterHistory, ClusterSeries, Flow

WINDOW_SECONDS = 60.0
#: Calls whose times are kept for percentiles; with more in a minute those are of the newest ones.
MAX_CALLS = 4096
STEP_SECONDS = 5
POINTS = 720
#: Items whose times are averaged.
_LAST = 32
#: Seconds that a window may reach back.
MAX_SECONDS = 60
_OVERLOADED = "429"


class Counts(NamedTuple):
    """Totals at a moment of the proxy's clock; differences of two of them say what happened between."""

    at: float = 0.0
    requests: float = 0.0
    errors: float = 0.0
    refused: float = 0.0
    items: float = 0.0
    hits: float = 0.0
    tokens: float = 0.0
    met: float = 0.0
    measured: float = 0.0

    def since(self, before: Counts) -> Counts:
        """What has been added since then; `at` is the seconds between."""
        return Counts(*(after - earlier for after, earlier in zip(self, before, strict=True)))

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.items if self.items else None

    @property
    def met_share(self) -> float | None:
        return self.met / self.measured if self.measured else None

    def rate(self, total: float) -> float:
        """A total as a rate per second."""
        return total / self.at if self.at > 0 else 0.0


#: Ways of an embedding, and seconds of which their rates are.
_WAYS, _FLOW_SECONDS = ("encoded", "store", "shm", "peer"), 10


class Transfers:
    """Counter of embeddings and their bytes by the way that they went."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys(_WAYS, (0, 0))
        self._samples = deque([(0.0, self.totals)], maxlen=_FLOW_SECONDS + 1)

    def add(self, way: str, nbytes: int) -> None:
        """One embedding; a way that this release does not know is the store's."""
        way = way if way in _WAYS else "store"
        items, size = self.totals[way]
        self.totals[way] = items + 1, size + nbytes

    def poll(self, now: float) -> None:
        """One poll, every second."""
        self._samples.append((now, dict(self.totals)))

    def flows(self) -> dict[str, Flow]:
        (start, before), (end, after) = self._samples[0], self._samples[-1]
        seconds = max(end - start, 1.0)
        return {
            way: Flow(*(round((n - m) / seconds, 2) for n, m in zip(after[way], before[way], strict=True)))
            for way in _WAYS
        }


def read_counts(metrics: ProxyMetrics, at: float, tokens: float, met: int, measured: int) -> Counts:
    """The totals now. An item that was not "encoded" for its request needed no encoder job of its own."""
    statuses, origins = _by_label(metrics.requests), _by_label(metrics.items)
    errors = sum(count for status, count in statuses.items() if status >= "500" or status == _OVERLOADED)
    # 499 is a client that has left, which is no refusal.
    refused = sum(n for status, n in statuses.items() if "400" <= status < "499" and status != _OVERLOADED)
    items = sum(origins.values())
    return Counts(
        at=at,
        requests=sum(statuses.values()),
        errors=errors,
        refused=refused,
        items=items,
        hits=items - origins.get("encoded", 0.0),
        tokens=tokens,
        met=met,
        measured=measured,
    )


def _by_label(counter: Counter) -> dict[str, float]:
    """The values of a counter, summed by its first label."""
    sums: dict[str, float] = {}
    for family in counter.collect():
        for sample in family.samples:
            label = next(iter(sample.labels.values()))
            sums[label] = sums.get(label, 0.0) + sample.value
    return sums


class CountWindow:
    """The totals of the last minute, one for each second."""

    def __init__(self) -> None:
        self._seen: deque[Counts] = deque(maxlen=MAX_SECONDS + 1)

    def add(self, counts: Counts) -> None:
        self._seen.append(counts)

    def last(self, seconds: int) -> Counts:
        """What was added over the last `seconds`, or since the first poll; nothing before the second one."""
        if len(self._seen) < 2:
            return Counts()
        return self._seen[-1].since(self._seen[max(len(self._seen) - 1 - seconds, 0)])


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds: to the first token, and for each one after it."""

    ttft: float
    tpot: float


class _EndedCall(NamedTuple):
    at: float
    ttft: float
    #: None with fewer than two tokens.
    tpot: float | None


class GoodputWindow:
    """Calls that have ended. `met` and `measured` count all since the start."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._calls: deque[_EndedCall] = deque(maxlen=MAX_CALLS)
        self.met = 0
        self.measured = 0

    def answered(self, at: float, ttft: float, seconds: float, tokens: int) -> None:
        """A call was answered with this many tokens, `seconds` after its arrival."""
        tpot = (seconds - ttft) / (tokens - 1) if tokens > 1 else None
        self._calls.append(_EndedCall(at, ttft, tpot))
        self.measured += 1
        self.met += ttft <= self._slo.ttft and (tpot is None or tpot <= self._slo.tpot)

    def failed(self) -> None:
        """A call has failed through no fault of its client."""
        self.measured += 1

    def read(self, now: float, met: float | None) -> ClusterGoodput:
        """The window's times; `met` is the share of it that met the SLO."""
        while self._calls and self._calls[0].at < now - WINDOW_SECONDS:
            self._calls.popleft()
        first = sorted(call.ttft for call in self._calls)
        later = sorted(call.tpot for call in self._calls if call.tpot is not None)
        return ClusterGoodput(
            ttft_slo=self._slo.ttft,
            tpot_slo=self._slo.tpot,
            met=None if met is None else round(met, 4),
            **_percentiles("ttft", first),
            **_percentiles("tpot", later),
        )


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    return {f"{name}_p{percent}": percentile(values, percent) for percent in (50, 99)}


def percentile(ordered: Sequence[float], percent: int) -> float | None:
    """The smallest value that this percentage does not exceed; None of nothing."""
    if not ordered:
        return None
    return round(ordered[max(-(-len(ordered) * percent // 100) - 1, 0)], 6)


def mean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    known = list(values)
    return sum(known) / len(known) if known else None


class HistoryPoint(msgspec.Struct, frozen=True):
    """One value of each series of `ClusterSeries`, in its order; None where nothing is known."""

    in_flight: float | None = None
    queued: float | None = None
    requests: float | None = None
    tokens: float | None = None
    items: float | None = None
    errors: float | None = None
    hit_rate: float | None = None
    met: float | None = None
    encoders: float | None = None
    desired_encoders: float | None = None
    pd_workers: float | None = None
    kv_usage: float | None = None
    encoder_busy: float | None = None
    pd_busy: float | None = None


_BEFORE = HistoryPoint()


class HistoryRing:
    """The newest points."""

    def __init__(self) -> None:
        self._points: deque[HistoryPoint] = deque([_BEFORE] * POINTS, maxlen=POINTS)
        self._end = 0.0

    def add(self, point: HistoryPoint, time: float) -> None:
        self._points.append(point)
        self._end = time

    def read(self) -> ClusterHistory:
        names = ClusterSeries.__struct_fields__
        series = {name: [_rounded(getattr(point, name)) for point in self._points] for name in names}
        return ClusterHistory(STEP_SECONDS, round(self._end, 3), ClusterSeries(**series))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


@dataclass(slots=True)
class _Tally:
    done: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))


class EncoderTallies:
    """The tallies by address. `keep` drops those of workers that have gone."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}

    def add(self, address: str, end: ItemReady) -> None:
        """An item is in the store. One that was there already took no time of the tower."""
        tally = self._tallies.setdefault(address, _Tally())
        tally.done += 1
        if not end.already_stored:
            tally.seconds.append(end.encode_seconds)

    def keep(self, addresses: Collection[str]) -> None:
        for address in self._tallies.keys() - set(addresses):
            del self._tallies[address]

    def mean_seconds(self) -> float | None:
        """The mean of the last towers' batches at all workers; None before the first."""
        return mean(chain.from_iterable(tally.seconds for tally in self._tallies.values()))

    def read(self, address: str) -> tuple[int, float | None]:
        """Items done, and the mean milliseconds of the last towers' batches; None before the first."""
        tally = self._tallies.get(address, _Tally())
        seconds = mean(tally.seconds)
        return tally.done, None if seconds is None else round(seconds * 1000, 1)
