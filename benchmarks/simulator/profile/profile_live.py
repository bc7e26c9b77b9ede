"""What a running cluster takes beyond its stages: messages of tokens, in CPU seconds of all who handle them.

A cluster of one encoder and one PD worker answers texts, a few at once; CPU time is read from the kernel,
thread by thread, steps and times from the worker. No latency that a client sees is fitted.

Steps alone are timed again right before and right after each window, and the window's times are brought to
the speed at which the costs of steps were measured: a machine that changes by the minute would else pass for
colder caches, or hide them.
"""

from __future__ import annotations

import statistics
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from triptych.errors import ConfigError
from triptych.goodput.launch import Launched, launched, parse_shape
from triptych.goodput.load.arrivals import Arrivals
from triptych.goodput.load.job import Target
from triptych.goodput.load.processes import run_window
from triptych.goodput.load.workload import Workload
from triptych.goodput.run import ready
from triptych.goodput.settings import Settings, make_job
from triptych.goodput.slo import Slo
from triptych.simulator.costs.costs import PDCosts
from triptych.simulator.profile.fit import TERMS, Sample
from triptych.simulator.profile.timing import Effort

#: Requests at once; those whose steps leave the engine no pause; the share of the last one's rate at which
#: requests come by chance, so that they do not meet the steps in their own rhythm.
AT_ONCE = (1, 2, 4, 8)
BUSY = (2, 4, 8)
_SHARE = 0.6
#: Short replies, so many at once: they tell what a request costs from what its tokens do.
_SHORT = 3
_TEXT_TOKENS = 32
_PROBE_TOKENS, _MOST_TOKENS, _LEAST_TOKENS = 16, 64, 8


@dataclass(frozen=True, slots=True)
class LiveWindow:
    """One window, of requests by chance where `at_once` is 0.

    `messages` are steps, each of which is told in one. CPU seconds by process; `engine` is the PD worker's
    one thread that runs steps, `worker` all its others; `queue` the median wait at the PD worker. `alone`:
    what steps alone took right before and right after, next to their costs; all times are divided by it.
    """

    at_once: int
    requests: int
    messages: float
    tokens: float
    prompt_tokens: float
    wall: float
    engine: float
    worker: float
    proxy: float
    client: float
    queue: float
    alone: float = 1.0

    @property
    def step(self) -> float:
        """Seconds from one step to the next."""
        return self.wall / self.messages

    def at_speed_of_costs(self, alone: float) -> LiveWindow:
        """The window as it would have been while steps alone took what their costs say."""
        times = ("wall", "engine", "worker", "proxy", "client", "queue")
        return replace(self, alone=alone, **{name: getattr(self, name) / alone for name in times})

    def sample(self, seconds: float, *, tell: bool = False) -> Sample:
        """`seconds` of the window, per request, with the terms of `tell` or of the others."""
        count = self.requests
        terms = {} if tell else {"request": 1.0}
        terms |= {"message": self.messages / count, "message_token" if tell else "token": self.tokens / count}
        return Sample(terms, max(seconds / count, 1e-9))


def live_windows(
    model: Path, words: Sequence[str], effort: Effort, alone: Callable[[], float]
) -> list[LiveWindow]:
    """Windows for every number at once, in rounds; `words` are flags of `triptych serve`. `alone` times steps
    between the windows: how long they take next to their costs.

    ConfigError where the cluster does not start, or a request fails.
    """
    with _turns(model, ("--cpu-sharing", "free", *words), effort, alone) as turns:
        for _ in range(effort.live_rounds):
            for at_once in AT_ONCE:
                turns.closed(at_once)
            full = turns.found[-1]
            turns.short(max(12, full.requests // 2))
            # Real seconds again: requests come at the speed that the machine has.
            turns.by_chance(_SHARE * full.requests / (full.wall * full.alone))
        return turns.found


def own_core_windows(
    model: Path, words: Sequence[str], effort: Effort, alone: Callable[[], float]
) -> list[LiveWindow]:
    """Busy windows as those of `live_windows`, of a PD worker that has a core for itself."""
    with _turns(model, ("--cpus-per-worker", "1", *words), effort, alone) as turns:
        for _ in range(effort.live_rounds):
            for at_once in BUSY:
                turns.closed(at_once)
        return turns.found


@contextmanager
def _turns(model: Path, flags: Sequence[str], effort: Effort, alone: Callable[[], float]) -> Iterator[_Turns]:
    with launched(parse_shape("1E1PD"), str(model), flags) as cluster:
        yield _Turns(cluster, effort.live_seconds, alone)


class _Turns:
    """Windows of a cluster, of about so many seconds each, and steps alone, by turns."""

    def __init__(self, cluster: Launched, seconds: float, alone: Callable[[], float]) -> None:
        self._cluster, self._seconds, self._alone = cluster, seconds, alone
        self._settings = ready(
            Settings(
                target=Target(cluster.url, ""),
                workload=Workload(text_tokens=_TEXT_TOKENS, output_tokens=_PROBE_TOKENS),
                workload_name="live",
                slo=Slo(),
                warm_up=0.0,
            )
        )
        probe = _window(cluster, self._settings, 1, 4, _PROBE_TOKENS, 0)
        self._per_token = probe.wall / probe.tokens
        self._tokens = round(min(_MOST_TOKENS, max(_LEAST_TOKENS, seconds / 8 / self._per_token)))
        self._before = alone()
        self.found: list[LiveWindow] = []

    def closed(self, at_once: int) -> None:
        # A step of several takes little longer than one of a single sequence.
        one = self._tokens * self._per_token * (1 + 0.06 * at_once)
        self._take(self._settings, at_once, max(4, round(self._seconds / one)) * at_once, self._tokens)

    def short(self, requests: int) -> None:
        self._take(self._settings, _SHORT, requests, _LEAST_TOKENS)

    def by_chance(self, rate: float) -> None:
        settings = replace(self._settings, arrivals=Arrivals(rate=rate))
        self._take(settings, 0, max(8, round(self._seconds * rate)), self._tokens)

    def _take(self, settings: Settings, at_once: int, requests: int, tokens: int) -> None:
        # Seeds differ, so that no prompt is in a cache.
        seed = 1 + len(self.found)
        found = _window(self._cluster, settings, at_once, requests, tokens, seed)
        before, self._before = self._before, self._alone()
        self.found.append(found.at_speed_of_costs((before + self._before) / 2))


def _window(
    cluster: Launched, settings: Settings, at_once: int, requests: int, tokens: int, seed: int
) -> LiveWindow:
    workload = replace(settings.workload, output_tokens=tokens)
    settings = replace(settings, concurrency=at_once, requests=requests, workload=workload)
    pids = cluster.processes
    threads, proxy, page = _threads(pids["pd-0"]), sum(_threads(pids["proxy"]).values()), _page(cluster)
    report = run_window(make_job(settings, seed))
    after = _page(cluster)
    used = {name: cpu - threads.get(name, 0.0) for name, cpu in _threads(pids["pd-0"]).items()}
    engine = max(used.values())
    failed = [record.error for record in report.records if not record.ok]
    if failed:
        raise ConfigError(f"the cluster that was to be measured failed a request: {failed[0]}")

    def counted(name: str) -> float:
        return after[name] - page.get(name, 0.0)

    return LiveWindow(
        at_once=at_once,
        requests=len(report.records),
        messages=counted("vllm:iteration_tokens_total_count"),
        tokens=counted("vllm:generation_tokens_total"),
        prompt_tokens=counted("vllm:prompt_tokens_total"),
        wall=report.wall,
        engine=engine,
        worker=sum(used.values()) - engine,
        proxy=sum(_threads(pids["proxy"]).values()) - proxy,
        client=report.cpu_share * report.wall,
        queue=statistics.median(record.stages.get("queue", 0.0) for record in report.records),
    )


def _threads(pid: int) -> dict[str, float]:
    """CPU seconds of every thread of a process so far."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            found[thread.name] = int((thread / "schedstat").read_text().split()[0]) / 1e9
        except OSError:
            continue
    return found


def _page(cluster: Launched) -> dict[str, float]:
    """The counters of all pages, without labels; the PD worker's have names of their own."""
    found: dict[str, float] = {}
    for url in cluster.metrics_urls:
        with urllib.request.urlopen(url, timeout=5.0) as reply:
            for line in reply.read().decode().splitlines():
                if line.startswith("vllm:") and not line.startswith("#"):
                    name, value = line.rsplit(" ", 1)
                    found[name.partition("{")[0]] = float(value)
    return found


def live_samples(
    windows: Sequence[LiveWindow], costs: PDCosts, *, one_thread: bool
) -> dict[str, list[Sample]]:
    """Samples of "relay", "client" and "tell". What tells of tokens holds the engine up: that is the time of
    busy windows in which its thread did not compute; where that thread does not do all of a step's work, the
    time that `costs` do not explain.
    """

    def held_up(window: LiveWindow) -> float:
        return window.wall - (window.engine if one_thread else expected_steps(window, costs))

    return {
        "relay": [window.sample(window.proxy) for window in windows],
        "client": [window.sample(window.client) for window in windows],
        "tell": [window.sample(held_up(window), tell=True) for window in windows if window.at_once in BUSY],
    }


def colder(costs: PDCosts, ratio: float) -> PDCosts:
    """The costs with steps `ratio` times as long."""
    return replace(costs, **{term: ratio * getattr(costs, term) for term in TERMS["step"]})


def step_ratio(windows: Sequence[LiveWindow], costs: PDCosts) -> float:
    """What the engine's thread took for its steps, next to what they take alone: above 1 with colder
    caches.
    """
    found = [window.engine / expected_steps(window, costs) for window in windows if window.at_once in BUSY]
    return statistics.median(found)


def own_core(pinned: Sequence[LiveWindow], shared: Sequence[LiveWindow]) -> float:
    """What a step and telling of it take on a core of the worker's own, as a share of what they take where
    its threads move between cores: the median over windows with as many at once. 1 without windows.
    """
    typical = {
        count: statistics.median(window.step for window in shared if window.at_once == count)
        for count in {window.at_once for window in pinned}
    }
    return statistics.median([window.step / typical[window.at_once] for window in pinned] or [1.0])


def expected_steps(window: LiveWindow, costs: PDCosts) -> float:
    """Seconds of all steps of a window by `costs`."""
    prompt, count = window.prompt_tokens / window.requests, window.requests
    decodes = window.tokens - count
    context = decodes * (prompt + window.tokens / count / 2)
    # One step with all of it stands for the sum: the costs are linear.
    whole = costs.step_seconds(round(window.prompt_tokens), round(decodes), round(context), 0.0)
    return whole + costs.step * (window.messages - 1) + costs.prefill_context * count * prompt**2 / 2


def take_busy(windows: Sequence[LiveWindow], costs: PDCosts) -> float:
    """Seconds that a request waits on its way in while steps run, beyond the end of the step under way."""
    found = [
        window.queue
        - window.engine / window.messages / 2
        - costs.take(round(window.prompt_tokens / window.requests))
        for window in windows
        if not window.at_once
    ]
    return max(0.0, statistics.median(found))
