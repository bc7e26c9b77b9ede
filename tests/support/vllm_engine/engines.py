"""Unmodified vLLM servers on one store, for PD workers to stand in front of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from support.stores.server import StoreServer
from support.vllm_engine.front_door import namespace_of
from support.vllm_engine.server import LIMITS, VllmServer

#: What a PD worker needs of a server.
WORDS = ("--enable-scale-out", "--enable-prompt-tokens-details")


@dataclass
class Engines:
    """A store and the servers that load from it."""

    store: StoreServer
    servers: list[VllmServer]

    @classmethod
    def of(
        cls,
        checkpoint: Path,
        folder: Path,
        count: int,
        role: str = "ec_consumer",
        limits: Mapping[str, int] = LIMITS,
        dtype: str = "float32",
        **options: object,
    ) -> Engines:
        """Not started yet; `options` are further ones of the connector."""
        store = StoreServer(folder / "store")
        namespace = namespace_of(checkpoint, dtype)
        extra = {"store": store.url, "namespace": namespace, "wait_seconds": 2, **options}
        logs = [folder / f"vllm-{number}.log" for number in range(count)]
        words = (*WORDS, "--dtype", dtype)
        return cls(store, [VllmServer(checkpoint, log, role, extra, words, limits) for log in logs])

    def start(self) -> None:
        """Starts the store and one server after the other."""
        self.store.start()
        for server in self.servers:
            server.start()

    def stop(self) -> None:
        """Ends all of them."""
        for server in self.servers:
            server.stop()
        self.store.kill()
