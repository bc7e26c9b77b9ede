"""Limits of a device: bytes and FLOPs per second, of its data sheet or measured."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.micro.engine_decode import synchronize

#: Bytes read, and the side of the matrices multiplied, to measure a device: small ones are for a CPU.
_READ, _SIDE = {"cpu": 256 << 20, "cuda": 4 << 30}, {"cpu": 1024, "cuda": 8192}
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What a device can do at most, per second: bytes read, and FLOPs in the model's dtype."""

    bandwidth: float
    flops: float

    def said(self) -> str:
        """What a page says before its tables."""
        return (
            f"Limits of the device: {self.bandwidth / 1e9:.0f} GB/s, {self.flops / 1e12:.2f} TFLOP/s. The "
            "share: the time that these allow, divided by the time it took, and the limit that counts."
        )


def add_limit_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `limits_of` reads."""
    parser.add_argument("--peak-tflops", type=float, default=0.0, help="of the data sheet; 0: measured here")
    parser.add_argument("--bandwidth-gbs", type=float, default=0.0, help="likewise, GB/s of its memory")


def limits_of(arguments: argparse.Namespace) -> DeviceLimits:
    """The limits that were given, and measured ones in place of those that were not."""
    given = DeviceLimits(arguments.bandwidth_gbs * 1e9, arguments.peak_tflops * 1e12)
    if given.bandwidth and given.flops:
        return given
    measured = measured_limits(arguments.device, getattr(torch, arguments.dtype))
    return DeviceLimits(given.bandwidth or measured.bandwidth, given.flops or measured.flops)


def measured_limits(device: str, dtype: torch.dtype) -> DeviceLimits:
    """The device's own rates, the best of some rounds: a sum over a large tensor, a product of matrices."""
    limits = DeviceLimits(_bandwidth(device), _flops(device, dtype))
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # what is measured next may be memory
    return limits


def _bandwidth(device: str) -> float:
    nbytes = _READ[torch.device(device).type]
    return nbytes / _best(torch.ones(nbytes // 4, device=device).sum, device)


def _flops(device: str, dtype: torch.dtype) -> float:
    side = _SIDE[torch.device(device).type]
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    return 2 * side**3 / _best(lambda: a @ b, device)


def _best(run: Callable[[], object], device: str) -> float:
    times = []
    for _ in range(_ROUNDS + 1):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])
