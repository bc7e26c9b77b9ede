"""The devices of one worker's ranks, and their torch.distributed group: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from triptych.base.errors import ConfigError
from triptych.base.machine.device import Device

#: Both listen for their peers, and neither asks who connects: on this machine alone.
_INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def join(descriptor: int, rank: int, size: int, device: torch.device, *, seconds: float) -> dist.ProcessGroup:
    """The default process group of this process, as `rank` of `size`; returns when all have joined.

    `descriptor` is an anonymous file that all ranks have inherited: its name in /proc, which no other user
    can open, takes the place of a port or a folder. Joining, and later each collective, may take `seconds`;
    then they raise a RuntimeError (DistBackendError, DistStoreError), also where a rank has died. A group
    that has raised is of no use any more: raise RankLost.

    On CUDA `device` is this rank's own; see `devices.device_of`.
    """
    for variable, interface in _INTERFACES.items():
        os.environ.setdefault(variable, interface)
    timeout = timedelta(seconds=seconds)
    # Exported by torch, but not for type checkers.
    store = dist.FileStore(f"/proc/self/fd/{descriptor}", size)  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    owner = Device.of(device)
    dist.init_process_group(
        owner.collectives,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=None if owner.on_host else device,
    )
    group = dist.group.WORLD
    assert group is not None
    return group


def leave() -> None:
    """Leaves the group, if this process is in one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


#: Ranks of one worker, at most: they are on one machine.
MAX_RANKS = 64


def device_of(device: torch.device, rank: int) -> torch.device:
    """The device of a rank: of a worker on cuda:2, rank 0 has cuda:2, rank 1 cuda:3; a CPU is everyone's."""
    if Device.of(device).on_host:
        return device
    return torch.device(device.type, (device.index or 0) + rank)


def check_ranks(
    option: str, ranks: int, device: torch.device, gpus: Callable[[], int] = torch.cuda.device_count
) -> None:
    """ConfigError, naming the flag, for a number of ranks that this machine has no devices for."""
    if not 1 <= ranks <= MAX_RANKS:
        raise ConfigError(f"{option} {ranks}: give a number of ranks from 1 to {MAX_RANKS}")
    first = device.index or 0
    if not Device.of(device).on_host and ranks > 1 and first + ranks > gpus():
        raise ConfigError(
            f"{option} {ranks} from --device {device} on needs GPUs {first} to {first + ranks - 1} and "
            f"{gpus()} are there: lower it, or give the worker more GPUs"
        )
