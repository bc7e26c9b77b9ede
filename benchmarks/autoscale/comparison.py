"""All policies on all traces; figures of each trial are kept as JSON; a run that is cut off goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from benchmarks.autoscale.policies import (
    Concurrency,
    CpuPercent,
    FixedSize,
    QueueLength,
    Scaler,
    pd_work,
    work_seconds,
)
from benchmarks.autoscale.pool import ElasticPDPool, ElasticPool, PoolMoment
from benchmarks.autoscale.traces import PEAK_WORKERS, TRACES, Trace, requests_of
from triptych.base.config import GIB, EncoderConfig, PDConfig, ProxyConfig
from triptych.base.errors import ConfigError
from triptych_bench.goodput.measure.figures import percentile
from triptych_bench.goodput.measure.slo import Slo
from triptych_bench.simulator.cluster.shape import Limits, on_devices
from triptych_bench.simulator.costs.costs import (
    QWEN3_VL_4B,
    QWEN3_VL_4B_SHAPE,
    Chip,
    encoder_costs,
    published,
)
from triptych_bench.simulator.run import simulate

STATIC = "static peak"
OURS = "work-seconds (ours)"
#: By name: the scaler for a maximum of workers and their seconds to start. One setting for all traces.
POLICIES: dict[str, Callable[[int, float], Scaler]] = {
    STATIC: lambda maximum, _: FixedSize(maximum),
    OURS: lambda maximum, cold_start: work_seconds(0, maximum, cold_start),
    "HPA, CPU 70 %": lambda maximum, _: CpuPercent(1, maximum),
    "queue length 5 (KEDA)": lambda maximum, _: QueueLength(maximum),
    "concurrency 8 (Knative)": lambda maximum, _: Concurrency(0, maximum, 8),
    "concurrency 2 (Knative)": lambda maximum, _: Concurrency(0, maximum, 2),
    "concurrency 1 (Knative)": lambda maximum, _: Concurrency(0, maximum, 1),
}
#: The trace in which both pools are scaled, in the others one at a time; and what scales PD workers.
BOTH_POOLS = ("azure-lmm",)
PD_POLICIES: dict[str, Callable[[int, float], Scaler]] = {
    STATIC: lambda maximum, _: FixedSize(maximum),
    OURS: pd_work,
    "HPA, CPU 70 %": lambda maximum, _: CpuPercent(1, maximum),
    "queue length 5 (KEDA)": lambda maximum, _: QueueLength(maximum),
    "concurrency 8 (Knative)": lambda maximum, _: Concurrency(1, maximum, 8),
}
#: In front of a policy's name: it scales PD workers, and the encoders are static.
PD_ONLY = "PD: "
COLD_STARTS = (5.0, 60.0)
#: Encoders on CPUs that reach 4 TFLOP/s of bfloat16, and 300 GB/s. Assumed, not measured.
CPU = Chip("a server CPU", 8e12, 300e9, 0.5, 64 * 10**9)
#: The cluster beside them: three PD workers on A100s by their published costs.
PD_WORKERS = 3
COSTS = replace(published("a100-80g"), encoder=encoder_costs(CPU, QWEN3_VL_4B))
LIMITS = Limits(
    proxy=ProxyConfig(max_queue=100_000),
    encoder=EncoderConfig(device="cpu"),
    pd=PDConfig(
        kv_memory=20 * GIB,
        max_num_seqs=256,
        max_model_len=65_536,
        max_num_batched_tokens=2048,
        encoder_cache_memory=4 * GIB,
    ),
    store_memory=64 * GIB,
)
SLO = Slo((("ttft", 10_000.0), ("tpot", 100.0)))
#: A second, stricter look at the same records.
STRICT_SLO = Slo((("ttft", 5_000.0), ("tpot", 100.0)))


@dataclass(frozen=True, slots=True)
class TrialFigures:
    """`strict`: requests within STRICT_SLO. `ttft`: the 99th percentile in seconds."""

    trace: str
    policy: str
    cold_start: float
    requests: int
    good: int
    strict: int
    failures: int
    ttft: float
    seconds: float
    worker_seconds: float
    direction_changes: int
    leftovers: int
    timeline: tuple[PoolMoment, ...]
    #: As those of the encoders, where PD workers are scaled.
    pd_seconds: float = 0.0
    pd_timeline: tuple[PoolMoment, ...] = ()


def measure(trace: Trace, policy: str, cold_start: float, seed: int = 0) -> TrialFigures:
    """One trial, until its last request has ended. A static pool is there from the start.

    Any other begins with one worker; PD workers that are not scaled stay PD_WORKERS.
    """
    pd_only, policy = policy.startswith(PD_ONLY), policy.removeprefix(PD_ONLY)
    static = policy == STATIC
    load, times = requests_of(trace, COSTS.encoder, QWEN3_VL_4B_SHAPE, seed)
    initial = PEAK_WORKERS if static or pd_only else 1
    scaler = POLICIES[STATIC if pd_only else policy](PEAK_WORKERS, cold_start)
    encoders = ElasticPool(scaler, cold_start, initial)
    pools, pd = [encoders], None
    if trace.name in BOTH_POOLS or pd_only:
        pd = ElasticPDPool(PD_POLICIES[policy](PD_WORKERS, cold_start), cold_start)
        pools.append(pd)
    shape = on_devices(0, PD_WORKERS if static or pd is None else 1)
    result = simulate(load, times, shape, COSTS, QWEN3_VL_4B_SHAPE, LIMITS, controllers=pools)
    records, seconds = result.records, result.counters.seconds

    def within(slo: Slo) -> int:
        return sum(not slo.misses(record.latencies()) for record in records)

    return TrialFigures(
        trace=trace.name,
        policy=PD_ONLY * pd_only + policy,
        cold_start=cold_start,
        requests=len(records),
        good=within(SLO),
        strict=within(STRICT_SLO),
        failures=sum(not record.ok for record in records),
        ttft=percentile([record.ttft for record in records if record.ok], 99.0),
        seconds=seconds,
        worker_seconds=encoders.history.worker_seconds(seconds),
        direction_changes=encoders.history.direction_changes,
        leftovers=sum(result.leftovers.values()),
        timeline=encoders.history.changes(),
        pd_seconds=0.0 if pd is None else pd.history.worker_seconds(seconds),
        pd_timeline=() if pd is None else pd.history.changes(),
    )


def trials() -> list[tuple[str, str, float]]:
    """(trace, policy, cold start) of all trials; a static pool starts once."""
    policies: dict[str, list[str]] = {
        trace: list(PD_POLICIES)
        if trace in BOTH_POOLS
        else [*POLICIES, *(PD_ONLY + name for name in PD_POLICIES)]
        for trace in TRACES
    }
    return [
        (trace, policy, cold_start)
        for trace in TRACES
        for policy in policies[trace]
        for cold_start in (COLD_STARTS[:1] if policy.endswith(STATIC) else COLD_STARTS)
    ]


def kept(folder: Path, trial: tuple[str, str, float], seed: int = 0) -> TrialFigures:
    """The trial's figures from the folder, or measured now and written there."""
    name, policy, cold_start = trial
    words = "".join(letter if letter.isalnum() else "-" for letter in policy)
    path = folder / f"{name}-{words}-{cold_start:g}-{seed}.json"
    if not path.is_file():
        result = measure(TRACES[name](), policy, cold_start, seed)
        path.write_bytes(msgspec.json.encode(result))
    try:
        return msgspec.json.decode(path.read_bytes(), type=TrialFigures)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--results {path} holds no trial ({error}): delete it") from None
