"""A program for ranks that does what a test tells it: answers, fails, hangs, dies."""

from __future__ import annotations

import os
import time
from pathlib import Path

from triptych.base.errors import ConfigError
from triptych.base.ranks.channel import Message
from triptych.base.ranks.rank import Rank

FOR_EVER = 3600.0


class Panic(BaseException):
    """What is no Exception, as pyo3's panics are."""


def main(rank: Rank) -> None:
    """Starts, or fails as the model's name says."""
    match rank.config["model"]:
        case "wrong":
            raise ConfigError("--model wrong: choose another one")
        case "broken":
            raise RuntimeError("half a checkpoint")
        case "killed":
            os.kill(os.getpid(), 9)
        case "hangs":
            time.sleep(FOR_EVER)

    def handle(command: Message, descriptors: list[int]) -> Message:
        return _obey(rank, command, descriptors)

    rank.serve(handle, ready={"rank": rank.rank, "config": rank.config})


def _obey(rank: Rank, command: Message, descriptors: list[int]) -> Message:
    match command["do"]:
        case "read":
            return {"texts": [Path(f"/proc/self/fd/{one}").read_text() for one in descriptors]}
        case "raise":
            raise ValueError("the test says so")
        case "panic":
            raise Panic("the test says so")
        case "hang":
            time.sleep(FOR_EVER)
        case "slow":
            with rank.slow():
                time.sleep(FOR_EVER)
        case "descriptors":
            return {"open": len(os.listdir("/proc/self/fd"))}
        case "sum":
            return {"sum": _sum(rank, command["value"], command["seconds"])}
    return {"rank": rank.rank, "size": rank.size, "echo": command}


def _sum(rank: Rank, value: float, seconds: float) -> float:
    """The sum of what each rank of the process group has."""
    import torch

    group = rank.join(torch.device("cpu"), seconds=seconds)
    mine = torch.tensor([value * rank.rank])
    torch.distributed.all_reduce(mine, group=group)
    return float(mine)
