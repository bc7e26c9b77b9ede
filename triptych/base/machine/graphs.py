"""Graph backends: a function over static buffers, captured once and replayed, on CUDA or as plain calls.

A captured function reads tensors whose addresses and shapes never change, and writes its result into one of
them. On CUDA a replay launches all of its kernels at once; what its Python code decided at capture stays
decided.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from triptych.base.errors import ConfigError
from triptych.base.machine.device import Device

#: Runs before a capture: libraries choose kernels and allocate workspaces in the first ones.
_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A captured function; `replay` computes it again over what its buffers hold now.

    `run` is the function itself: it keeps the buffers allocated, of which a CUDA graph knows addresses only.
    """

    replay: Callable[[], object]
    run: Callable[[], object]


class GraphBackend(ABC):
    """Captures functions that take nothing, read static buffers and write into static buffers."""

    #: The flags' value that names it, one of config.worker.GRAPH_MODES.
    mode: ClassVar[str]

    @abstractmethod
    def capture(self, run: Callable[[], object]) -> CapturedGraph:
        """Captures `run`, which may be called several times for it. Raises what `run` raises."""


class EagerStatic(GraphBackend):
    """Replays by calling the function: the same static buffers on every device, without a graph.

    Capturing costs nothing and calls nothing.
    """

    mode = "static"

    def capture(self, run: Callable[[], object]) -> CapturedGraph:
        return CapturedGraph(replay=run, run=run)


class CudaGraph(GraphBackend):
    """CUDA graphs of one device, which share a memory pool: one is replayed at a time, on one stream.

    So a result has to be copied out of its buffer before the next replay. `run` must not wait for the
    device, move anything to the host, or allocate pinned memory: torch raises RuntimeError for most of that.
    """

    mode = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], object]) -> CapturedGraph:
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    run()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads, which copy embeddings, may allocate meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                run()
        return CapturedGraph(replay=graph.replay, run=run)


def graph_backend(mode: str, device: torch.device, flag: str) -> GraphBackend | None:
    """The backend of `flag`, whose value is `mode`; None for off, and for auto without CUDA.

    ConfigError for cuda on another device.
    """
    captures = Device.of(device).captures
    if mode == "cuda" and not captures:
        raise ConfigError(f"{flag} cuda needs --device cuda, not {device}: use {flag} auto or off")
    if mode == "static":
        return EagerStatic()
    if mode == "cuda" or (mode == "auto" and captures):
        return CudaGraph(device)
    return None
