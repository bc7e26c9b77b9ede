"""Container images, really built: by Debian's buildah, in a storage of their own, on Debian's packages."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "deploy" / "docker"
BASE = "docker.io/library/python:3.11-slim"
#: Longest build, in seconds; a busy machine takes ten minutes for the workers'.
PATIENCE = 1800.0


def check_programs() -> None:
    """AssertionError, with the remedy, where images can be neither built nor run."""
    missing = [name for name in ("buildah", "crun", "mmdebstrap", "unshare") if not shutil.which(name)]
    remedy = "apt-get install --no-install-recommends buildah crun mmdebstrap util-linux"
    assert not missing, f"{', '.join(missing)} missing: {remedy}"
    assert os.geteuid() == 0, "images are built and run in chroots here, which takes root"


class ImageStore:
    """A storage of images in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: Seconds that each image took to build.
        self.build_seconds: dict[str, float] = {}
        self._mounts: dict[str, Path] = {}
        self._environment = os.environ | {"IMAGE_BUILDER": "buildah", "TMPDIR": str(folder)}
        self._environment["CONTAINERS_STORAGE_CONF"] = str(folder / "storage.conf")
        self._choose_driver()

    def _choose_driver(self) -> None:
        """Layers are mounted, or copied where the kernel has no overlay for this folder."""
        for driver in ("overlay", "vfs"):
            words = f'driver = "{driver}"\nrunroot = "{self.folder}/run"\ngraphroot = "{self.folder}/root"'
            (self.folder / "storage.conf").write_text(f"[storage]\n{words}\n")
            self._environment["STORAGE_DRIVER"] = driver
            works = subprocess.run(
                ["buildah", "info"], env=self._environment, capture_output=True, timeout=PATIENCE
            )
            if works.returncode == 0:
                return

    def make_base(self) -> None:
        """Makes the image that the Dockerfiles build on."""
        self._run("sh", str(DOCKER / "base.sh"))

    def build(self, target: str, arguments: str) -> str:
        """Builds an image as `make images` does, with more `arguments` for the builder; returns its name."""
        started = time.monotonic()
        self._environment["IMAGE_BUILD_ARGS"] = arguments
        self._run("sh", str(DOCKER / "build.sh"), target)
        self.build_seconds[target] = time.monotonic() - started
        return f"localhost/triptych-{target}"

    def configuration(self, image: str) -> dict[str, Any]:
        """What the image says of its containers, in Docker's words."""
        found: dict[str, Any] = self._inspect(image)["Docker"]["config"]
        return found

    def history(self, image: str) -> str:
        """What is kept of how the image was made."""
        return json.dumps(self._inspect(image)["Docker"]["history"])

    def mounted(self, image: str) -> Path:
        """The folder with the image's files."""
        if image not in self._mounts:
            container = self._run("buildah", "from", "--pull-never", self._tagged(image)).strip()
            self._mounts[image] = Path(self._run("buildah", "mount", container).strip())
        return self._mounts[image]

    def megabytes(self, image: str) -> float:
        """Size of the image's files."""
        return int(self._run("du", "-sb", str(self.mounted(image))).split()[0]) / 1e6

    def unmount(self) -> None:
        """Unmounts every image."""
        self._run("buildah", "rm", "--all")

    def _inspect(self, image: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            self._run("buildah", "inspect", "--type", "image", self._tagged(image))
        )
        return found

    def _tagged(self, image: str) -> str:
        from triptych import __version__

        return image if image == BASE else f"{image}:{__version__}"

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self._environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
        )
        words = f"{shlex.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.returncode == 0, words
        return done.stdout


@contextmanager
def image_store(folder: Path) -> Iterator[ImageStore]:
    """A storage that leaves nothing behind; its images are gigabytes."""
    check_programs()
    store = ImageStore(folder)
    try:
        yield store
    finally:
        store.unmount()
        shutil.rmtree(folder)


def host_pip_words() -> str:
    """The builder's words for this machine's own pip settings."""
    command = [sys.executable, str(DOCKER / "host_pip.py")]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
