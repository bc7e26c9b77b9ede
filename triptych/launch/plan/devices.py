"""Placement of workers on the GPUs of one machine: a device and a share of its memory for each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.config import CUDA_SHARE, format_size
from triptych.errors import ConfigError

#: Timeout of a process that imports torch and opens every GPU of a large machine.
_PROBE_SECONDS = 180.0
_PROBE = (sys.executable, "-m", "triptych.launch.plan.device_probe")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: its torch name, and its free bytes before any worker starts."""

    name: str
    free: int

    @property
    def usable(self) -> int:
        """Bytes that all workers on it may use together."""
        return int(self.free * CUDA_SHARE)


@dataclass(frozen=True, slots=True)
class Need:
    """The least bytes that a worker needs. One that `grows` uses more for its KV cache."""

    worker: str
    least: int
    grows: bool


@dataclass(frozen=True, slots=True)
class Share:
    """A worker's device, and the bytes of its memory that the worker may use."""

    worker: str
    device: str
    nbytes: int


def find_devices(flag: str, command: Sequence[str] = _PROBE) -> list[Gpu]:
    """The devices that --device `cuda` or `cuda:N` selects; ConfigError if there are none."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True)
        found = [Gpu(str(one["name"]), int(one["free"])) for one in json.loads(run.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--device {flag}: the GPUs cannot be queried ({type(error).__name__})") from error
    wanted = [device for device in found if flag in ("cuda", device.name)]
    if not wanted:
        names = ", ".join(device.name for device in found) or "no CUDA device"
        raise ConfigError(
            f"--device {flag}: this torch finds {names}; use --device cpu, cuda or one of these"
        )
    return wanted


def place_workers(devices: Sequence[Gpu], needs: Sequence[Need]) -> list[Share]:
    """A device and a share of its memory for each of `needs`, in their order.

    Workers with a KV cache come first, each on the device with the fewest of them; then the others, each on
    the device with the fewest workers. Memory that is left on a device is divided equally among its KV
    caches, or among its workers if it has none. ConfigError, with the table, when a worker does not fit.
    """
    placed: dict[str, list[Need]] = {device.name: [] for device in devices}
    # The largest first: small workers fit anywhere.
    for need in sorted(needs, key=lambda one: (not one.grows, -one.least)):
        fitting = [one for one in devices if _left(one, placed[one.name]) >= need.least]
        if not fitting:
            raise ConfigError(
                f"{need.worker} needs {format_size(need.least)} of a GPU at least, and none has that left: "
                f"start fewer workers, or give more GPUs or a smaller --kv-memory\n{_table(devices, placed)}"
            )
        chosen = min(fitting, key=lambda one: _rank(one, placed[one.name], need))
        placed[chosen.name].append(need)
    shares = {
        need.worker: Share(need.worker, device.name, need.least + _extra(device, placed[device.name], need))
        for device in devices
        for need in placed[device.name]
    }
    return [shares[need.worker] for need in needs]


def share_table(devices: Sequence[Gpu], shares: Sequence[Share]) -> str:
    """One line per device and worker, for people."""
    lines: list[str] = []
    for device in devices:
        lines.append(
            f"  {device.name:<12}  {format_size(device.usable):>12} of {format_size(device.free)} free"
        )
        own = [share for share in shares if share.device == device.name]
        lines += [f"    {share.worker:<10}  {format_size(share.nbytes):>12}" for share in own]
    return "\n".join(lines)


def _rank(device: Gpu, there: Sequence[Need], need: Need) -> tuple[int, int]:
    alike = [other for other in there if other.grows or not need.grows]
    return len(alike), -_left(device, there)


def _left(device: Gpu, there: Sequence[Need]) -> int:
    return device.usable - sum(need.least for need in there)


def _extra(device: Gpu, there: Sequence[Need], need: Need) -> int:
    takers = [other for other in there if other.grows] or there
    return _left(device, there) // len(takers) if need in takers else 0


def _table(devices: Sequence[Gpu], placed: dict[str, list[Need]]) -> str:
    shares = [Share(need.worker, name, need.least) for name, there in placed.items() for need in there]
    return share_table(devices, shares)
