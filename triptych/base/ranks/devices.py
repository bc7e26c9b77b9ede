"""The devices of one worker's ranks: a GPU each, or the CPU that all of them share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from triptych.base.errors import ConfigError

#: Ranks of one worker, at most: they are on one machine.
MOST_RANKS = 64


def device_of(device: torch.device, rank: int) -> torch.device:
    """The device of a rank: of a worker on cuda:2, rank 0 has cuda:2, rank 1 cuda:3; a CPU is everyone's."""
    if device.type != "cuda":
        return device
    return torch.device("cuda", (device.index or 0) + rank)


def check_ranks(
    option: str, ranks: int, device: torch.device, gpus: Callable[[], int] = torch.cuda.device_count
) -> None:
    """ConfigError, naming the flag, for a number of ranks that this machine has no devices for."""
    if not 1 <= ranks <= MOST_RANKS:
        raise ConfigError(f"{option} {ranks}: give a number of ranks from 1 to {MOST_RANKS}")
    first = device.index or 0
    if device.type == "cuda" and ranks > 1 and first + ranks > gpus():
        raise ConfigError(
            f"{option} {ranks} from --device {device} on needs GPUs {first} to {first + ranks - 1} and "
            f"{gpus()} are there: lower it, or give the worker more GPUs"
        )
