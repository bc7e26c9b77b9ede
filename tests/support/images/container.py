"""A container by crun: what the image says, with a read-only root, no capabilities and the host's network.

It has a process tree of its own, so that the image's command is process 1, as in Docker and Kubernetes.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.processes.cluster import PATIENCE

#: crun takes a machine with version 2 of cgroups alone; where both are mounted it gets a view of the second.
_CRUN = """
if [ "$(stat -f -c %T /sys/fs/cgroup)" != cgroup2fs ]; then
  umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup
fi
exec crun "$@"
"""
_TMPFS = ("nosuid", "nodev", "mode=1777")
_MOUNTS = (("/proc", "proc", ()), ("/dev", "tmpfs", ("nosuid", "mode=755")), ("/dev/shm", "tmpfs", _TMPFS))


class Container:
    """A running container of an image, given as its configuration and files, with `words` as its command."""

    def __init__(
        self,
        folder: Path,
        name: str,
        image: tuple[Mapping[str, Any], Path],
        words: Sequence[str],
        variables: Mapping[str, str] | None = None,
        *,
        writable_tmp: bool = True,
    ) -> None:
        self._folder, self.name, self._state = folder / name, name, folder / "crun"
        self._configuration, root = image
        self._folder.mkdir()
        self.log = self._folder / "log"
        bundle = _bundle(self._configuration, root, words, variables or {})
        bundle["mounts"] += [_mount("/tmp", "tmpfs", _TMPFS)] if writable_tmp else []
        (self._folder / "config.json").write_text(json.dumps(bundle))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._crun("run", "-b", str(self._folder), name),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def ended(self) -> bool:
        """Whether the container's first process has ended."""
        return self.process.poll() is not None

    def pid(self) -> int:
        """The first process as the host counts it; 0 while there is none."""
        done = subprocess.run(self._crun("state", self.name), capture_output=True, text=True, timeout=60)
        return int(json.loads(done.stdout)["pid"]) if done.returncode == 0 else 0

    def terminate(self) -> None:
        """Sends the image's stop signal."""
        signal = str(self._configuration["StopSignal"])
        subprocess.run(self._crun("kill", self.name, signal), check=True, capture_output=True, timeout=60)

    def wait(self) -> int:
        """The exit code, when the container has ended."""
        return self.process.wait(PATIENCE)

    def healthy(self) -> bool:
        """What the image's HEALTHCHECK says inside the container."""
        word, *command = self._configuration["Healthcheck"]["Test"]
        assert word == "CMD"
        done = subprocess.run(self._crun("exec", self.name, *command), capture_output=True, timeout=60)
        return done.returncode == 0

    def stop(self) -> None:
        """Kills what still runs."""
        subprocess.run(self._crun("delete", "-f", self.name), capture_output=True, timeout=60)
        self.process.wait(60)

    def _crun(self, *words: str) -> list[str]:
        options = ("--root", str(self._state), "--cgroup-manager=disabled")
        return ["unshare", "-m", "sh", "-c", _CRUN, "sh", *options, *words]


def _mount(place: str, kind: str, options: Sequence[str]) -> dict[str, Any]:
    return {"destination": place, "type": kind, "source": kind, "options": list(options)}


def _bundle(
    configuration: Mapping[str, Any], root: Path, words: Sequence[str], variables: Mapping[str, str]
) -> dict[str, Any]:
    """The configuration that an OCI runtime reads."""
    user, group = (int(part) for part in configuration["User"].split(":"))
    kinds = ("bounding", "effective", "inheritable", "permitted", "ambient")
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": user, "gid": group},
            "args": [*configuration["Entrypoint"], *(words or configuration["Cmd"])],
            "env": [*configuration["Env"], *(f"{key}={value}" for key, value in variables.items())],
            "cwd": configuration["WorkingDir"],
            "noNewPrivileges": True,
            "capabilities": {kind: [] for kind in kinds},
        },
        "root": {"path": str(root), "readonly": True},
        "mounts": [_mount(*mount) for mount in _MOUNTS],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")]},
    }
