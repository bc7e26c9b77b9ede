"""The cgroup folders of this process, which hold its limits, for versions 1 and 2. Linux only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class _Mount:
    """One mounted cgroup hierarchy; `controllers` is empty for version 2."""

    controllers: frozenset[str]
    inside: str
    point: Path


def folders(controller: str, root: Path) -> Iterator[Path]:
    """The folders of a controller's cgroups: the process's own first, then those above it, of both versions.

    All files are read below `root`.
    """
    paths = _own_paths(root)
    for mount in _mounts(root):
        if mount.controllers and controller not in mount.controllers:
            continue
        path = next((own for names, own in paths if _same(names, mount)), "/")
        yield from _upwards(mount, path, root)


def _same(names: frozenset[str], mount: _Mount) -> bool:
    """Whether a line of /proc/self/cgroup belongs to this mount, whose options include its controllers."""
    return names <= mount.controllers if names else not mount.controllers


def _upwards(mount: _Mount, path: str, root: Path) -> Iterator[Path]:
    """From the cgroup at `path` up to where the hierarchy is mounted."""
    top = root / str(mount.point).lstrip("/")
    inside = path.removeprefix(mount.inside.rstrip("/")).strip("/")
    folder = top / inside
    if ".." in Path(inside).parts or not folder.is_dir():
        # In a container the mount's root is its own cgroup, under another path than on the host.
        folder = top
    yield folder
    while folder != top:
        folder = folder.parent
        yield folder


def _own_paths(root: Path) -> list[tuple[frozenset[str], str]]:
    """Controllers and path of the process's cgroups; no controllers for version 2."""
    lines = read_text(root / "proc/self/cgroup").splitlines()
    split = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return [(frozenset(filter(None, names.split(","))), path) for _, names, path in split]


def _mounts(root: Path) -> list[_Mount]:
    found: list[_Mount] = []
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, dash, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if not dash or len(fields) < 5 or len(kinds) < 3 or kinds[0] not in ("cgroup", "cgroup2"):
            continue
        names = frozenset(kinds[2].split(",")) if kinds[0] == "cgroup" else frozenset()
        found.append(_Mount(names, _unescaped(fields[3]), Path(_unescaped(fields[4]))))
    return found


def _unescaped(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def read_text(file: Path) -> str:
    """The content of a file; "" where it cannot be read."""
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
