"""How far a shape scales: what its workers serve, and the first part between them that is full.

Everything is a share of one core or one link at the rate that N workers serve, by the formulas of
docs/when-to-disaggregate.md. One store is one server process: transfers and registry each alone may take
SHARE of it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from triptych_bench.simulator.plan.estimate import Estimate, best_counts, demand_of, estimate, proxy_seconds
from triptych_bench.simulator.plan.question import Question
from triptych_bench.simulator.plan.ratios import Served

#: Of a core or a link, what may be in use before waiting for it shows.
SHARE = 0.7
#: CPU seconds of a message, an upper bound, and tokens in it, by `benchmarks micro hot_paths proxy_relay`.
MESSAGE, MESSAGE_TOKENS = 8 / 140_924, 8
#: Bytes per second of one store, of benchmarks/results/earlier.md: eight at once over a unix socket.
SAVE_RATE, LOAD_RATE = 2.55e9, 2.80e9
#: CPU seconds of benchmarks/results/earlier.md: of the store for a heartbeat, a look at the registry
#: and each worker in it; of a proxy for a look and each worker in it.
BEAT, LOOK, LOOK_WORKER = 41e-6, 47e-6, 1.93e-6
LOOK_PROXY, LOOK_PROXY_WORKER = 179e-6, 7.0e-6
#: Per second: of a worker (`triptych/registry/registry.py`), and of a proxy (`proxy/pool.py`).
BEATS, LOOKS = 0.5, 2.0
WORKERS = (2, 4, 8, 16, 32, 64, 128, 250, 500, 1000)
LIMITS = ("proxy", "store", "registry")


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a request brings: a proxy's CPU seconds without messages, tokens out, bytes to and from the store.

    `message`: a proxy's seconds for one; `sequences`: those that a PD worker has under way in a step.
    """

    proxy_seconds: float
    message: float
    tokens: float
    saved: float
    loaded: float
    sequences: float
    save_rate: float = SAVE_RATE
    load_rate: float = LOAD_RATE


@dataclass(frozen=True, slots=True)
class Reach:
    """What workers serve (`rate`), and the shares of every part with as many `proxies` as it takes (0: no
    number does). `one_proxy`: the share of its core that a single one would need; bytes: saved and loaded.
    """

    workers: int
    shape: str
    rate: float
    proxies: int
    one_proxy: float
    shares: dict[str, float]
    store_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """`part` is full from `workers` on, at `rate`; None: not within the curve. `proxies` were there."""

    part: str
    workers: int | None
    rate: float
    proxies: int


@dataclass(frozen=True, slots=True)
class Scaling:
    """`of_bound`: what waiting leaves of the bound, taken to be the same at every size."""

    of_bound: float
    curve: tuple[Reach, ...]
    bottlenecks: tuple[Bottleneck, ...]


def scaling(question: Question, served: Served, store_rate: float = 0.0) -> Scaling:
    """The curve of shapes like the one that was `served`."""
    bounds, share = estimate(question), served.of_bound
    traffic = traffic_of(question, bounds, served, store_rate)
    return Scaling(share, curve(bounds, share, traffic), bottlenecks(bounds, share, traffic))


def traffic_of(question: Question, bounds: Estimate, served: Served, store_rate: float = 0.0) -> Traffic:
    """What requests bring where PD workers are as busy as in `served`.

    `store_rate`: bytes per second in either direction, in place of what was measured.
    """
    load, costs, model = question.workload, question.device.costs, question.device.model
    asked = demand_of(load, model)
    # A token was measured with MESSAGE_TOKENS in a message.
    message = min(MESSAGE, costs.proxy.token * MESSAGE_TOKENS)
    embedding_bytes = (model.fixed_rows or asked.patches / model.merge**2) * model.row_bytes
    rate = served.rate / served.shape.pd_workers
    step = min(bounds.step_seconds(rate), question.slo.seconds("tpot"))
    return Traffic(
        proxy_seconds=proxy_seconds(load, costs, model) - asked.output_tokens * message / MESSAGE_TOKENS,
        message=message,
        tokens=asked.output_tokens,
        saved=asked.fresh * embedding_bytes,
        loaded=asked.pictures * embedding_bytes,
        sequences=max(rate * asked.output_tokens * step, 1.0),
        save_rate=store_rate or SAVE_RATE,
        load_rate=store_rate or LOAD_RATE,
    )


def tokens_per_message(sequences: float, proxies: int) -> float:
    """Of `sequences` spread over `proxies` at random: how many those that have any have on average."""
    if proxies <= 1:
        return max(sequences, 1.0)
    some = -math.expm1(sequences * math.log1p(-1 / proxies))
    return max(sequences / (proxies * some), 1.0)


def proxy_share(traffic: Traffic, rate: float, workers: int, proxies: int) -> float:
    """Of one proxy's core."""
    messages = traffic.tokens / tokens_per_message(traffic.sequences, proxies)
    requests = rate / proxies * (traffic.proxy_seconds + messages * traffic.message)
    return requests + LOOKS * (LOOK_PROXY + workers * LOOK_PROXY_WORKER)


def store_share(traffic: Traffic, rate: float) -> float:
    """Of the store's bandwidth."""
    return rate * (traffic.saved / traffic.save_rate + traffic.loaded / traffic.load_rate)


def registry_share(workers: int, proxies: int) -> float:
    """Of the store's core: heartbeats of workers, and looks of proxies at them."""
    return workers * BEATS * BEAT + proxies * LOOKS * (LOOK + workers * LOOK_WORKER)


def proxies_needed(traffic: Traffic, rate: float, workers: int) -> int:
    """The fewest that are within SHARE; 0 when looking at the registry alone takes that much."""
    free = SHARE - LOOKS * (LOOK_PROXY + workers * LOOK_PROXY_WORKER)
    if free <= 0:
        return 0
    # With a token in each message more proxies make no more work: from there on it is a division.
    maximum = math.ceil(rate * (traffic.proxy_seconds + traffic.tokens * traffic.message) / free) + 1

    def enough(proxies: int) -> bool:
        return proxy_share(traffic, rate, workers, proxies) <= SHARE

    return 1 + bisect_left(range(1, maximum), True, key=enough)


def reach(traffic: Traffic, encoders: int, pd_workers: int, rate: float) -> Reach:
    """Of so many workers that serve `rate`."""
    workers = encoders + pd_workers
    proxies = proxies_needed(traffic, rate, workers)
    shares = {
        "proxy": proxy_share(traffic, rate, workers, max(proxies, 1)),
        "store": store_share(traffic, rate),
        "registry": registry_share(workers, max(proxies, 1)),
    }
    one_proxy, store_bytes = proxy_share(traffic, rate, workers, 1), rate * (traffic.saved + traffic.loaded)
    return Reach(workers, f"{encoders}E{pd_workers}PD", rate, proxies, one_proxy, shares, store_bytes)


def curve(
    bounds: Estimate, of_bound: float, traffic: Traffic, workers: Iterable[int] = WORKERS
) -> tuple[Reach, ...]:
    """Every number of workers in its best ratio, serving `of_bound` of its bound."""
    ratios = [best_counts(bounds, count) for count in workers]
    return tuple(reach(traffic, *ratio, of_bound * bounds.bound(*ratio)) for ratio in ratios)


def bottlenecks(
    bounds: Estimate, of_bound: float, traffic: Traffic, maximum: int = WORKERS[-1]
) -> tuple[Bottleneck, ...]:
    """Which parts are full, and when: one proxy; one store and its registry, with all proxies that it takes.

    In the order in which they are met; parts that are never full come last.
    """
    met: dict[str, Bottleneck] = {}
    for point in curve(bounds, of_bound, traffic, range(2, maximum + 1)):
        for part in LIMITS:
            alone = part == "proxy"
            if (point.one_proxy if alone else point.shares[part]) > SHARE and part not in met:
                met[part] = Bottleneck(part, point.workers, point.rate, 1 if alone else point.proxies)
    parts = [met.get(part, Bottleneck(part, None, 0.0, 0)) for part in LIMITS]
    return tuple(sorted(parts, key=lambda one: math.inf if one.workers is None else one.workers))
