"""CPU cores of the workers of one machine: pinned or shared."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from triptych.base.config import ServeConfig, WorkerRange
from triptych.base.errors import ConfigError

#: Most encoders that share a machine's cores: more copies of the tower's weights gain little.
_MAX_ENCODERS = 4


def assign_cores(
    available: Collection[int],
    workers: int,
    each: int,
    *,
    quota: float | None = None,
    nodes: Sequence[Collection[int]] = (),
) -> list[str]:
    """The --cpus of each worker, `each` cores per worker; ConfigError for too few. 0: no pinning.

    `quota` is the CPU quota, if there is one. The cores of a worker are of one of the NUMA `nodes` while
    enough are left in one.
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
    """Groups of `each` cores: first within nodes, then of the cores that the nodes have left."""
    whole: list[list[int]] = []
    left = set(available)
    for node in nodes:
        own = sorted(left & set(node))
        whole += [own[i : i + each] for i in range(0, len(own) - each + 1, each)]
        left -= set(own[: len(own) // each * each])
    rest = sorted(left)
    return whole + [rest[i : i + each] for i in range(0, len(rest) - each + 1, each)]


def proxy_cores(available: Collection[int], pd_workers: int) -> str:
    """The proxy's --cpus: without the last ones, to which PD workers are pinned (--keep-core); "" for all."""
    cores = sorted(available)
    left = cores[: max(1, len(cores) - pd_workers)]
    return ",".join(map(str, left)) if len(left) < len(cores) else ""


def share_cores(config: ServeConfig, cores: int) -> ServeConfig:
    """The config with values for --cpu-sharing auto, and for 0 as --encoders and --encoder-threads.

    Where encoders and PD workers share the cores of one machine, and no flag says otherwise, the sharing is
    `pace`: towers have a thread on every core, in as many encoders as that takes.
    """
    sharing = config.cpu_sharing
    if sharing == "auto":
        shared = config.topology == "epd" and config.pd.device == "cpu" and not config.cpus_per_worker
        sharing = "pace" if shared else "free"
    encoders = config.encoders
    if not encoders.maximum:
        towers = min(cores, _MAX_ENCODERS) if sharing == "pace" else 1
        encoders = WorkerRange.fixed(max(1, towers // config.encoder.encoder_data_parallel))
    threads = given = config.encoder_threads or config.encoder.threads
    if not threads and sharing == "pace":
        # Never all cores for one encoder: each of its layers would wait for the core that a PD worker uses.
        threads = max(1, cores // max(encoders.maximum, 2))
    spare = sharing == "pace"
    return replace(
        config,
        cpu_sharing=sharing,
        encoders=encoders,
        encoder_threads=threads,
        encoder=replace(config.encoder, spare_cores=spare and not given),
        pd=replace(config.pd, spare_cores=spare and not config.pd.threads),
    )


def check_sharing(config: ServeConfig) -> None:
    """ConfigError for a --cpu-sharing that has no effect with the other flags."""
    sharing = config.cpu_sharing
    if sharing == "free":
        return
    if config.cpus_per_worker:
        raise ConfigError(
            f"--cpu-sharing {sharing} and --cpus-per-worker contradict each other: leave one of them out"
        )
    if config.topology != "epd":
        raise ConfigError(f"--cpu-sharing {sharing} is for --topology epd: replicas take turns anyway")
