"""Groups of ranks that do what a test tells them."""

from __future__ import annotations

import sys
from pathlib import Path

from triptych.base.config import EncoderConfig
from triptych.base.ranks.group import RankGroup

COMMAND = (sys.executable, "-m", "support.ranks.process")


def obedient_group(size: int, model: str = "", token: str = "") -> RankGroup:
    """A group whose ranks run `support.ranks.obedient`, not started."""
    return RankGroup("test", size, EncoderConfig(model=model, internal_token=token), command=COMMAND)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    """The processes that a process has started and that have not ended: of a worker, its other ranks."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in tasks for child in file.read_text().split()]
