"""Cores for the workers of one machine: pinned to their own, or shared by rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from triptych.config import ServeConfig, WorkerRange
from triptych.errors import ConfigError

#: Encoders that share a machine's cores, at most: more copies of a tower's weights gain little.
_MOST_ENCODERS = 4


def assign_cores(
    available: Collection[int],
    workers: int,
    each: int,
    *,
    quota: float | None = None,
    nodes: Sequence[Collection[int]] = (),
) -> list[str]:
    """The --cpus of each worker, `each` cores for one; ConfigError where there are too few. 0: no pinning.

    `quota` is how many are paid for, if not all. A worker's cores are of one of the NUMA `nodes` as long as
    there are such.
    """
    if not each:
        return [""] * workers
    needed = workers * each
    there = len(available) if quota is None else min(int(quota), len(available))
    if needed > there:
        raise ConfigError(
            f"--cpus-per-worker {each} needs {needed} cores for {workers} workers and {there} are "
            "there: lower it, start fewer workers, or leave it out"
        )
    return [",".join(map(str, cores)) for cores in _together(available, each, nodes)[:workers]]


def _together(available: Collection[int], each: int, nodes: Sequence[Collection[int]]) -> list[list[int]]:
    """`each` cores at a time: first those of one node, then what the nodes have left."""
    whole: list[list[int]] = []
    left = set(available)
    for node in nodes:
        own = sorted(left & set(node))
        whole += [own[i : i + each] for i in range(0, len(own) - each + 1, each)]
        left -= set(own[: len(own) // each * each])
    rest = sorted(left)
    return whole + [rest[i : i + each] for i in range(0, len(rest) - each + 1, each)]


def proxy_cores(available: Collection[int], pd_workers: int) -> str:
    """The proxy's --cpus: not the last ones, which PD workers keep to (--keep-core); "" for all."""
    cores = sorted(available)
    left = cores[: max(1, len(cores) - pd_workers)]
    return ",".join(map(str, left)) if len(left) < len(cores) else ""


def share_cores(config: ServeConfig, cores: int) -> ServeConfig:
    """The config with what it leaves open: --cpu-sharing auto, and 0 as --encoders and --encoder-threads.

    Where encoders and PD workers share the cores of one machine and nothing else was asked for, towers get a
    thread on every core, in as many encoders as that takes (`pace`).
    """
    sharing = config.cpu_sharing
    if sharing == "auto":
        shared = config.topology == "epd" and config.pd.device == "cpu" and not config.cpus_per_worker
        sharing = "pace" if shared else "free"
    encoders = config.encoders
    if not encoders.most:
        encoders = WorkerRange.fixed(min(cores, _MOST_ENCODERS) if sharing == "pace" else 1)
    threads = config.encoder_threads or config.encoder.threads
    if not threads and sharing == "pace":
        # Never all cores for one of them: each of its layers would end with the core that is taken away.
        threads = max(1, cores // max(encoders.most, 2))
    return replace(config, cpu_sharing=sharing, encoders=encoders, encoder_threads=threads)


def check_sharing(config: ServeConfig) -> None:
    """ConfigError for a --cpu-sharing that the other flags leave nothing to do."""
    sharing = config.cpu_sharing
    if sharing == "free":
        return
    if config.cpus_per_worker:
        raise ConfigError(
            f"--cpu-sharing {sharing} and --cpus-per-worker contradict each other: leave one of them out"
        )
    if config.topology != "epd":
        raise ConfigError(f"--cpu-sharing {sharing} is for --topology epd: replicas take turns anyway")
