"""How many threads torch computes with in a worker."""

from __future__ import annotations

import contextlib

import torch

from triptych.machine.resources import usable_cpus


def use_threads(count: int) -> None:
    """`count` threads within an operator; between operators as many as there are CPUs, once in a process."""
    torch.set_num_threads(count)
    # Torch takes the second number once, and raises from then on.
    with contextlib.suppress(RuntimeError):
        torch.set_num_interop_threads(usable_cpus())
