"""Device and memory of each worker of one machine, where the flags do not set them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from triptych.apps.launch.plan.devices import Gpu, Need, Share, find_devices, place_workers, share_table
from triptych.apps.launch.plan.memory import (
    WORKER_BASE_BYTES,
    check_fits,
    decoding_budget,
    plan_memory,
    weight_bytes,
)
from triptych.base.config import CUDA_CONTEXT_BYTES, GIB, MIB, ServeConfig
from triptych.base.machine.resources import available_memory

logger = logging.getLogger(__name__)

#: Estimates for a GPU before measuring it: bytes of a step above the weights, and the least useful KV cache.
_ACTIVATION_BYTES = GIB
_LEAST_KV_BYTES = 256 * MIB


def check_memory(config: ServeConfig) -> dict[str, Share]:
    """The memory of workers that decode on a CPU, by name; ConfigError, with the table, if it does not fit.

    GPUs are not considered here.
    """
    pd, on_cpu = config.pd, config.pd.device == "cpu"
    weights = weight_bytes(Path(config.model), "float32" if pd.dtype == "auto" else pd.dtype, pd.quantization)
    plan = plan_memory(weights, config)
    available = available_memory()
    check_fits(plan, available)
    if not on_cpu or pd.kv_memory or pd.device_memory:
        return {}
    own = WORKER_BASE_BYTES + weights + pd.embedding_memory + config.swap_memory
    if config.counts.replicas:
        own += config.encoder.encoder_media_memory + config.encoder.prepared_memory
    budget = decoding_budget(plan, available, own=own, decoding=config.counts.decoding)
    kinds = config.counts.kinds
    return {name: Share(name, pd.device, budget) for name, kind in kinds.items() if kind != "encoder"}


def place_on_gpus(
    config: ServeConfig, find: Callable[[str], Sequence[Gpu]] = find_devices
) -> dict[str, Share]:
    """The device and memory of each worker, by name; ConfigError where the GPUs have no room for one."""
    if not config.pd.device.startswith("cuda"):
        return {}
    devices = find(config.pd.device)
    weights = weight_bytes(Path(config.model), config.pd.dtype, config.pd.quantization)
    shares = place_workers(devices, gpu_needs(weights, config))
    logger.info("memory of the GPUs:\n%s", share_table(devices, shares))
    return {share.worker: share for share in shares}


def gpu_needs(weights: int, config: ServeConfig) -> list[Need]:
    """The least bytes of each worker on each of its GPUs.

    A worker counts with all `weights`, an upper bound, and ranks of a decoder with their shares of them.
    """
    given, ranks = config.pd.device_memory, config.ranks

    def least(kind: str) -> int:
        if kind == "encoder":
            return CUDA_CONTEXT_BYTES + weights + _ACTIVATION_BYTES
        kv = (config.pd.kv_memory or _LEAST_KV_BYTES) // ranks[kind]
        return (
            CUDA_CONTEXT_BYTES + weights // ranks[kind] + _ACTIVATION_BYTES + config.pd.embedding_memory + kv
        )

    return [
        Need(name, given or least(kind), grows=kind != "encoder" and not given, ranks=ranks[kind])
        for name, kind in config.counts.kinds.items()
    ]
