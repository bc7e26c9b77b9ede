"""The library of the kernels: from the wheel, the cache, or compiled now. setup.py runs it by its path.

`python -m triptych.kernels.library` compiles it beside its sources, where every user of a checkout finds it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
#: Where a wheel has the library.
INSTALLED = SOURCES
#: Contraction would round the resize's weights otherwise than Pillow. What GCC's own headers are warned of
#: (its bug 105593) is left out.
FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
)
_LIMIT_SECONDS = 300.0
_POLL_SECONDS = 0.2


class BuildError(Exception):
    """Why there is no library, in one line."""


def library_name() -> str:
    """File name of the library of these sources, with a digest of all that decides its content."""
    digest = hashlib.sha256(repr((FLAGS, platform.machine())).encode())
    for source in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(f"{source.name}\0".encode() + source.read_bytes())
    return f"triptych_kernels-{digest.hexdigest()[:16]}.so"


def compiler() -> str | None:
    """The C++ compiler: the one that CXX names, else g++."""
    return shutil.which(os.environ.get("CXX") or "g++")


def compile_library(folder: Path) -> Path:
    """Compiles the library into `folder`, where it appears whole or not at all; BuildError."""
    command = compiler()
    if command is None:
        raise BuildError("there is no C++ compiler")
    target = folder / library_name()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder), tempfile.TemporaryDirectory(dir=folder) as scratch:
            if target.is_file():
                return target
            made = Path(scratch) / target.name
            sources = sorted(map(str, SOURCES.glob("*.cpp")))
            code, said = _run([command, *FLAGS, "-o", str(made), *sources])
            if code:
                raise BuildError(f"{command} failed: {' '.join(said.split())[:300]}")
            made.replace(target)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command} took more than {_LIMIT_SECONDS:g} s") from None
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error}") from error
    return target


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Held by one process of this machine, until its end: a cluster's workers start together. BuildError when
    another one has it for longer than it may take."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError("another process has been compiling them for too long") from None
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _run(command: list[str]) -> tuple[int, str]:
    """Its exit code and errors. At the time limit it ends with what it has started: g++ starts a compiler."""
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    ) as process:
        try:
            said = process.communicate(timeout=_LIMIT_SECONDS)[1]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, said


@functools.cache
def kernel_library() -> ctypes.CDLL | None:
    """The library; None, with one line in the log, where there is none and none can be compiled."""
    try:
        return _load()
    except (BuildError, OSError) as error:
        logger.warning(
            "no compiled kernels, so that pictures, and attention on a CPU, take twice the CPU time: %s; "
            "install g++ (Debian: apt-get install g++), or a wheel that was built where it is",
            " ".join(str(error).split()),
        )
        return None


def _load() -> ctypes.CDLL:
    cache = cache_folder()
    for folder in (INSTALLED, cache):
        if (folder / library_name()).is_file():
            return ctypes.CDLL(str(folder / library_name()))
    logger.info("compiling the kernels, once on this machine")
    return ctypes.CDLL(str(compile_library(cache)))


def cache_folder() -> Path:
    """Where this user's machine keeps what the kernels need compiled, or measured, once."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return base / "triptych" / "kernels"


if __name__ == "__main__":
    try:
        compile_library(INSTALLED)
    except BuildError as error:
        logger.warning("the kernels are not compiled: %s", error)
