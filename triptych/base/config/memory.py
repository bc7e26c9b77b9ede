"""Sizes: how they are written, and the shares of a machine's memory that workers may use."""

from __future__ import annotations

import re

from triptych.base.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30
#: For embeddings, in a PD worker whose memory is not measured.
EMBEDDING_MEMORY = 256 * MIB
#: For states of recurrent layers, likewise.
STATE_MEMORY = 256 * MIB
#: Of the memory that is free before workers start, what they may use: of a GPU, and of a machine or cgroup.
CUDA_SHARE = 0.9
CPU_SHARE = 0.5
#: What a process holds of a GPU beside its tensors: the context, kernels and the workspaces of libraries.
CUDA_CONTEXT_BYTES = 600 * MIB
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of "512MiB", "2g" or "1048576"; units are powers of 1024. ConfigError otherwise."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a size: write it like 512MiB or 2GiB")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


def format_size(nbytes: float) -> str:
    """Bytes for people: "512.0 MiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
