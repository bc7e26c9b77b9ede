"""The port to a vLLM engine: one call per request, and questions after its life."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from triptych.pd_worker.vllm.port.call import EngineCall
from triptych.pd_worker.vllm.port.chunks import StreamChunk


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What vLLM says of itself."""

    version: str
    model: str
    root: str
    max_model_len: int


class EngineClient(Protocol):
    """Calls of one vLLM engine, in one event loop. All of them raise EngineError for what goes wrong."""

    async def info(self) -> EngineInfo:
        """Version and model of vLLM."""
        ...

    async def check_health(self) -> None:
        """Returns where the engine lives."""
        ...

    async def steps(self) -> bytes:
        """A word that changes with every step of the engine; empty where that is not known."""
        ...

    async def probe(self, timeout: float) -> None:
        """Has the engine generate one token."""
        ...

    def generate(self, call: EngineCall) -> AbstractAsyncContextManager[AsyncIterator[StreamChunk]]:
        """The tokens of a call as they come. Leaving the context ends the request in vLLM, too."""
        ...

    async def close(self) -> None: ...
