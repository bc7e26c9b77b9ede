"""Kind of a worker: the device that it computes on, in one line. Workers of one kind are equally fast."""

from __future__ import annotations

import platform
from pathlib import Path

from triptych.base.errors import ConfigError

#: Longest kind, in characters: it is part of registrations and a label of metrics.
MAX_KIND_CHARS = 100


def worker_kind(given: str, device: str, threads: int, *, ranks: int = 1, root: Path = Path("/")) -> str:
    """--worker-kind, or what the device says: "cpu AMD EPYC 9B14 x2 threads", "cuda NVIDIA H200 x4 ranks"."""
    if given:
        if len(given) > MAX_KIND_CHARS or not given.isprintable():
            raise ConfigError(
                f"--worker-kind has {len(given)} characters: use up to {MAX_KIND_CHARS} printable ones"
            )
        return given
    shared = f" x{ranks} ranks" if ranks > 1 else ""
    if device.startswith("cuda"):
        return _short(f"cuda {_gpu_name(device)}{shared}")
    return _short(f"{device} {_cpu_name(root)} x{threads} threads{shared}")


def _gpu_name(device: str) -> str:
    # Not at the top: proxies import no torch.
    import torch

    return str(torch.cuda.get_device_name(device))


def _cpu_name(root: Path) -> str:
    """The CPU's model by /proc/cpuinfo; its architecture where that names none."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    fields = (line.partition(":") for line in text.splitlines())
    names = (value.strip() for field, _, value in fields if field.strip() == "model name")
    return next((name for name in names if name), platform.machine())


def _short(kind: str) -> str:
    printable = "".join(character for character in kind if character.isprintable())
    return " ".join(printable.split())[:MAX_KIND_CHARS]
