"""The GPUs of a vLLM of the worker's own: those it sees, whether they are free, the locks of its start."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

import torch

from triptych.base.config import CUDA_CONTEXT_BYTES, PDConfig, format_size
from triptych.base.errors import ConfigError
from triptych.base.machine.device import Device
from triptych.base.machine.device_probe import ProbedGpu, probe_devices
from triptych.base.machine.start_lock import StartLock

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def devices_of(config: PDConfig) -> list[str]:
    """The torch names of the worker's GPUs, one for each rank; none on a CPU."""
    kind, _, first = config.device.partition(":")
    if kind != "cuda":
        return []
    return [f"cuda:{int(first or 0) + rank}" for rank in range(config.tensor_parallel)]


def visible_devices(config: PDConfig, given: str | None) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of vLLM, which counts its GPUs from 0; `given` is this process's own.

    ConfigError where that names fewer GPUs than the ranks need.
    """
    devices = devices_of(config)
    if not devices:
        return {}
    numbers = [int(name.partition(":")[2]) for name in devices]
    if given is None:
        return {_VISIBLE: ",".join(map(str, numbers))}
    known = [one.strip() for one in given.split(",") if one.strip()]
    if numbers[-1] >= len(known):
        raise ConfigError(
            f"--device {config.device} with --tensor-parallel {config.tensor_parallel} takes {devices[0]} to "
            f"{devices[-1]}, and {_VISIBLE}={given} has {len(known)}: name more there, or a lower --device"
        )
    return {_VISIBLE: ",".join(known[number] for number in numbers)}


def held_elsewhere(devices: Sequence[str], gpus: Sequence[ProbedGpu]) -> str:
    """Why vLLM should not take its share of these whole GPUs; "" where they are free."""
    for gpu in gpus:
        # What the probe itself takes, and no more than a driver keeps beside it.
        held = gpu.total - gpu.free - 2 * CUDA_CONTEXT_BYTES
        if gpu.name in devices and held > 0:
            return (
                f"another process holds memory of {gpu.name}: {format_size(gpu.free)} of "
                f"{format_size(gpu.total)} are free, and vLLM takes its share of the whole: give "
                "--device-memory, to each worker on it, or another --device"
            )
    return ""


class EngineGpus:
    """The GPUs of one worker, claimed while its vLLM starts: what others take then, vLLM would count."""

    def __init__(self, config: PDConfig, probe: Callable[[str], Sequence[ProbedGpu]] = probe_devices) -> None:
        #: What vLLM's environment has besides this process's.
        self.environment = visible_devices(config, os.environ.get(_VISIBLE))
        self._device, self._probe = config.device, probe
        # A worker that is given its share shares the GPU by that.
        self._devices = [] if config.device_memory else devices_of(config)
        self._checked = False
        self._held: list[StartLock] = []

    def names(self) -> list[str]:
        """The names of their locks, in one order for all workers: nobody waits in a circle."""
        return sorted({Device.of(torch.device(name)).start_name for name in self._devices})

    async def claim(self) -> None:
        """Waits while other workers start on one of them. ConfigError, the first time, where one is taken."""
        for name in self.names():
            self._held.append(StartLock(name))
            await self._held[-1].acquired()
        if self._devices and not self._checked:
            self._checked = True
            held = held_elsewhere(self._devices, await asyncio.to_thread(self._probe, self._device))
            if held:
                raise ConfigError(f"--device {self._device}: {held}")

    def release(self) -> None:
        """Lets the next worker start. Idempotent."""
        while self._held:
            self._held.pop().release()
