"""Names of workers, as the page, `top` and failures show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from triptych.proxy.live.objects import short_address
from triptych.proxy.workers import Worker

#: Names that are kept of workers that have gone: records of requests name them too.
MAX_NAMES = 1024


class WorkerNames:
    """Names by address: the one that the worker reports, its short address until then.

    Two workers of one pool with one name, as on two machines, have their address behind it.
    """

    def __init__(self, workers: Mapping[tuple[str, str], Worker]) -> None:
        self._workers = workers
        self._names: dict[str, str] = {}

    def poll(self) -> None:
        """Reads the names that workers have reported."""
        loads = {key: worker.load for key, worker in self._workers.items()}
        named = {key: load.name for key, load in loads.items() if load is not None and load.name}
        counts = Counter((pool, name) for (pool, _), name in named.items())
        for (pool, address), name in named.items():
            self._names.pop(address, None)
            alone = counts[pool, name] == 1
            self._names[address] = name if alone else f"{name} ({short_address(address)})"
        while len(self._names) > max(MAX_NAMES, len(named)):
            del self._names[next(iter(self._names))]

    def __call__(self, address: str) -> str:
        return self._names.get(address) or short_address(address)
