"""`python -m triptych.base.machine.device_probe`: the GPUs torch sees and their memory, as JSON.

In a process of its own, since a process that opens a GPU occupies some of its memory until it ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from triptych.base.errors import ConfigError

#: Timeout of a process that imports torch and opens every GPU of a large machine.
_SECONDS = 180.0
_PROBE = (sys.executable, "-m", "triptych.base.machine.device_probe")


@dataclass(frozen=True, slots=True)
class ProbedGpu:
    """A GPU: its torch name, its bytes, and those that any process can still allocate."""

    name: str
    free: int
    total: int


def probe_devices(flag: str, command: Sequence[str] = _PROBE) -> list[ProbedGpu]:
    """All GPUs, by a process that has ended; ConfigError, of --device `flag`, where it fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
        return [
            ProbedGpu(str(one["name"]), int(one["free"]), int(one["total"])) for one in json.loads(run.stdout)
        ]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--device {flag}: the GPUs cannot be queried ({type(error).__name__})") from error


def probe() -> list[ProbedGpu]:
    """The visible devices in torch's order, which CUDA_VISIBLE_DEVICES decides."""
    import torch

    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    return [ProbedGpu(f"cuda:{index}", *torch.cuda.mem_get_info(index)) for index in range(count)]


if __name__ == "__main__":
    sys.stdout.write(json.dumps([asdict(gpu) for gpu in probe()]) + "\n")
