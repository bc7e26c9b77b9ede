"""Cores for the workers of one machine: pinned to their own, or shared by rank."""

from __future__ import annotations

from collections.abc import Collection

from triptych.errors import ConfigError


def assign_cores(available: Collection[int], workers: int, each: int) -> list[str]:
    """The --cpus of each worker, `each` cores for one; ConfigError where there are too few. 0: no pinning."""
    if not each:
        return [""] * workers
    needed = workers * each
    if needed > len(available):
        raise ConfigError(
            f"--cpus-per-worker {each} needs {needed} cores for {workers} workers and {len(available)} are "
            "there: lower it, start fewer workers, or leave it out"
        )
    cores = sorted(available)
    return [",".join(map(str, cores[i * each : (i + 1) * each])) for i in range(workers)]


def check_sharing(sharing: str, *, cpus_per_worker: int, topology: str) -> None:
    """ConfigError for a --cpu-sharing that the other flags leave nothing to do."""
    if sharing == "free":
        return
    if cpus_per_worker:
        raise ConfigError(
            f"--cpu-sharing {sharing} and --cpus-per-worker contradict each other: leave one of them out"
        )
    if topology != "epd":
        raise ConfigError(f"--cpu-sharing {sharing} is for --topology epd: replicas take turns anyway")
