"""Attention backends: a Triton kernel on CUDA, one in C++ on a CPU, and torch's attention elsewhere.

"triton" (`block_attention`) and "cpu" (`cpu_attention`) read keys and values in their blocks; "sdpa"
(`gathered_attention`) gathers them, sequence by sequence.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from triptych.base.errors import ConfigError
from triptych.kernels.cpu_attention import takes
from triptych.kernels.library import kernel_library

#: Values of --attention-backend.
BACKENDS = ("auto", "triton", "cpu", "sdpa")


def backend_on(device: torch.device, name: str) -> str:
    """The backend that this --attention-backend is on a device; ConfigError where it has none such."""
    if name == "triton" and device.type != "cuda":
        raise ConfigError("--attention-backend triton is for CUDA: use auto, which is cpu on a CPU")
    if name == "cpu" and (device.type != "cpu" or kernel_library() is None):
        raise ConfigError(
            "--attention-backend cpu is for a CPU, and needs g++ or a wheel with kernels: use auto"
        )
    if name != "auto":
        return name
    if device.type == "cuda":
        return "triton" if find_spec("triton") is not None else "sdpa"
    return "cpu" if device.type == "cpu" and kernel_library() is not None else "sdpa"


def gathers(backend: str, dtype: torch.dtype) -> bool:
    """Whether this backend gathers keys and values of this type."""
    return backend == "sdpa" or (backend == "cpu" and not takes(dtype))
