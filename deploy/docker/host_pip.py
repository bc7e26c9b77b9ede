"""Prints the words by which podman and buildah build with this machine's own pip settings.

For machines that have a mirror, a certificate authority or a folder of wheels of their own:
`make images IMAGE_BUILD_ARGS="$(python3 deploy/docker/host_pip.py)"`. The settings are mounted while packages
are installed and are no part of the images.
"""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Settings of pip that say where packages come from.
_KEYS = ("cert", "client-cert", "extra-index-url", "find-links", "index-url", "proxy", "retries", "timeout")


def settings(listing: str) -> dict[str, str]:
    """What `pip config list` says of where packages come from; a variable wins over a file."""
    result: dict[str, str] = {}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        key = key.removeprefix("default-")
        if key in _KEYS and (section == ":env:" or key not in result):
            result[key] = ast.literal_eval(value)
    return result


def local_paths(settings: Mapping[str, str]) -> Iterator[Path]:
    """The folders and files of this machine that the settings name."""
    for key, value in settings.items():
        for word in value.split():
            url = urlsplit(word)
            if url.scheme == "file" or word.startswith("/"):
                path = Path(unquote(url.path))
                # The files of an index lie beside its pages.
                yield path.parent if key.endswith("index-url") else path


def configuration(settings: Mapping[str, str]) -> str:
    """The settings as a pip.conf."""
    return "\n".join(
        ["[global]", *(f"{key} = {' '.join(value.split())}" for key, value in settings.items()), ""]
    )


def main() -> None:
    """Writes the settings, which may hold a password, to a file of this user and prints the mounts."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    result = settings(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    file = Path.home() / ".cache" / "triptych" / "images-pip.conf"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(mode=0o600)
    file.write_text(configuration(result), encoding="utf-8")
    mounts = [(file, Path("/etc/pip.conf")), *((path, path) for path in sorted(set(local_paths(result))))]
    print(*(f"--volume {shlex.quote(f'{source}:{target}:ro')}" for source, target in mounts))


if __name__ == "__main__":
    main()
