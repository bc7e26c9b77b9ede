"""A machine's files below a folder: mounts, cgroups, memory, as `machine.resources` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


class FakeMachine:
    """`cgroups` are the lines of /proc/self/cgroup, `mounts` those of /proc/self/mountinfo."""

    def __init__(self, root: Path, *, cgroups: str = "0::/", mounts: str = V2, meminfo: str = "") -> None:
        self.root = root
        self._write("proc/self/cgroup", cgroups)
        self._write("proc/self/mountinfo", "22 1 0:20 / /proc rw - proc proc rw\n" + mounts)
        self._write("proc/meminfo", meminfo or "MemTotal: 999 kB\nMemAvailable: 8388608 kB\n")

    def group(self, folder: str, files: Mapping[str, object]) -> FakeMachine:
        """Files of one cgroup, or of any other folder."""
        for name, content in files.items():
            self._write(f"{folder}/{name}", f"{content}\n")
        return self

    def _write(self, name: str, content: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
