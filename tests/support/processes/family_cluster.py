"""One store and one proxy for several model families, an encoder and a PD worker each."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from support.data.checkpoints import build_checkpoint
from support.processes.cluster import Cluster, start_cluster, wait_for


class FamilyCluster:
    """Serves a family from the first time that its checkpoint is asked for; `shapes`: words of PD workers."""

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[str, ...]]) -> None:
        self._folder = folder
        self._shapes = shapes
        self._checkpoints: dict[str, Path] = {}

    def start(self, first: str, *words: str) -> Self:
        """Starts the cluster of the family, the proxy with these words."""
        path = self._checkpoints[first] = build_checkpoint(first, self._folder / first)
        words = ("--threads", "1", *words, *self._shapes.get(first, ()))
        self.cluster: Cluster = start_cluster(path, self._folder / "run", *words)
        return self

    def checkpoint(self, family: str) -> Path:
        """The checkpoint that is served as `family`."""
        if family not in self._checkpoints:
            path = self._checkpoints[family] = build_checkpoint(family, self._folder / family)
            words = (str(path), "--threads", "1")
            self.cluster.add_worker("encoder", *words, "--prepared-memory", "64MiB")
            memory = ("--kv-memory", "64MiB", "--encoder-cache-memory", "32MiB")
            self.cluster.add_worker("pd", *words, *memory, *self._shapes.get(family, ()))
            wait_for(f"{family} to be served", self._all_served)
        return self._checkpoints[family]

    def _all_served(self) -> bool:
        time.sleep(0.5)  # a look at the registry is dear, and the workers need the cores
        names = self.cluster.models().keys()
        encoders = [worker for worker in self.cluster.workers() if worker.pool == "encoder"]
        return names == self._checkpoints.keys() and len(encoders) == len(names)
