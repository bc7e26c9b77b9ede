"""Placement of workers on the GPUs of one machine: a device and a share of its memory for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.base.config import CUDA_SHARE, format_size
from triptych.base.errors import ConfigError
from triptych.base.machine.device_probe import ProbedGpu, probe_devices


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
    """The least bytes that a worker needs. One that `grows` uses more for its KV cache.

    A worker of several `ranks` needs as much on each of as many GPUs, whose numbers follow one another.
    """

    worker: str
    minimum: int
    grows: bool
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Share:
    """A worker's device, and the bytes of its memory that the worker may use.

    Of several ranks, the device is that of the first one, and the bytes are those of each.
    """

    worker: str
    device: str
    nbytes: int
    ranks: int = 1


def find_devices(flag: str, probe: Callable[[str], Sequence[ProbedGpu]] = probe_devices) -> list[Gpu]:
    """The devices that --device `cuda` or `cuda:N` selects; ConfigError if there are none."""
    gpus = [Gpu(one.name, one.free) for one in probe(flag)]
    selected = [device for device in gpus if flag in ("cuda", device.name)]
    if not selected:
        names = ", ".join(device.name for device in gpus) or "no CUDA device"
        raise ConfigError(
            f"--device {flag}: this torch finds {names}; use --device cpu, cuda or one of these"
        )
    return selected


def place_workers(devices: Sequence[Gpu], needs: Sequence[Need]) -> list[Share]:
    """A device and a share of its memory for each of `needs`, in their order.

    Workers with a KV cache come first, each on the device with the fewest of them; then the others, each on
    the device with the fewest workers. Memory that is left on a device is divided equally among its KV
    caches, or among its workers if it has none; ranks of one worker all get what the least of them gets.
    ConfigError, with the table, when a worker does not fit.
    """
    placed: dict[str, list[Need]] = {device.name: [] for device in devices}
    chosen: dict[str, Sequence[Gpu]] = {}
    # Most ranks first, then the largest: small workers fit anywhere.
    for need in sorted(needs, key=lambda one: (-one.ranks, not one.grows, -one.minimum)):
        fitting = [
            rows
            for rows in _neighbours(devices, need.ranks)
            if all(_left(one, placed[one.name]) >= need.minimum for one in rows)
        ]
        if not fitting:
            raise ConfigError(f"{_unmet(need)}\n{_table(devices, placed)}")
        best = min(fitting, key=lambda rows: max(_crowd(one, placed[one.name], need) for one in rows))
        chosen[need.worker] = best
        for one in best:
            placed[one.name].append(need)
    return [
        Share(
            need.worker,
            chosen[need.worker][0].name,
            need.minimum + min(_extra(one, placed[one.name], need) for one in chosen[need.worker]),
            need.ranks,
        )
        for need in needs
    ]


def _neighbours(devices: Sequence[Gpu], count: int) -> list[Sequence[Gpu]]:
    """All rows of `count` devices with numbers that follow one another, as a worker's ranks count them."""
    rows = [devices[first : first + count] for first in range(len(devices) - count + 1)]
    return [row for row in rows if _number(row[-1]) - _number(row[0]) == count - 1]


def _number(device: Gpu) -> int:
    return int(device.name.partition(":")[2] or 0)


def _unmet(need: Need) -> str:
    if need.ranks == 1:
        where, more = "a GPU at least, and none has that left", "start fewer workers, or give more GPUs or"
    else:
        where = f"each of {need.ranks} GPUs in a row at least, and no such row has that left"
        more = "start fewer workers or ranks, or give more GPUs or"
    return f"{need.worker} needs {format_size(need.minimum)} of {where}: {more} a smaller --kv-memory"


def share_table(devices: Sequence[Gpu], shares: Sequence[Share]) -> str:
    """One line per device and worker, for people."""
    lines: list[str] = []
    for device in devices:
        lines.append(
            f"  {device.name:<12}  {format_size(device.usable):>12} of {format_size(device.free)} free"
        )
        own = [share for share in shares if device.name in _devices(share)]
        lines += [f"    {share.worker:<10}  {format_size(share.nbytes):>12}" for share in own]
    return "\n".join(lines)


def _devices(share: Share) -> list[str]:
    """The device of each rank."""
    if share.ranks == 1:
        return [share.device]
    kind, _, first = share.device.partition(":")
    return [f"{kind}:{int(first or 0) + rank}" for rank in range(share.ranks)]


def _crowd(device: Gpu, there: Sequence[Need], need: Need) -> tuple[int, int]:
    alike = [other for other in there if other.grows or not need.grows]
    return len(alike), -_left(device, there)


def _left(device: Gpu, there: Sequence[Need]) -> int:
    return device.usable - sum(need.minimum for need in there)


def _extra(device: Gpu, there: Sequence[Need], need: Need) -> int:
    takers = [other for other in there if other.grows] or there
    return _left(device, there) // len(takers) if need in takers else 0


def _table(devices: Sequence[Gpu], placed: dict[str, list[Need]]) -> str:
    shares = [Share(need.worker, name, need.minimum) for name, there in placed.items() for need in there]
    return share_table(devices, shares)
